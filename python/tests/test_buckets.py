"""Batches of like lengths: each row once for any world and resume, filled up to the length of a bucket."""

from __future__ import annotations

import json
import unittest
from typing import Any

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from support import HomeCase, run, torch_or_skip

ROWS, BOUNDS = 400, [8, 16, 32]


def length(row: int) -> int:
    return row * 7919 % 41


class BucketsTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        volume = millrace.Volume("reviews", create=True, home=cls.home)
        lists = [[row] * length(row) for row in range(ROWS)]
        table = pyarrow.table({"id": range(ROWS), "ids": pyarrow.array(lists, pyarrow.list_(pyarrow.int32()))})
        with volume.open("/train/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(table, out, row_group_size=150)
        volume.snapshot("v1")

    def feed(self, **arguments: Any) -> millrace.Feed:
        arguments = {"batch_rows": 8, "pad": {"ids": -1}, "buckets": {"ids": BOUNDS}, **arguments}
        return millrace.Feed("reviews@v1:/train", home=self.home, **arguments)

    def ids(self, feeds: list[millrace.Feed]) -> list[list[int]]:
        return [[row for part in parts for row in part["id"].tolist()] for parts in zip(*feeds)]

    def test_rows_come_once_in_batches_of_few_shapes_with_little_padding(self) -> None:
        seen, filled, widths = [], 0, set()
        for batch in self.feed():
            seen += batch["id"].tolist()
            widths.add(batch["ids"].shape[1])
            numpy.testing.assert_array_equal(batch["ids_length"], [length(row) for row in batch["id"]])
            filled += int((batch["ids"] == -1).sum())
        self.assertEqual(sorted(seen), list(range(ROWS)))
        self.assertLessEqual({8, 16, 32}, widths)
        longer = {width for width in widths if width > 32}
        self.assertEqual(widths - longer, {8, 16, 32})
        without = sum(int((batch["ids"] == -1).sum()) for batch in self.feed(buckets=None))
        self.assertLess(filled, 0.6 * without)

    def test_any_world_and_resume_reads_the_same_batches(self) -> None:
        whole = self.ids([self.feed(epochs=2)])
        for world in (2, 3, 5, 8):
            self.assertEqual(self.ids([self.feed(epochs=2, rank=rank, world=world) for rank in range(world)]), whole)
        for taken in (1, 17, 49, 50, 51, 99):
            feed = self.feed(epochs=2)
            for _ in range(taken):
                next(feed)
            state = feed.state_dict()
            self.assertLessEqual(len(json.dumps(state)), 128)
            feeds = [self.feed(epochs=2, rank=rank, world=3) for rank in range(3)]
            for other in feeds:
                other.load_state_dict(state)
            self.assertEqual(self.ids(feeds), whole[taken:])
        lines = run(
            self.home, "--json", "feed", "reviews@v1:/train", "--buckets", "ids=8,16,32", "--batch-rows", "8", "--epoch", "0"
        ).splitlines()
        printed = [json.loads(line)["id"] for line in lines if line.startswith("{")]
        self.assertEqual(printed, [row for batch in whole[:50] for row in batch])

    def test_tensors_are_filled_up_to_the_same_lengths(self) -> None:
        torch_or_skip()
        for array, tensor in zip(self.feed(), self.feed(format="torch"), strict=True):
            self.assertEqual(array["ids"].tolist(), tensor["ids"].tolist())

    def test_errors_name_the_column_and_what_to_pass(self) -> None:
        for arguments, part in [
            ({"buckets": {"ids": []}}, "give 1 to 64 lengths"),
            ({"buckets": {"ids": [8, 4]}}, "each greater than the one before"),
            ({"buckets": {"ids": [0]}}, "a length is 0"),
            ({"buckets": {"ids": "8"}}, "rising lengths"),
            ({"buckets": {"ids": [8], "id": [8]}}, "pass one column"),
            ({"buckets": {"id": [8]}, "pad": None}, "buckets are for lists"),
            ({"tokens": millrace.Tokens("ids", 8), "pad": None}, "leave buckets out"),
        ]:
            with self.assertRaisesRegex(millrace.Error, part):
                self.feed(**arguments)
        state = self.feed().state_dict()
        with self.assertRaisesRegex(millrace.UsageError, "same batch_rows"):
            self.feed(batch_rows=16).load_state_dict(state)


if __name__ == "__main__":
    unittest.main()
