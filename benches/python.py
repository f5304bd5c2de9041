"""The Python package against pyarrow: rows of 1 KiB from Parquet files to NumPy arrays, shuffled, in one process.

The control reads the same files with pyarrow from a local folder, a row group at a time, and shuffles the rows inside each
row group. The feed shuffles over the whole dataset. Both read the epoch in turn, several times; the best of each counts.

With `--program`, a server of the program on this machine reads the same epochs for `millrace.flight.FlightFeed`; its control is
the feed in this process.

Prints `python/<figure> <value> <unit> control=<value> ratio=<x>`; more is better. `make bench-python` runs it.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import millrace
import numpy
import pyarrow
import pyarrow.parquet


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=400_000, help="rows of the dataset [default: %(default)s]")
    arguments.add_argument("--files", type=int, default=8, help="files of the dataset [default: %(default)s]")
    arguments.add_argument("--group-rows", type=int, default=8_192, help="rows of a row group [default: %(default)s]")
    arguments.add_argument("--batch-rows", type=int, default=1_024, help="rows of a batch [default: %(default)s]")
    arguments.add_argument("--rounds", type=int, default=5, help="epochs that each reads [default: %(default)s]")
    arguments.add_argument("--program", help="the program millrace, to measure the feed over Arrow Flight, too")
    arguments = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="millrace-bench-"))
    try:
        run(arguments, folder)
    finally:
        millrace.close()
        shutil.rmtree(folder)


def run(arguments, folder):
    (folder / "local").mkdir()
    volume = millrace.Volume("bench", create=True, home=folder / "home")
    random = numpy.random.default_rng(0)
    for file in range(arguments.files):
        ids = numpy.arange(file, arguments.rows, arguments.files)
        values = random.random((len(ids), 254), dtype=numpy.float32)
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), 254)
        path = folder / "local" / f"{file}.parquet"
        table = pyarrow.table({"id": ids, "values": lists})
        pyarrow.parquet.write_table(
            table, path, row_group_size=arguments.group_rows, compression="none", use_dictionary=False
        )
        with volume.open(f"/rows/{file}.parquet", "wb") as out:
            out.write(path.read_bytes())
    volume.snapshot("v1")

    ours, control, served = [], [], []
    server = None if arguments.program is None else serve(arguments, folder / "home")
    try:
        for round in range(arguments.rounds):
            ours.append(rate(arguments, feed_epoch(arguments, folder / "home", round)))
            control.append(rate(arguments, pyarrow_epoch(arguments, folder / "local", round)))
            if server is not None:
                served.append(rate(arguments, flight_epoch(arguments, server.location, round)))
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    ours, control = max(ours), max(control)
    print(f"python/rows_to_numpy {ours:.0f} rows/s control={control:.0f} ratio={ours / control:.2f}")
    if served:
        print(f"python/flight_to_numpy {max(served):.0f} rows/s control={ours:.0f} ratio={max(served) / ours:.2f}")


def serve(arguments, home):
    flags = ["--home", home, "--json", "feed", "serve", "--volume", "bench", "--grpc", "127.0.0.1:0"]
    server = subprocess.Popen([arguments.program, *flags], stdout=subprocess.PIPE, text=True)
    server.location = f"grpc://{json.loads(server.stdout.readline())['grpc']}"
    return server


def rate(arguments, batches):
    started, rows, checksum = time.perf_counter(), 0, 0
    for ids, values in batches:
        rows += len(values)
        checksum += int(ids.sum())
    seconds = time.perf_counter() - started
    assert (rows, checksum) == (arguments.rows, arguments.rows * (arguments.rows - 1) // 2), "each row once"
    return rows / seconds


def feed_epoch(arguments, home, seed):
    feed = millrace.Feed("bench@v1:/rows", batch_rows=arguments.batch_rows, seed=seed, home=home)
    for batch in feed:
        yield batch["id"], batch["values"]
    # The next epoch decodes anew, as the control does.
    millrace.close()


def flight_epoch(arguments, location, seed):
    from millrace.flight import FlightFeed

    # Each seed is another plan, which the server decodes anew.
    feed = FlightFeed(location, "bench@v1:/rows", batch_rows=arguments.batch_rows, seed=seed, format="numpy")
    for batch in feed:
        yield batch["id"], batch["values"]
    feed.close()


def pyarrow_epoch(arguments, folder, seed):
    random = numpy.random.default_rng(seed)
    files = [pyarrow.parquet.ParquetFile(path) for path in sorted(folder.iterdir())]
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    for which in random.permutation(len(groups)):
        file, group = groups[which]
        table = file.read_row_group(group).combine_chunks()
        ids, lists = table["id"].chunk(0).to_numpy(), table["values"].chunk(0)
        values = lists.flatten().to_numpy().reshape(len(lists), -1)
        order = random.permutation(len(values))
        for start in range(0, len(order), arguments.batch_rows):
            rows = order[start : start + arguments.batch_rows]
            yield ids[rows], values[rows]


main()
