"""pyarrow and duckdb open the landed Parquet through the mount."""
import json
import os
import sys

import duckdb
import pyarrow.dataset
import pyarrow.parquet

mount, records = sys.argv[1:3]
expected = {row["id"]: row for row in map(json.loads, open(records))}
folder = os.path.join(mount, ".snapshots", "quickstart", "train")
files = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".parquet")]
assert files, folder

table = pyarrow.dataset.dataset(files, format="parquet").to_table()
assert table.num_rows == len(expected), table.num_rows
for row in table.to_pylist():
    want = expected[row["id"]]
    assert row["label"] == want["label"] and row["pixels"] == want["pixels"], row["id"]
assert len(set(table["id"].to_pylist())) == len(expected)
for file in files:
    meta = pyarrow.parquet.ParquetFile(file).metadata
    assert meta.row_group(0).column(0).has_offset_index, f"{file} has no page index"

live = os.path.join(mount, "train")
for root in [folder, live]:
    count, distinct, labels = duckdb.sql(
        f"select count(*), count(distinct id), sum(label) from read_parquet('{root}/**/*.parquet')"
    ).fetchall()[0]
    assert (count, distinct) == (len(expected), len(expected)), (root, count, distinct)
    assert labels == sum(row["label"] for row in expected.values())
places = duckdb.sql(f"select count(distinct (_partition, _offset)) from read_parquet('{folder}/**/*.parquet')").fetchall()[0][0]
assert places == len(expected), places
print(f"{table.num_rows} rows in {len(files)} files, each once")
