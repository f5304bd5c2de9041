"""Trains a classifier of digits with FSDP: each process holds, updates and stores its part of the weights.

python prepare.py
millrace train --script fsdp.py --nproc-per-node 2

When a process dies, the launcher restarts all of them. They go on from the last whole checkpoint of
torch.distributed.checkpoint, which any number of processes can load. The script counts each row that the weights have seen.
Set DIE_AT=25 to let one process kill itself at step 25. Started again after its end, it finishes at once; `millrace volume
delete runs --yes` lets it begin anew.
"""

import os
import signal
from datetime import timedelta

import millrace
import millrace.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

DATASET = "digits-python@v1:/train"
CHECKPOINTS = "runs:/fsdp"
EPOCHS = 2


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    feed = millrace.Feed(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank="env", columns=["id", "pixels", "label"], format="torch"
    )
    steps = len(feed)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    mesh = init_device_mesh("cpu", (world,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
    seen, step = torch.zeros(1797, dtype=torch.int64), 0
    millrace.Volume("runs", create=True)

    def state(total: torch.Tensor) -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "feed": feed.state_dict(), "step": step, "seen": total}

    found = millrace.torch.checkpoints(CHECKPOINTS)
    if found:
        stored = state(seen.clone())
        dcp.load(stored, storage_reader=millrace.torch.StorageReader(found[-1]))
        set_state_dict(model, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
        feed.load_state_dict(stored["feed"])
        step = stored["step"]
        # One process keeps what all have counted.
        seen += stored["seen"] if rank == 0 else 0

    def counts() -> torch.Tensor:
        total = seen.clone()
        dist.all_reduce(total)
        return total

    def save() -> None:
        dcp.save(state(counts()), storage_writer=millrace.torch.StorageWriter(f"{CHECKPOINTS}/step-{step}"))

    for batch in feed:
        step += 1
        rows = torch.tensor(len(batch["id"]))
        dist.all_reduce(rows)
        # FSDP averages gradients over processes; their parts of a batch may have different sizes.
        part = cross_entropy(model(batch["pixels"] / 16), batch["label"].long(), reduction="sum") / rows
        optimizer.zero_grad()
        (part * world).backward()
        optimizer.step()
        seen += torch.bincount(batch["id"], minlength=1797)
        if step % 10 == 1:
            loss = part.detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {loss:.3f}")
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
