"""Parquet files of pyarrow, pandas, DuckDB and Polars, each codec and a dictionary column.

Writes WRITER/CODEC.parquet below the folder given: rows with an `id` that no other file of the writer has, a `name`
that follows from it, and a `value`.
"""
import json
import os
import sys

import duckdb
import pandas
import polars
import pyarrow
import pyarrow.parquet

folder = sys.argv[1]
ROWS = 100
NAMES = ["ada", "grace", "katherine"]


def columns(number):
    ids = list(range(number * ROWS, (number + 1) * ROWS))
    return {"id": ids, "name": [NAMES[i % 3] for i in ids], "value": [i / 4 for i in ids]}


def with_pyarrow(path, codec, data):
    table = pyarrow.table(data)
    names = table.column("name").dictionary_encode()
    table = table.set_column(1, "name", names)
    pyarrow.parquet.write_table(table, path, compression=codec, row_group_size=40)


def with_pandas(path, codec, data):
    frame = pandas.DataFrame(data).astype({"name": "category"})
    frame.to_parquet(path, compression=None if codec == "none" else codec)


def with_duckdb(path, codec, data):
    frame = pandas.DataFrame(data)  # noqa: F841: the query names it
    kind = "enum (" + ", ".join(f"'{name}'" for name in NAMES) + ")"
    query = f"select id, name::{kind} as name, value from frame"
    duckdb.sql(f"copy ({query}) to '{path}' (format parquet, compression '{codec}')")


def with_polars(path, codec, data):
    frame = polars.DataFrame(data).with_columns(polars.col("name").cast(polars.Categorical))
    frame.write_parquet(path, compression=codec)


WRITERS = {
    "pyarrow": (with_pyarrow, ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]),
    "pandas": (with_pandas, ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]),
    "duckdb": (with_duckdb, ["uncompressed", "snappy", "gzip", "brotli", "lz4_raw", "zstd"]),
    "polars": (with_polars, ["uncompressed", "snappy", "gzip", "brotli", "lz4", "zstd"]),
}

written = {}
for writer, (write, codecs) in WRITERS.items():
    os.makedirs(os.path.join(folder, writer))
    for number, codec in enumerate(codecs):
        write(os.path.join(folder, writer, f"{codec}.parquet"), codec, columns(number))
    written[writer] = len(codecs) * ROWS
print(json.dumps(written))
