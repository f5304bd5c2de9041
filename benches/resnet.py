#!/usr/bin/env python3
"""ResNet-18 on a GPU beside eager PyTorch: images per second, and the share of the time that training waits for the feed.

  benches/resnet.py --program PATH [--device cuda] [--images N] [--side PIXELS] [--rounds N] [--json FILE]

The program is a build with `--features cuda`; `make gpu PYTHON=INTERPRETER` runs this, too. Needs PyTorch and onnx.
Batch 64, SGD with momentum, in float32 and in bf16. Millrace reads PNG files from a volume and decodes them; the control
trains on images that are already in the memory of the device. Each variant takes its turn in each round. A rate is that of
the later epochs, as kernels are compiled and chosen in the first. `--device cpu` runs the same on the processor.
"""
import argparse
import json
import math
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

BATCH, CLASSES, EPOCHS = 64, 10, 3
PRECISIONS = ("fp32", "bf16")


def resnet18():
    """The layers of torchvision's resnet18, for CLASSES classes."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.first_norm = nn.BatchNorm2d(outside)
            self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.second_norm = nn.BatchNorm2d(outside)
            self.shortcut = nn.Identity()
            if stride > 1 or inside != outside:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
                )

        def forward(self, x):
            inner = self.first_norm(self.first(x)).relu()
            return (self.second_norm(self.second(inner)) + self.shortcut(x)).relu()

    torch.manual_seed(1)
    blocks, inside = [], 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def export(file, side):
    import torch

    torch.onnx.export(
        resnet18().train(), torch.rand(2, 3, side, side), file, dynamo=False, input_names=["image"],
        output_names=["classes"], training=torch.onnx.TrainingMode.TRAINING,
        dynamic_axes={"image": {0: "batch"}, "classes": {0: "batch"}},
    )  # fmt: skip


def torch_rate(precision, options):
    """Images per second after the first epoch."""
    import torch

    model = resnet18().train().to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.rand(options.images, 3, options.side, options.side, device=options.device)
    labels = torch.randint(0, CLASSES, (options.images,), device=options.device)
    kind = torch.device(options.device).type

    def epoch():
        order = torch.randperm(options.images, device=options.device)
        for first in range(0, options.images, BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            # What a training loop reports; it waits for the device.
            loss.item()

    epoch()
    began = time.perf_counter()
    for _ in range(EPOCHS - 1):
        epoch()
    return options.images * (EPOCHS - 1) / (time.perf_counter() - began)


def png(side, values):
    """An image of smooth colours, as a file."""
    waves = [(values.uniform(0.01, 0.1), values.uniform(0, 6)) for _ in range(3)]
    line = [[int(127 + 127 * math.sin(rate * at + start)) for at in range(side)] for rate, start in waves]
    rows = bytearray()
    for row in range(side):
        rows += b"\0" + bytes(channel[at] ^ (row & 31) for at in range(side) for channel in line)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(rows), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


class Millrace:
    """A home with the dataset `folder:bench@images:/train`."""

    def __init__(self, options, folder):
        self.options, self.folder, self.jobs = options, folder, 0
        values = random.Random(1)
        for image in range(options.images):
            place = folder / "images" / f"class-{image % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{image:06}.png").write_bytes(png(options.side, values))
        self.run("volume", "create", "bench")
        self.run("cp", "-r", folder / "images", "bench:/train")
        self.run("snapshot", "create", "bench@images")
        export(folder / "resnet18.onnx", options.side)

    def run(self, *arguments):
        command = [self.options.program.resolve(), "--json", *map(str, arguments)]
        environment = os.environ | {"MILLRACE_HOME": str(self.folder / "home")}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{command}: {done.stderr}")
        return done.stdout

    def train(self, precision, epochs):
        # A seed of its own makes each a run that was never published.
        self.jobs += 1
        job, side = self.folder / "train.toml", self.options.side
        job.write_text(
            'name = "bench"\ndataset = "folder:bench@images:/train"\nfeatures = "data"\nlabel = "label"\n'
            f'model = "resnet18.onnx"\nimages.data = {{ size = [{side}, {side}] }}\nbatch_rows = {BATCH}\n'
            f'epochs_max = {epochs}\nstrategy = "allreduce"\nprecision = "{precision}"\nworkers = 1\n'
            f'device = "{self.options.device}"\nseed = {self.jobs}\n'
            'optimizer = { kind = "sgd", learning_rate = 0.01, momentum = 0.9 }\n'
        )
        return json.loads(self.run("train", job))

    def rate(self, precision):
        """Images per second after the first epoch, and the share of the time that waits for the feed."""
        # What is chosen and compiled for a device is kept for the next process.
        _, first, all_of_them = (self.train(precision, epochs) for epochs in (1, 1, EPOCHS))
        micros = {key: all_of_them["spent"][key] - first["spent"][key] for key in first["spent"]}
        rows = self.options.images * (EPOCHS - 1)
        return rows / (sum(micros.values()) / 1e6), micros["feed_us"] / sum(micros.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True, help="a build of millrace with --features cuda")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--side", type=int, default=224, help="height and width of the images")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.images < BATCH or options.images % BATCH:
        parser.error(f"--images is a multiple of {BATCH}")
    ours, waits, control = ({precision: [] for precision in PRECISIONS} for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        millrace = Millrace(options, pathlib.Path(folder))
        for _ in range(options.rounds):
            for precision in PRECISIONS:
                rate, wait = millrace.rate(precision)
                ours[precision].append(rate)
                waits[precision].append(wait)
                control[precision].append(torch_rate(precision, options))
    print("| figure | ours | eager PyTorch | ratio | waits for the feed |\n|---|---:|---:|---:|---:|")
    figures = []
    for precision in PRECISIONS:
        rate, other = statistics.median(ours[precision]), statistics.median(control[precision])
        wait = statistics.median(waits[precision])
        name = f"trainer/resnet18_{precision}"
        figures.append(
            {"name": name, "value": rate, "unit": "images/s", "control": other, "ratio": rate / other, "waits": wait}
        )
        print(f"| `{name}` | {rate:.1f} images/s | {other:.1f} | {rate / other:.2f} | {100 * wait:.1f} % |")
    report = json.dumps({"figures": figures, "device": options.device, "side": options.side})
    print(report)
    if options.json:
        options.json.write_text(report + "\n")


if __name__ == "__main__":
    main()
