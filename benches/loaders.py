"""The feed against other loaders: rows of 1 KiB to PyTorch tensors, shuffled, on one machine.

Every loader reads the same rows in its own format from a local folder, in a process of its own. Each row has to arrive
once. All loaders take turns, several times, with 0 and 2 worker processes where they have such; the best of each counts.
Shuffling differs, and is in the table: over the whole dataset, in a buffer, or inside blocks.

A second part reads JPEG photos of 500 x 375 pixels as tensors of 224 x 224, against torchvision's loader.

Prints `loaders/<name> <value> rows/s control=<ours> ratio=<x>`, the versions, and with `--svg FILE` a picture. Each
writing and each epoch has a time limit: what exceeds it is killed and did not finish, which its line says. A loader
that fails has its line as well, and the exit code is 1. `make bench-loaders` installs the loaders and runs it.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy

COLUMNS = 254
# Name, package, worker processes to try, how it shuffles.
ROWS = [
    ("millrace", "millrace", (0, 2), "whole dataset"),
    ("pyarrow", "pyarrow", (0,), "inside row groups"),
    ("memmap", "torch", (0, 2), "whole dataset, random access"),
    ("litdata", "litdata", (0, 2), "inside chunks"),
    ("mosaic", "mosaicml-streaming", (0, 2), "blocks"),
    ("webdataset", "webdataset", (0, 2), "buffer of 10,000 rows"),
    ("ray", "ray", (0,), "buffer of 10,000 rows"),
]
IMAGES = [("millrace_jpeg", "millrace", (0,), ""), ("torchvision_jpeg", "torchvision", (0, 2), "")]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=200_000, help="rows of the dataset [default: %(default)s]")
    arguments.add_argument("--images", type=int, default=512, help="photos of the dataset [default: %(default)s]")
    arguments.add_argument("--rounds", type=int, default=3, help="epochs that each reads [default: %(default)s]")
    arguments.add_argument("--only", help="only these loaders, separated by commas")
    arguments.add_argument("--svg", help="draw the figures into this file")
    arguments.add_argument(
        "--limit", type=float, default=300, help="seconds for each writing and each epoch [default: %(default)s]"
    )
    arguments.add_argument("--reader", help=argparse.SUPPRESS)
    arguments.add_argument("--writer", help=argparse.SUPPRESS)
    arguments.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    arguments.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = arguments.parse_args()
    if arguments.writer:
        WRITERS[arguments.writer](Path(arguments.folder), arguments)
        return
    if arguments.reader:
        # Loaders write to the standard output as well.
        (Path(arguments.folder) / RATE).write_text(json.dumps(measure(arguments)))
        return
    folder = Path(tempfile.mkdtemp(prefix="millrace-bench-"))
    try:
        is_whole = run(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if is_whole else 1)


def run(arguments, folder):
    wanted = None if arguments.only is None else {"millrace", "millrace_jpeg", *arguments.only.split(",")}
    rows = [loader for loader in ROWS if wanted is None or loader[0] in wanted]
    images = [loader for loader in IMAGES if wanted is None or loader[0] in wanted]
    # The best rate of each loader with its workers, and why others have none.
    best, troubles = {}, {}
    for name, *_ in rows + images:
        (folder / name).mkdir()
        trouble = stage(arguments, folder / name, ["--writer", name])
        if trouble:
            troubles[name, None] = f"written: {trouble}"
    for seed in range(arguments.rounds):
        for name, _, workers, _ in rows + images:
            for count in workers:
                if (name, None) in troubles or (name, count) in troubles:
                    continue
                trouble = stage(
                    arguments, folder / name, ["--reader", name, "--workers", str(count), "--seed", str(seed)]
                )
                if trouble:
                    troubles[name, count] = f"workers={count} {trouble}"
                    continue
                rate = json.loads((folder / name / RATE).read_text())
                (folder / name / RATE).unlink()
                if rate > best.get(name, (0, 0))[0]:
                    best[name] = (rate, count)
    show(rows, best, troubles, "millrace", "rows/s")
    if len(images) > 1:
        show(images, best, troubles, "millrace_jpeg", "images/s")
    print("python", sys.version.split()[0], *(f"{package}=={version(package)}" for package in packages()))
    if arguments.svg and "millrace" in best:
        Path(arguments.svg).write_text(picture([(name, best[name][0]) for name, *_ in rows if name in best]))
    return all(trouble.endswith(LATE) for trouble in troubles.values())


def show(loaders, best, troubles, control, unit):
    for name, _, _, shuffle in loaders:
        notes = [trouble for (of, _), trouble in troubles.items() if of == name]
        if name in best:
            rate, workers = best[name]
            line = f"{rate:.0f} {unit}"
            if control in best:
                line += f" control={best[control][0]:.0f} ratio={rate / best[control][0]:.2f}"
            line += f" workers={workers}" + (f" shuffle={shuffle}" if shuffle else "")
            notes = [f"({note})" for note in notes]
        else:
            line = "none"
        print(f"loaders/{name}", line, *notes)


def packages():
    return sorted({package for _, package, _, _ in ROWS + IMAGES} | {"numpy", "pyarrow", "torch", "pillow"})


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def stage(arguments, folder, part):
    """Runs a part in a process of its own. Returns nothing, or why it came to no end.

    The process has a group of its own, with which the workers that it leaves behind are killed.
    """
    command = [sys.executable, __file__, *part, "--folder", folder]
    command += ["--rows", str(arguments.rows), "--images", str(arguments.images)]
    print("stage", folder.name, *part[2:], file=sys.stderr, flush=True)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env={**os.environ, **QUIET}, start_new_session=True
    )
    try:
        code = process.wait(arguments.limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    if code is None:
        return f"limit={arguments.limit:.0f}s {LATE}"
    return f"failed with exit code {code}" if code else None


# The file of a figure beside the data of its loader, and the end of the line of one that was killed.
RATE, LATE = "rate.json", "did not finish"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "DISABLE_OPTIMIZED_CACHE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure(arguments):
    """The rate of one epoch, in this process."""
    is_image = arguments.reader.endswith("_jpeg")
    batches = READERS[arguments.reader](Path(arguments.folder), arguments.workers, arguments.seed)
    # Imports and worker processes are started once for many epochs.
    first = next(batches)
    started, rows, checksum = time.perf_counter(), 0, 0
    counted = 0 if is_image else int(first[0].sum())
    before = len(first[1])
    for ids, values in batches:
        rows += len(values)
        checksum += 0 if is_image else int(ids.sum())
    seconds = time.perf_counter() - started
    expected = arguments.images if is_image else arguments.rows
    assert rows + before == expected, f"{rows + before} rows of {expected}"
    if not is_image:
        assert checksum + counted == expected * (expected - 1) // 2, "each row once"
    return rows / seconds


BATCH = 1_024
IMAGE_BATCH = 32


def made(arguments):
    """The rows: ids, and values of each."""
    random = numpy.random.default_rng(0)
    for start in range(0, arguments.rows, 8_192):
        count = min(8_192, arguments.rows - start)
        yield numpy.arange(start, start + count), random.random((count, COLUMNS), dtype=numpy.float32)


def write_parquet(folder, arguments, open_file):
    import pyarrow
    import pyarrow.parquet

    for index, (ids, values) in enumerate(made(arguments)):
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), COLUMNS)
        with open_file(f"{index:04}.parquet") as out:
            table = pyarrow.table({"id": ids, "values": lists})
            pyarrow.parquet.write_table(table, out, compression="none", use_dictionary=False)


def write_millrace(folder, arguments):
    import millrace

    volume = millrace.Volume("bench", create=True, home=folder)
    write_parquet(folder, arguments, lambda name: volume.open(f"/rows/{name}", "wb"))
    volume.snapshot("v1")
    millrace.close()


def read_millrace(folder, workers, seed):
    import torch
    from millrace import torch as feeds

    dataset = feeds.FeedDataset("bench@v1:/rows", batch_rows=BATCH, seed=seed, home=folder)
    for batch in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers):
        yield batch["id"], batch["values"]


def write_pyarrow(folder, arguments):
    write_parquet(folder, arguments, lambda name: open(folder / name, "wb"))


def read_pyarrow(folder, _, seed):
    import pyarrow.parquet
    import torch

    random = numpy.random.default_rng(seed)
    for path in random.permutation(sorted(folder.iterdir())):
        table = pyarrow.parquet.read_table(path).combine_chunks()
        ids, lists = table["id"].chunk(0).to_numpy(), table["values"].chunk(0)
        values = lists.flatten().to_numpy().reshape(len(lists), -1)
        order = random.permutation(len(values))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            yield torch.from_numpy(ids[rows]), torch.from_numpy(values[rows])


def write_memmap(folder, arguments):
    with open(folder / "values", "wb") as out:
        for _, values in made(arguments):
            out.write(values.tobytes())


class Mapped:
    """Rows of a file by number, a batch of them at a time."""

    def __init__(self, path):
        self.values = numpy.memmap(path, dtype=numpy.float32, mode="r").reshape(-1, COLUMNS)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        import torch

        return torch.as_tensor(rows), torch.from_numpy(self.values[rows])


def read_memmap(folder, workers, seed):
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    mapped = Mapped(folder / "values")
    order = RandomSampler(mapped, generator=torch.Generator().manual_seed(seed))
    yield from DataLoader(mapped, sampler=BatchSampler(order, BATCH, False), batch_size=None, num_workers=workers)


def litdata_rows(block):
    ids, values = block
    yield from ({"id": int(id), "values": row} for id, row in zip(ids, values))


def write_litdata(folder, arguments):
    import litdata

    with open(os.devnull, "w") as quiet:
        kept = os.dup(1)
        os.dup2(quiet.fileno(), 1)
        try:
            blocks = list(made(arguments))
            litdata.optimize(litdata_rows, blocks, str(folder / "data"), chunk_bytes="32MB", num_workers=1)
        finally:
            os.dup2(kept, 1)


def read_litdata(folder, workers, seed):
    import litdata

    rows = litdata.StreamingDataset(str(folder / "data"), shuffle=True, seed=seed)
    for batch in litdata.StreamingDataLoader(rows, batch_size=BATCH, num_workers=workers):
        yield batch["id"], batch["values"]


def write_mosaic(folder, arguments):
    import streaming

    columns = {"id": "int64", "values": f"ndarray:float32:{COLUMNS}"}
    with streaming.MDSWriter(out=str(folder / "data"), columns=columns) as out:
        for ids, values in made(arguments):
            for id, row in zip(ids, values):
                out.write({"id": id, "values": row})


def read_mosaic(folder, workers, seed):
    import streaming
    from torch.utils.data import DataLoader

    streaming.base.util.clean_stale_shared_memory()
    rows = streaming.StreamingDataset(
        local=str(folder / "data"), shuffle=True, shuffle_seed=seed, batch_size=BATCH, num_canonical_nodes=1
    )
    for batch in DataLoader(rows, batch_size=BATCH, num_workers=workers):
        yield batch["id"], batch["values"]


def write_webdataset(folder, arguments):
    import webdataset

    # Each worker needs a shard.
    count = max(1, min(8_192, arguments.rows // 4))
    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=count, verbose=0) as out:
        for ids, values in made(arguments):
            for id, row in zip(ids, values):
                out.write({"__key__": f"{id:09}", "values.npy": row})


def read_webdataset(folder, workers, seed):
    import torch
    import webdataset

    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    rows = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed, workersplitter=webdataset.split_by_worker)
    rows = rows.shuffle(10_000).decode().to_tuple("__key__", "values.npy").batched(BATCH)
    for keys, values in webdataset.WebLoader(rows, batch_size=None, num_workers=workers):
        yield torch.tensor([int(key) for key in keys]), torch.as_tensor(values)


def read_ray(folder, _, seed):
    import logging

    import ray
    import torch

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_parquet(str(folder), shuffle="files")
    batches = rows.iter_batches(
        batch_size=BATCH, batch_format="pyarrow", local_shuffle_buffer_size=10_000, local_shuffle_seed=seed
    )
    for batch in batches:
        lists = batch["values"].combine_chunks()
        values = lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1)
        yield torch.from_numpy(batch["id"].to_numpy()), torch.from_numpy(values)


def write_millrace_jpeg(folder, arguments):
    import millrace
    import pyarrow
    import pyarrow.parquet
    from photo import photo

    volume = millrace.Volume("bench", create=True, home=folder)
    with volume.open("/photos/0.parquet", "wb") as out:
        photos = [photo(seed) for seed in range(arguments.images)]
        pyarrow.parquet.write_table(pyarrow.table({"image": photos}), out, row_group_size=64)
    volume.snapshot("v1")
    millrace.close()


def read_millrace_jpeg(folder, _, seed):
    import millrace

    feed = millrace.Feed(
        "bench@v1:/photos",
        batch_rows=IMAGE_BATCH,
        seed=seed,
        images={"image": millrace.Image(224)},
        format="torch",
        home=folder,
    )
    for batch in feed:
        yield None, batch["image"]


def write_torchvision_jpeg(folder, arguments):
    from photo import photo

    (folder / "all").mkdir()
    for seed in range(arguments.images):
        (folder / "all" / f"{seed:05}.jpg").write_bytes(photo(seed))


def read_torchvision_jpeg(folder, workers, _):
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    steps = transforms.Compose([transforms.Resize((224, 224), antialias=True), transforms.PILToTensor()])
    photos = datasets.ImageFolder(str(folder), steps)
    for images, labels in DataLoader(photos, batch_size=IMAGE_BATCH, shuffle=True, num_workers=workers):
        yield labels, images


def picture(figures):
    """A bar for each loader, the fastest first."""
    figures = sorted(figures, key=lambda figure: -figure[1])
    width, bar, left = 640, 26, 110
    longest = figures[0][1]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{len(figures) * bar + 40}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="10" y="20" fill="#333333">Rows of 1 KiB to PyTorch tensors, in 1,000 rows per second</text>',
    ]
    for index, (name, rate) in enumerate(figures):
        top = 32 + index * bar
        length = max(1, round((width - left - 70) * rate / longest))
        color = "#b5541c" if name == "millrace" else "#8a8f98"
        lines.append(f'<text x="{left - 8}" y="{top + 15}" text-anchor="end" fill="#333333">{name}</text>')
        lines.append(f'<rect x="{left}" y="{top + 2}" width="{length}" height="{bar - 8}" fill="{color}"/>')
        lines.append(f'<text x="{left + length + 6}" y="{top + 15}" fill="#333333">{rate / 1000:.0f}</text>')
    return "\n".join([*lines, "</svg>", ""])


WRITERS = {
    "millrace": write_millrace,
    "pyarrow": write_pyarrow,
    "memmap": write_memmap,
    "litdata": write_litdata,
    "mosaic": write_mosaic,
    "webdataset": write_webdataset,
    "ray": write_pyarrow,
    "millrace_jpeg": write_millrace_jpeg,
    "torchvision_jpeg": write_torchvision_jpeg,
}
READERS = {
    "millrace": read_millrace,
    "pyarrow": read_pyarrow,
    "memmap": read_memmap,
    "litdata": read_litdata,
    "mosaic": read_mosaic,
    "webdataset": read_webdataset,
    "ray": read_ray,
    "millrace_jpeg": read_millrace_jpeg,
    "torchvision_jpeg": read_torchvision_jpeg,
}

if __name__ == "__main__":
    main()
