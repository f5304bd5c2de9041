"""Trains a classifier of digits with DistributedDataParallel, on any number of processes, and resumes after a crash.

python prepare.py    (PyTorch 2.0 or newer)
millrace train --script ddp.py --nproc-per-node 2

When a process dies, the launcher restarts all of them. They go on after the last checkpoint, so each row counts once per
epoch in the weights; the script counts that. Set DIE_AT=25 to let one process kill itself at step 25. Started again after
its end, it finishes at once; `millrace volume delete runs --yes` lets it begin anew.

torchrun restarts them, too. It keeps one store for all rounds, in which new processes may find the addresses of dead ones
("Gloo connectFullMesh failed"). TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each round a store of its own.
"""

import os
import signal
from datetime import timedelta

import millrace
import millrace.torch
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

DATASET = "digits-python@v1:/train"
CHECKPOINT = "runs:/ddp/checkpoint.pt"
EPOCHS = 2


def main() -> None:
    # Without a limit, processes that meet again after a crash may wait for half an hour; the launcher restarts those that fail.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    feed = millrace.Feed(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank="env", columns=["id", "pixels", "label"], format="torch"
    )
    steps = len(feed)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
    seen, step = torch.zeros(1797, dtype=torch.int64), 0
    try:
        stored = millrace.torch.load(CHECKPOINT)
    except millrace.NotFoundError:
        millrace.Volume("runs", create=True)
    else:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        feed.load_state_dict(stored["feed"])
        step = stored["step"]
        # One process keeps what all have counted.
        seen += stored["seen"] if rank == 0 else 0

    def counts() -> torch.Tensor:
        total = seen.clone()
        dist.all_reduce(total)
        return total

    def save() -> None:
        total = counts()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feed": feed.state_dict()}
            millrace.torch.save({**state, "step": step, "seen": total}, CHECKPOINT)

    for batch in feed:
        step += 1
        rows = torch.tensor(len(batch["id"]))
        dist.all_reduce(rows)
        # DDP averages gradients over processes; their parts of a batch may have different sizes.
        loss = cross_entropy(model(batch["pixels"] / 16), batch["label"].long(), reduction="sum") * world / rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 1:
            total = loss.detach() / world
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {total:.3f}")
        seen += torch.bincount(batch["id"], minlength=1797)
        # Behind the loop, the position would be that of the epochs that follow.
        if step % 10 == 0 or step == steps:
            save()
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and rank == world - 1 and step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
    total = counts()
    if rank == 0:
        counted = total[total > 0]
        assert set(counted.tolist()) == {EPOCHS} and len(counted) == feed.rows, "a row was lost or repeated"
        print(f"{step} steps; each of {feed.rows} rows counts {EPOCHS} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
