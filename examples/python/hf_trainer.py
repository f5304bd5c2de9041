"""Trains a classifier of digits with the Trainer of Hugging Face, on any number of processes, and resumes after a crash.

python prepare.py
millrace train --script hf_trainer.py --nproc-per-node 2

The Trainer writes a checkpoint into a folder of the machine. A callback copies it into the volume `runs`, with the position
of the feed as its last file, which makes it whole. When a process dies, the launcher restarts all of them, and they go on
from the last whole checkpoint. The script counts each row that the weights have seen. Set DIE_AT=25 to let one process kill
itself at step 25.
"""

import os
import signal
import tempfile
from pathlib import Path

import fsspec
import millrace
import millrace.torch
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

DATASET = "digits-python@v1:/train"
FOLDER = "/hf-trainer"
EPOCHS = 2


class Digits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels / 16)


class FeedTrainer(Trainer):
    """A Trainer whose batches are those of a feed, which gives each process its part already."""

    # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
    seen = torch.zeros(1797, dtype=torch.int64)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)

    def compute_loss(self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None):
        rows = torch.tensor(len(inputs["id"]))
        dist.all_reduce(rows)
        self.seen += torch.bincount(inputs["id"], minlength=1797)
        # DDP averages gradients over processes; their parts of a batch may have different sizes.
        part = cross_entropy(model(inputs["pixels"]), inputs["label"].long(), reduction="sum")
        return part * dist.get_world_size() / rows

    def counts(self) -> torch.Tensor:
        total = self.seen.clone()
        dist.all_reduce(total)
        return total


class StoreInVolume(TrainerCallback):
    def __init__(self, trainer: FeedTrainer) -> None:
        self.trainer = trainer

    def on_save(self, args: TrainingArguments, state, control, **rest: object) -> None:
        total = self.trainer.counts()
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            files = fsspec.filesystem("millrace")
            for file in Path(args.output_dir, name).iterdir():
                files.put_file(str(file), f"runs{FOLDER}/{name}/{file.name}")
            feed = self.trainer.train_dataset.state_dict()
            millrace.torch.save({"feed": feed, "seen": total}, f"runs:{FOLDER}/{name}/feed.pt")

    def on_log(self, args: TrainingArguments, state, control, logs: dict, **rest: object) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.3f}")

    def on_step_end(self, args: TrainingArguments, state, control, **rest: object) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        is_last = dist.get_rank() == dist.get_world_size() - 1
        if is_first and is_last and state.global_step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


def newest(runs: millrace.Volume) -> str | None:
    """The name of the last whole checkpoint."""
    try:
        names = [entry.path.rpartition("/")[2] for entry in runs.list(FOLDER)]
    except millrace.NotFoundError:
        return None
    for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        if any(entry.path.endswith("/feed.pt") for entry in runs.list(f"{FOLDER}/{name}")):
            return name
    return None


def main() -> None:
    dataset = millrace.torch.FeedDataset(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank="env", columns=["id", "pixels", "label"]
    )
    runs = millrace.Volume("runs", create=True)
    folder = tempfile.TemporaryDirectory()
    arguments = TrainingArguments(
        folder.name,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_timeout=60,
        # The feed makes the epochs: batches roll over from one to the next.
        max_steps=len(dataset.feed),
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_steps=10,
        logging_steps=5,
        disable_tqdm=True,
        report_to=[],
        # The position of the feed replaces the batches that the Trainer would read and drop.
        ignore_data_skip=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = FeedTrainer(Digits(), arguments, train_dataset=dataset)
    trainer.add_callback(StoreInVolume(trainer))
    name = newest(runs)
    if name is not None:
        fsspec.filesystem("millrace").get(f"runs{FOLDER}/{name}", f"{folder.name}/{name}", recursive=True)
        stored = millrace.torch.load(f"runs:{FOLDER}/{name}/feed.pt")
        dataset.load_state_dict(stored["feed"])
        # One process keeps what all have counted.
        trainer.seen += stored["seen"] if dist.get_rank() == 0 else 0
    trainer.train(resume_from_checkpoint=None if name is None else f"{folder.name}/{name}")
    total = trainer.counts()
    if trainer.is_world_process_zero():
        counted = total[total > 0]
        assert set(counted.tolist()) == {EPOCHS} and len(counted) == dataset.feed.rows, "a row was lost or repeated"
        print(f"{trainer.state.global_step} steps; each of {dataset.feed.rows} rows counts {EPOCHS} times")
    folder.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
