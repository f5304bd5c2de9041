#!/usr/bin/env python3
"""Training throughput beside eager PyTorch and DistributedDataParallel over gloo, in one run.

  benches/trainer.py --program PATH [--rounds N] [--only NAME,...] [--json FILE]

`make bench-trainer` builds the program and installs PyTorch. Each figure is a median of rounds in which all variants
take turns. Every process computes with one thread. Millrace runs whole jobs on a dataset in a volume, and the figure is
`samples_per_second` of its report. PyTorch trains on the same number of rows in memory, in random order.

  trainer/mlp_*  784-512-512-10, batch 128, SGD; the control is PyTorch
  trainer/cnn_*  28x28, 3x3x16, pool, 3x3x32, pool, linear, batch 64, SGD; the control is PyTorch
  trainer/two_*  speed-up of two workers over one, the MLP with batch 1536; the control is that of DDP
"""
import argparse
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, WIDTH, CLASSES = 6144, 784, 10
# Passes over the rows: some seconds of each variant.
EPOCHS = {"mlp": 12, "cnn": 1, "two": 24}
BATCH = {"mlp": 128, "cnn": 64, "two": 1536}
MODEL = {
    "mlp": f'{{ kind = "mlp", inputs = {WIDTH}, hidden = [512, 512], classes = {CLASSES} }}',
    "cnn": f'{{ kind = "cnn", height = 28, width = 28, filters = [16, 32], classes = {CLASSES} }}',
}
MODEL["two"] = MODEL["mlp"]
KEYS = {
    "fast": 'strategy = "allreduce"\n',
    "strict4": "virtual_shards = 4\n",
    "strict12": "virtual_shards = 12\n",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def torch_rate(task, rank=0, world=1, port=0):
    """Samples per second of this process and its peers together."""
    import torch
    import torch.distributed
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    if task == "cnn":
        model = nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, CLASSES),
        )  # fmt: skip
    else:
        model = nn.Sequential(
            nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        )  # fmt: skip
    if world > 1:
        place = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.rand(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    rows = BATCH[task] // world

    def epoch():
        order = torch.randperm(ROWS)
        for first in range(rank * rows, ROWS, rows * world):
            chosen = order[first : first + rows]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            # What a training loop reports.
            loss.item()

    began = time.perf_counter()
    for _ in range(EPOCHS[task]):
        epoch()
    return ROWS * EPOCHS[task] / (time.perf_counter() - began)


def torch_child(task, world):
    """The rate of `world` processes of PyTorch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--torch", task, "--world", str(world), "--port", str(port)]
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | ONE_THREAD, stdout=subprocess.PIPE)
        for rank in range(world)
    ]
    rates = [float(child.communicate()[0]) for child in children]
    if any(child.returncode for child in children):
        sys.exit(f"PyTorch failed: {task}")
    return min(rates)


class Millrace:
    """A home with the dataset `bench@rows:/rows`."""

    def __init__(self, program, folder):
        self.program, self.folder, self.jobs = program, folder, 0
        records = folder / "records.jsonl"
        values = random.Random(1)
        with records.open("w") as lines:
            for row in range(ROWS):
                pixels = [values.randrange(1000) / 1000 for _ in range(WIDTH)]
                print(json.dumps({"x": pixels, "label": row % CLASSES}), file=lines)
        self.run("produce", "rows", records)
        self.run("ingest", "--topic", "rows", "--volume", "bench")
        self.run("snapshot", "create", "bench@rows")

    def run(self, *arguments):
        command = [self.program, "--json", *map(str, arguments)]
        environment = os.environ | ONE_THREAD | {"MILLRACE_HOME": str(self.folder / "home")}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{command}: {done.stderr}")
        return done.stdout

    def rate(self, task, keys, workers):
        # A seed of its own makes each a run that was never published.
        self.jobs += 1
        job = self.folder / "train.toml"
        job.write_text(
            f'name = "bench"\ndataset = "bench@rows:/rows"\nfeatures = "x"\nlabel = "label"\n'
            f"model = {MODEL[task]}\nbatch_rows = {BATCH[task]}\nepochs_max = {EPOCHS[task]}\n"
            f'optimizer = {{ kind = "sgd", learning_rate = 0.01, momentum = 0.0 }}\n'
            f"seed = {self.jobs}\nworkers = {workers}\n{KEYS[keys]}"
        )
        return json.loads(self.run("train", job))["samples_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="a release build of millrace")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="the figures whose names contain one of these words, separated by commas")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures and all rounds to this file")
    for internal in ("--torch", "--rank", "--world", "--port"):
        parser.add_argument(internal, type=str if internal == "--torch" else int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        print(torch_rate(options.torch, options.rank, options.world, options.port))
        return
    if not options.program:
        parser.error("--program is missing")
    words = options.only.split(",") if options.only else [""]
    names = [f"{task}_{keys}" for task in ("mlp", "cnn", "two") for keys in KEYS]
    names = [name for name in names if any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        millrace = Millrace(options.program.resolve(), pathlib.Path(folder))
        variants = {}
        for name in names:
            task, keys = name.split("_")
            for workers in (1, 2) if task == "two" else (1,):
                variants[f"{task}_torch", workers] = lambda t=task, w=workers: torch_child(t, w)
                variants[name, workers] = lambda t=task, k=keys, w=workers: millrace.rate(t, k, w)
        rates = {variant: [] for variant in variants}
        for _ in range(options.rounds):
            for variant, measure in variants.items():
                rates[variant].append(measure())
    medians = {variant: statistics.median(found) for variant, found in rates.items()}

    def value(name):
        return medians[name, 2] / medians[name, 1] if name.startswith("two") else medians[name, 1]

    figures = []
    for name in names:
        task = name.split("_")[0]
        ours, control = value(name), value(f"{task}_torch")
        unit = "x" if task == "two" else "samples/s"
        against = "DDP over gloo" if task == "two" else "eager PyTorch"
        figures.append(
            {"name": f"trainer/{name}", "value": ours, "unit": unit, "control": control, "ratio": ours / control, "against": against}
        )  # fmt: skip
    print("| figure | ours | control | ratio | control is |\n|---|---:|---:|---:|---|")
    for figure in figures:
        digits = 2 if figure["unit"] == "x" else 0
        ours, control = (f"{figure[key]:.{digits}f}" for key in ("value", "control"))
        print(f"| `{figure['name']}` | {ours} {figure['unit']} | {control} | {figure['ratio']:.2f} | {figure['against']} |")
    rounds = {f"{name} x{workers}": found for (name, workers), found in rates.items()}
    report = json.dumps({"figures": figures, "rounds": rounds})
    print(report)
    if options.json:
        options.json.write_text(report + "\n")


if __name__ == "__main__":
    main()
