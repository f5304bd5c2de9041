"""Images to tensors: the feed against Pillow, photos of 500 x 375 pixels as JPEG to 224 x 224, on one core and on all.

The control decodes the same bytes with Pillow, scales them with its antialiased bilinear filter and brings them to
planes, in one thread. The feed does the same for a Parquet column. Both read the images in turn, several times; the best
of each counts. The figure of one core restricts the process to one.

Prints `images/<figure> <value> <unit> control=<value> ratio=<x>`; more is better. It needs Pillow and the wheel of a
release build: `.local/python-test/bin/python benches/images.py`.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from photo import photo
from PIL import Image


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--images", type=int, default=256, help="images of the dataset [default: %(default)s]")
    arguments.add_argument("--rounds", type=int, default=3, help="epochs that each reads [default: %(default)s]")
    arguments.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)
    arguments = arguments.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    else:
        subprocess.run([sys.executable, __file__, "--one-core", *sys.argv[1:]], check=True)
    home = tempfile.mkdtemp(prefix="millrace-bench-")
    try:
        run(arguments, home, "one_core" if arguments.one_core else "all_cores")
    finally:
        millrace.close()
        shutil.rmtree(home)


def run(arguments, home, figure):
    photos = [photo(seed) for seed in range(arguments.images)]
    volume = millrace.Volume("bench", create=True, home=home)
    with volume.open("/photos/0.parquet", "wb") as out:
        pyarrow.parquet.write_table(pyarrow.table({"image": photos}), out, row_group_size=64)
    volume.snapshot("v1")
    ours, control = [], []
    for round in range(arguments.rounds):
        started = time.perf_counter()
        feed = millrace.Feed(
            "bench@v1:/photos", batch_rows=32, seed=round, images={"image": millrace.Image(224)}, home=home
        )
        assert sum(len(batch["image"]) for batch in feed) == len(photos), "each image once"
        ours.append(len(photos) / (time.perf_counter() - started))
        # The next epoch reads anew.
        millrace.close()
        started = time.perf_counter()
        for content in photos:
            image = Image.open(io.BytesIO(content)).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
            numpy.ascontiguousarray(numpy.asarray(image).transpose(2, 0, 1))
        control.append(len(photos) / (time.perf_counter() - started))
    ours, control = max(ours), max(control)
    print(f"images/jpeg_{figure} {ours:.0f} images/s control={control:.0f} ratio={ours / control:.2f}")


main()
