"""Trains a classifier of digits with torchft: when a replica group dies, the others go on without a restart.

python prepare.py
torchft_lighthouse --bind [::]:29510 --min_replicas 1 &
export TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUPS=2
millrace train --script replica_groups.py --name group-0 &
millrace train --script replica_groups.py --name group-1

Each group is a job of its own, which starts its process again when it dies. It then takes weights, position and counts from
a survivor. At each step, the groups that take part share the global batch: the order of the rows does not depend on their
number. A step that a death has spoiled changes nothing, and its batch is read again by the survivors. So each row counts
once per epoch in the weights; the script counts that. Set DIE_AT=25 for one group, and it kills itself inside step 25.
"""

import os
import signal
from datetime import timedelta

import millrace
import millrace.torch
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, ProcessGroupGloo

DATASET = "digits-python@v1:/train"
CHECKPOINT = "runs:/replica-groups/checkpoint.pt"
EPOCHS = int(os.environ.get("EPOCHS", "2"))
# Groups that begin together.
REPLICA_GROUPS = int(os.environ.get("REPLICA_GROUPS", "1"))
DIE_AT = int(os.environ.get("DIE_AT", "0"))


def open_feed(rank: int, world: int) -> millrace.Feed:
    """The part of one group. One process per group: with more, the rank counts them, too."""
    return millrace.Feed(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank=rank, world=world, columns=["id", "pixels", "label"], format="torch"
    )


def main() -> None:
    # The meeting point of the processes of this group.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    feed = open_feed(0, 1)
    steps, rows = len(feed), feed.rows
    # What a group that comes back needs beside the weights. How often each row is counted in the weights, by its id.
    progress = {"feed": feed.state_dict(), "seen": torch.zeros(1797, dtype=torch.int64)}

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}

    def load(stored: dict) -> None:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        progress.update(feed=stored["feed"], seen=stored["seen"].clone())

    # With use_async_quorum=False, a group that comes back has the weights of the others before it computes.
    timeout = timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        hostname=os.environ["MASTER_ADDR"],
        replica_id=os.environ["MILLRACE_JOB"],
    )
    try:
        stored = millrace.torch.load(CHECKPOINT)
    except millrace.NotFoundError:
        millrace.Volume("runs", create=True)
    else:
        load(stored)
        manager.load_state_dict(stored["manager"])

    place, is_healthy = None, True
    while manager.current_step() < steps:
        # The groups that take part in this step; one that comes back has loaded the state of another now.
        manager.start_quorum()
        if manager.current_step() == 0 and manager.num_participants() < REPLICA_GROUPS:
            continue
        now = manager.participating_rank(), manager.num_participants()
        if now != place or feed.state_dict() != progress["feed"] or not is_healthy:
            if now != place:
                print(f"step {manager.current_step() + 1}: group {now[0]} of {now[1]}")
                feed, place = open_feed(*now), now
            feed.load_state_dict(progress["feed"])
        batch = next(feed)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and manager.current_step() + 1 == DIE_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = cross_entropy(model(batch["pixels"] / 16), batch["label"].long(), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        # A batch between two epochs may have a row twice.
        count, total = torch.bincount(batch["id"], minlength=1797), loss.detach()
        # Gradients and counts pass the same vote: a row counts where its gradient does. The hook of torchft's
        # DistributedDataParallel (0.2.0) ends the process if a group dies between two of its messages.
        for tensor in (count, total, *(parameter.grad for parameter in model.parameters())):
            manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        is_healthy = manager.should_commit()
        if not is_healthy:
            continue
        for parameter in model.parameters():
            parameter.grad /= count.sum()
        optimizer.step()
        progress.update(feed=feed.state_dict(), seen=progress["seen"] + count)
        step = manager.current_step()
        if step % 10 == 1:
            print(f"step {step}: loss {total / count.sum():.3f}")
        if now[0] == 0 and (step % 10 == 0 or step == steps):
            millrace.torch.save({**state(), "manager": manager.state_dict()}, CHECKPOINT)
    manager.shutdown(wait=False)
    seen = progress["seen"]
    assert set(seen[seen > 0].tolist()) == {EPOCHS} and int((seen > 0).sum()) == rows, "a row was lost or repeated"
    print(f"{manager.current_step()} steps; each of {rows} rows counts {EPOCHS} times")
    del store


if __name__ == "__main__":
    main()
