"""Trains a classifier of digits with PyTorch Lightning, on any number of processes, and resumes after a crash.

python prepare.py
millrace train --script lightning_ddp.py --nproc-per-node 2

Lightning writes its checkpoints into the volume `runs` through fsspec. They hold the position of the feed, too. When a
process dies, the launcher restarts all of them, and they go on from the last checkpoint. The script counts each row that the
weights have seen. Set DIE_AT=25 to let one process kill itself at step 25.
"""

import os
import signal
from datetime import timedelta

import lightning
import millrace
import millrace.torch
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

DATASET = "digits-python@v1:/train"
FOLDER = "millrace://runs/lightning"
EPOCHS = 2


class Digits(lightning.LightningModule):
    def __init__(self, dataset: millrace.torch.FeedDataset) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        self.dataset, self.taken = dataset, 0
        # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
        self.seen = torch.zeros(1797, dtype=torch.int64)

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        rows = torch.tensor(len(batch["id"]))
        dist.all_reduce(rows)
        # Here, and not at the end of the batch: Lightning calls its callbacks, which store the checkpoint, before the module.
        self.taken += 1
        self.seen += torch.bincount(batch["id"], minlength=1797)
        # DDP averages gradients over processes; their parts of a batch may have different sizes.
        part = cross_entropy(self.layers(batch["pixels"] / 16), batch["label"].long(), reduction="sum")
        return part * self.trainer.world_size / rows

    def on_train_batch_end(self, outputs: dict, batch: dict, index: int) -> None:
        step = self.trainer.global_step
        if step % 10 == 1 and self.trainer.is_global_zero:
            print(f"step {step}: loss {outputs['loss']:.3f}")
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if is_first and is_last and step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)

    def counts(self) -> torch.Tensor:
        total = self.seen.clone()
        dist.all_reduce(total)
        return total

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # Lightning reads a batch ahead: only the number of batches that were trained tells the position.
        checkpoint["feed"], checkpoint["seen"] = self.dataset.state_after(self.taken), self.counts()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.dataset.load_state_dict(checkpoint["feed"])
        # One process keeps what all have counted.
        self.seen += checkpoint["seen"] if self.trainer.is_global_zero else 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    lightning.seed_everything(0)
    dataset = millrace.torch.FeedDataset(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank="env", columns=["id", "pixels", "label"]
    )
    runs = millrace.Volume("runs", create=True)
    model = Digits(dataset)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)),
        # The feed makes the epochs: batches roll over from one to the next.
        max_epochs=1,
        callbacks=[ModelCheckpoint(FOLDER, "checkpoint", every_n_train_steps=10, enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        runs.info("/lightning/checkpoint.ckpt")
        resume = f"{FOLDER}/checkpoint.ckpt"
    except millrace.NotFoundError:
        resume = None
    trainer.fit(model, DataLoader(dataset, batch_size=None), ckpt_path=resume)
    total = model.counts()
    if trainer.is_global_zero:
        counted = total[total > 0]
        assert set(counted.tolist()) == {EPOCHS} and len(counted) == dataset.feed.rows, "a row was lost or repeated"
        print(f"{trainer.global_step} steps; each of {dataset.feed.rows} rows counts {EPOCHS} times")


if __name__ == "__main__":
    main()
