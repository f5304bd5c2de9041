"""Epochs of a part of the rows, batches of another size at resume, and datasets of several lanes."""

from __future__ import annotations

import json
import pickle
import unittest
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

import millrace
from support import DATASET, ROWS, HomeCase, error_of, ids_of, run, together, torch_or_skip

LARGE = 70_001


class EpochTest(HomeCase):
    def test_epochs_rotate_through_all_rows_before_any_comes_again(self) -> None:
        for length, sizes in [(300, [300] * 10), (0.3, [300] * 10), (0.125, [125] * 8), (1.0, [ROWS]), (1, [1] * 5)]:
            feed = self.feed(rows_per_epoch=length, batch_rows=64)
            taken: list[int] = []
            for epoch, size in enumerate(sizes):
                self.assertEqual((feed.epoch, len(feed)), (epoch, -(-((epoch + 1) * size) // 64) - epoch * size // 64))
                batches = [ids_of(batch) for batch in feed]
                self.assertEqual(sum(map(len, batches)), size)
                taken += sum(batches, [])
            first = taken[:ROWS]
            self.assertEqual(len(set(first)), len(first), f"{length}: no row twice in a pass")
            if len(taken) >= ROWS:
                self.assertEqual(sorted(first), list(range(ROWS)))

    def test_any_ranks_and_resumes_read_the_same_epoch(self) -> None:
        chosen: dict[str, Any] = {"rows_per_epoch": 0.35, "batch_rows": 32, "seed": 3}
        feed = self.feed(**chosen)
        epochs = [sum(map(ids_of, feed), []) for _ in range(4)]
        for world in (2, 3, 8):
            feeds = [self.feed(rank=rank, world=world, **chosen) for rank in range(world)]
            for epoch in epochs:
                self.assertEqual(together(feeds), epoch)
        feed = self.feed(**chosen)
        taken = sum((ids_of(next(feed)) for _ in range(5)), [])
        state = json.loads(json.dumps(feed.state_dict()))
        self.assertLessEqual(len(json.dumps(state)), 128)
        feeds = [self.feed(rank=rank, world=3, **chosen) for rank in range(3)]
        for feed in feeds:
            feed.load_state_dict(state)
        self.assertEqual(taken + together(feeds), epochs[0])
        feeds[0].set_epoch(2)
        for feed in feeds:
            feed.set_epoch(2)
        self.assertEqual(together(feeds), epochs[2])
        # Several epochs in one iteration, and another length at resume.
        pair = self.feed(epochs=2, **chosen)
        self.assertEqual(sorted(sum(map(ids_of, pair), [])), sorted(epochs[0] + epochs[1]))
        self.assertEqual((pair.epoch, pair.state_dict()["rows"]), (2, 700))
        whole = self.feed(**{**chosen, "rows_per_epoch": None})
        whole.load_state_dict(state)
        self.assertEqual(sum(map(len, map(ids_of, whole))), ROWS - 160)

    def test_the_command_reads_the_same_epochs(self) -> None:
        feed = self.feed(rows_per_epoch=0.35, batch_rows=32)
        for epoch in range(4):
            printed = run(
                self.home, "--json", "feed", DATASET, "--batch-rows", "32", "--rows-per-epoch", "0.35", "--epoch", str(epoch)
            )
            ids = [json.loads(line)["id"] for line in printed.splitlines()]
            self.assertEqual(ids, sum(map(ids_of, feed), []))
        plan = json.loads(run(self.home, "--json", "feed", "plan", DATASET, "--rows-per-epoch", "300", "--batch-rows", "64"))
        self.assertEqual((plan["rows"], plan["rows_per_epoch"], plan["steps_per_epoch"]), (ROWS, 300, 5))

    def test_workers_of_a_loader_read_the_epoch(self) -> None:
        torch_or_skip()
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        chosen: dict[str, Any] = {"rows_per_epoch": 0.35, "batch_rows": 32}
        feed = self.feed(**chosen)
        dataset = FeedDataset(DATASET, columns=["id"], home=self.home, **chosen)
        for epoch in range(3):
            expected = sum(map(ids_of, feed), [])
            for workers in (0, 2):
                dataset.set_epoch(epoch)
                self.assertEqual(together([DataLoader(dataset, batch_size=None, num_workers=workers)]), expected)

    def test_wrong_lengths_are_refused(self) -> None:
        for length, word in [(0, "rows_per_epoch"), (1.5, "rows_per_epoch"), (-3, "rows_per_epoch"), (ROWS + 1, "1000 rows"),
                             (0.0001, "less than one row"), (True, "rows_per_epoch"), ("all", "rows_per_epoch")]:
            with self.assertRaises(millrace.UsageError) as caught:
                self.feed(rows_per_epoch=length)
            self.assertIn(word, str(caught.exception))
        self.assertIn("1000 rows", error_of(self.home, "feed", DATASET, "--rows-per-epoch", "1001"))

    def test_another_batch_size_goes_on_at_the_right_row(self) -> None:
        feed = self.feed(batch_rows=64)
        taken = sum((ids_of(next(feed)) for _ in range(3)), [])
        state = json.loads(json.dumps(feed.state_dict()))
        for batch_rows in (1, 50, 192, 200, 4096):
            other = self.feed(batch_rows=batch_rows)
            other.load_state_dict(state)
            rest = list(map(ids_of, other))
            self.assertEqual(len(rest[0]), min(batch_rows - 192 % batch_rows, ROWS - 192))
            self.assertEqual(sorted(sum(rest, taken)), list(range(ROWS)))


class LanesTest(HomeCase):
    """A dataset that is large enough for several lanes."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with millrace.Volume("digits", home=cls.home).open("/large/0.parquet", "wb") as out:
            table = pyarrow.table({"id": numpy.arange(LARGE, dtype=numpy.int64)})
            pyarrow.parquet.write_table(table, out, row_group_size=3_000)
        millrace.Volume("digits", home=cls.home).snapshot("v2")

    def large(self, **arguments: Any) -> millrace.Feed:
        return millrace.Feed("digits@v2:/large", home=self.home, **arguments)

    def test_an_epoch_that_ends_inside_a_batch_has_each_row_once(self) -> None:
        lanes = json.loads(run(self.home, "--json", "feed", "plan", "digits@v2:/large", "--batch-rows", "128"))["lanes"]
        self.assertGreater(lanes, 1)
        feed = self.large(batch_rows=128)
        for _ in range(2):
            ids = numpy.concatenate([batch["id"] for batch in feed])
            self.assertTrue((numpy.sort(ids) == numpy.arange(LARGE)).all())
        run(self.home, "feed", "verify", "digits@v2:/large", "--batch-rows", "128", "--readers", "3")

    def test_other_batches_keep_the_lanes_of_the_state(self) -> None:
        feed = self.large(batch_rows=128)
        taken = [next(feed)["id"] for _ in range(100)]
        state = json.loads(json.dumps(feed.state_dict()))
        for batch_rows in (12, 100, 1000, 4000):
            # Without a state, such batches have other lanes.
            other = self.large(batch_rows=batch_rows)
            other.load_state_dict(state)
            other = pickle.loads(pickle.dumps(other))
            ids = numpy.concatenate(taken + [batch["id"] for batch in other])
            self.assertTrue((numpy.sort(ids) == numpy.arange(LARGE)).all(), batch_rows)
            again = self.large(batch_rows=128)
            again.load_state_dict(state)
        with self.assertRaisesRegex(millrace.UsageError, "multiple of"):
            self.large(batch_rows=99).load_state_dict(state)


if __name__ == "__main__":
    unittest.main()
