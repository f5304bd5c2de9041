"""Writes the handwritten digits of this repository into the volume `digits-python`, as the snapshot `v1`.

python prepare.py    (needs pyarrow; a second run changes nothing)
"""

from pathlib import Path

import millrace
import pyarrow.json
import pyarrow.parquet

SOURCE = Path(__file__).parent.parent / "digits" / "digits.jsonl"


def main() -> None:
    volume = millrace.Volume("digits-python", create=True)
    if "v1" in [snapshot.name for snapshot in volume.snapshots()]:
        return
    table = pyarrow.json.read_json(SOURCE)
    pixels = pyarrow.FixedSizeListArray.from_arrays(table["pixels"].combine_chunks().flatten().cast("float32"), 64)
    table = table.set_column(table.schema.get_field_index("pixels"), "pixels", pixels)
    with volume.open("/train/digits.parquet", "wb") as out:
        pyarrow.parquet.write_table(table, out, row_group_size=256)
    volume.snapshot("v1")


if __name__ == "__main__":
    main()
