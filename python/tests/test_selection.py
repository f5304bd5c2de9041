"""Feeds of selected rows: conditions and stable splits."""

from __future__ import annotations

import hashlib
import json
import pickle
import unittest
from decimal import Decimal

import millrace
from support import DATASET, ROWS, HomeCase, error_of, ids_of, run, together, torch_or_skip

SPLITS = {"train": 0.8, "val": 0.1, "test": 0.1}


def part_of(row: int) -> str:
    """The part of a row with this id, by the documented rules."""
    key = b"millrace split 1\1" + row.to_bytes(16, "little", signed=True)
    place = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    border = Decimal(0)
    for name, fraction in SPLITS.items():
        border += Decimal(str(fraction))
        if place < int(border * 2**64):
            return name
    raise AssertionError("the parts are complete")


class SelectionTest(HomeCase):
    def read(self, **arguments: object) -> list[int]:
        return sum((ids_of(batch) for batch in self.feed(**arguments)), [])

    def test_conditions_select_rows_as_in_python(self) -> None:
        for where, holds in [
            ("label != 3", lambda i: i % 10 != 3),
            ("label == 3 or not even", lambda i: i % 10 == 3 or i % 2 == 1),
            ("name is null", lambda i: i % 7 == 0),
            ("name != 'row 8'", lambda i: i % 7 != 0 and i != 8),
            ("kind in ('kind 1', 'kind 2') and id < 100", lambda i: i % 3 != 0 and i < 100),
            ("score >= 100.25", lambda i: i / 2 >= 100.25 and i != 500),
            ("at < '1970-01-01T00:00:00.050Z'", lambda i: i < 50),
        ]:
            ids = self.read(where=where)
            self.assertEqual(sorted(ids), [i for i in range(ROWS) if holds(i)], where)
            self.assertNotEqual(ids, sorted(ids))

    def test_parts_are_disjoint_complete_and_those_of_the_documented_hash(self) -> None:
        ids = {name: self.read(splits=SPLITS, split=name, split_by="id") for name in SPLITS}
        for name in SPLITS:
            self.assertEqual(sorted(ids[name]), [i for i in range(ROWS) if part_of(i) == name])
        by_place = [i for name in SPLITS for i in self.read(splits=SPLITS, split=name)]
        self.assertEqual(sorted(by_place), list(range(ROWS)))
        # Fractions are decimal: as binary numbers, these are more than 1 together.
        thirds = {"a": 0.7, "b": 0.1, "c": Decimal("0.2")}
        self.assertEqual(sorted(i for name in thirds for i in self.read(splits=thirds, split=name)), list(range(ROWS)))

    def test_any_number_of_ranks_reads_each_selected_row_once(self) -> None:
        chosen = {"where": "label < 7", "splits": SPLITS, "split": "train", "split_by": ["id"], "batch_rows": 32}
        expected = self.read(**chosen)
        self.assertEqual(sorted(expected), [i for i in range(ROWS) if i % 10 < 7 and part_of(i) == "train"])
        for world in (2, 3, 8):
            feeds = [self.feed(rank=rank, world=world, **chosen) for rank in range(world)]
            self.assertEqual(together(feeds), expected)
        self.assertEqual(self.feed(**chosen).rows, len(expected))

    def test_the_order_is_that_of_the_command(self) -> None:
        printed = run(
            self.home, "--json", "feed", DATASET, "--batch-rows", "32", "--batches", "3", "--where", "label < 7", "--splits",
            "train=0.8,val=0.1,test=0.1", "--split", "train", "--split-by", "id",
        )
        ids = [json.loads(line)["id"] for line in printed.splitlines()]
        self.assertEqual(ids, self.read(batch_rows=32, where="label<7", splits=SPLITS, split="train", split_by="id")[:96])

    def test_a_position_resumes_with_the_same_selection_only(self) -> None:
        chosen = {"where": "even", "splits": SPLITS, "split": "train", "batch_rows": 16}
        expected = self.read(**chosen)
        feed = self.feed(**chosen)
        taken = [ids_of(next(feed)) for _ in range(5)]
        state = json.loads(json.dumps(feed.state_dict()))
        self.assertLessEqual(len(json.dumps(state)), 128)
        for resumed in (self.feed(**chosen), pickle.loads(pickle.dumps(feed))):
            resumed.load_state_dict(state)
            self.assertEqual(sum(taken, []) + sum(map(ids_of, resumed), []), expected)
        for other in ({**chosen, "where": "not even"}, {**chosen, "split": "val"}, {"batch_rows": 16}):
            with self.assertRaisesRegex(millrace.UsageError, "resume"):
                self.feed(**other).load_state_dict(state)

    def test_workers_of_a_loader_read_the_selected_rows(self) -> None:
        torch_or_skip()
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        chosen = {"where": "label != 3", "splits": SPLITS, "split": "test", "split_by": "id", "batch_rows": 16}
        dataset = FeedDataset(DATASET, columns=["id"], home=self.home, **chosen)
        for workers in (0, 2):
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            self.assertEqual(together([loader]), self.read(**chosen))
            dataset.set_epoch(0)

    def test_wrong_selections_are_refused_by_name(self) -> None:
        for kind, words, arguments in [
            (millrace.UsageError, ["character 9", "comparison"], {"where": "label = "}),
            (millrace.UsageError, ['"label" is UInt8', "'3'"], {"where": "label = '3'"}),
            (millrace.UsageError, ["needs splits"], {"split": "train"}),
            (millrace.UsageError, ["one of train, val, test"], {"splits": SPLITS}),
            (millrace.UsageError, ['"dev" is not a part'], {"splits": SPLITS, "split": "dev"}),
            (millrace.UsageError, ["more than 1"], {"splits": {"a": 0.9, "b": 0.2}, "split": "a"}),
            (millrace.UsageError, ["part 'a'"], {"splits": {"a": None}, "split": "a"}),
            (millrace.UsageError, ["pixels"], {"splits": SPLITS, "split": "val", "split_by": "pixels"}),
            (millrace.NotFoundError, ['column "lable"', "label"], {"where": "lable = 3"}),
            (millrace.NotFoundError, ["none of its 1000 rows"], {"where": "label > 100"}),
        ]:
            with self.assertRaises(kind) as caught:
                self.feed(**arguments)
            for word in words:
                self.assertIn(word, str(caught.exception))
        text = error_of(self.home, "feed", DATASET, "--where", "lable = 3")
        with self.assertRaises(millrace.NotFoundError) as caught:
            self.feed(where="lable = 3")
        self.assertIn(str(caught.exception), text)


if __name__ == "__main__":
    unittest.main()
