"""Mixtures of datasets by weight."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import unittest
from collections import Counter
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

import millrace
from support import DATASET, ROWS, HomeCase, error_of, ids_of, run, together, torch_or_skip

SMALL = "small@v1:/rows"
SMALL_ROWS = 90


class MixtureTest(HomeCase):
    """Ids of ``digits`` are below 1,000, those of ``small`` are from 10,000 on."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        volume = millrace.Volume("small", create=True, home=cls.home)
        ids = numpy.arange(10_000, 10_000 + SMALL_ROWS, dtype=numpy.int64)
        with volume.open("/rows/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(pyarrow.table({"label": (ids % 10).astype(numpy.uint8), "id": ids}), out)
        with volume.open("/texts/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(pyarrow.table({"id": [str(i) for i in ids]}), out)
        volume.snapshot("v1")

    def mixed(self, weights: dict[str, Any] | None = None, until: str = "first", **arguments: Any) -> millrace.Feed:
        mixture = millrace.Mixture(weights or {DATASET: 0.7, SMALL: 0.3}, until=until)
        return millrace.Feed(mixture, home=self.home, **{"columns": ["id"], "batch_rows": 40, **arguments})

    def test_batches_have_each_dataset_in_proportion(self) -> None:
        feed = self.mixed()
        self.assertEqual((feed.rows, feed.dataset), (297, f"{DATASET}=0.7, {SMALL}=0.3"))
        batches = [ids_of(batch) for batch in feed]
        for batch in batches[:-1]:
            self.assertEqual(sum(i >= 10_000 for i in batch), 12)
        # The epoch ends with the last row of the small dataset; no row comes twice.
        ids = sum(batches, [])
        self.assertEqual((len(ids), len(set(ids)), sum(i >= 10_000 for i in ids)), (297, 297, SMALL_ROWS))

    def test_datasets_go_on_from_epoch_to_epoch(self) -> None:
        feed = self.mixed()
        counts: Counter[int] = Counter()
        for _ in range(10):
            counts.update(sum(map(ids_of, feed), []))
        large = [count for i, count in counts.items() if i < 10_000]
        self.assertEqual((sum(large), len(large), set(large)), (2_079, ROWS, {2, 3}))
        self.assertEqual({count for i, count in counts.items() if i >= 10_000}, {9, 10})
        every = self.mixed(until="every")
        self.assertEqual(every.rows, 1_429)
        ids = sum(map(ids_of, every), [])
        self.assertEqual(len({i for i in ids if i < 10_000}), ROWS)

    def test_any_ranks_read_the_same_and_resume(self) -> None:
        expected = sum(map(ids_of, self.mixed(epochs=3)), [])
        for world in (2, 5, 8):
            feeds = [self.mixed(epochs=3, rank=rank, world=world) for rank in range(world)]
            self.assertEqual(together(feeds), expected)
        feed = self.mixed(epochs=3)
        taken = sum((ids_of(next(feed)) for _ in range(9)), [])
        state = json.loads(json.dumps(feed.state_dict()))
        self.assertLessEqual(len(json.dumps(state)), 128)
        for resumed in (pickle.loads(pickle.dumps(feed)), copy.copy(feed)):
            self.assertEqual(taken + sum(map(ids_of, resumed), []), expected)
        feeds = [self.mixed(epochs=3, rank=rank, world=3) for rank in range(3)]
        for feed in feeds:
            feed.load_state_dict(state)
        self.assertEqual(taken + together(feeds), expected)
        # Batches of any size go on at the right row.
        other = self.mixed(epochs=3, batch_rows=77)
        other.load_state_dict(state)
        self.assertEqual(sorted(taken + sum(map(ids_of, other), [])), sorted(expected))

    def test_the_command_mixes_the_same_rows(self) -> None:
        mix = ["--mix", f"{DATASET}=7", "--mix", f"{SMALL}=3", "--batch-rows", "40", "--where", "id != 5", "--columns", "id"]
        feed = self.mixed({DATASET: 7, SMALL: 3}, where="id != 5")
        plan = json.loads(run(self.home, "--json", "feed", "plan", *mix))
        self.assertEqual((plan["rows"], plan["plan"]), (297, feed.plan))
        for epoch in range(2):
            printed = run(self.home, "--json", "feed", *mix, "--epoch", str(epoch))
            self.assertEqual([json.loads(line)["id"] for line in printed.splitlines()], sum(map(ids_of, feed), []))
        head = run(self.home, "--json", "feed", "head", *mix, "--rows", "300")
        self.assertEqual(len(head.splitlines()), 297)
        self.assertEqual([source["rows_per_epoch"] for source in plan["sources"]], [207, 90])
        self.assertIn("30.3 %", run(self.home, "feed", "plan", *mix))
        self.assertEqual(json.loads(run(self.home, "--json", "feed", "bench", *mix))["rows"], 297)

    def test_epochs_of_any_length(self) -> None:
        feed = self.mixed(rows_per_epoch=1_000)
        self.assertEqual(sum(map(len, map(ids_of, feed))), 1_000)
        self.assertEqual(len(self.mixed(rows_per_epoch=0.5)), 4)

    def test_images_and_keys_of_a_mixture(self) -> None:
        from PIL import Image

        volume = millrace.Volume("pets", create=True, home=self.home)
        for name, first, count in (("cats", 0, 60), ("dogs", 100, 40)):
            images = []
            for label in range(first, first + count):
                out = io.BytesIO()
                Image.fromarray(numpy.full((10, 12, 3), label, numpy.uint8)).save(out, "PNG")
                images.append(out.getvalue())
            with volume.open(f"/{name}/0.parquet", "wb") as file:
                labels = pyarrow.array(range(first, first + count), pyarrow.uint8())
                pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": labels}), file)
        volume.snapshot("v1")

        def read(world: int) -> list[Any]:
            found: list[Any] = []
            feeds = [
                millrace.Feed(millrace.Mixture({"pets@v1:/cats": 0.6, "pets@v1:/dogs": 0.4}), home=self.home, keys="key",
                              images={"image": millrace.Image(8, crop="random")}, batch_rows=10, rank=rank, world=world)
                for rank in range(world)
            ]
            for batches in zip(*feeds, strict=True):
                for batch in batches:
                    self.assertEqual((batch["image"].shape[1:], batch["image"].dtype), ((3, 8, 8), numpy.uint8))
                    self.assertTrue((batch["image"] == batch["label"][:, None, None, None]).all())
                    found += zip(batch["label"].tolist(), batch["key"].tolist())
            return found

        rows = read(1)
        self.assertEqual((len({label for label, _ in rows}), len({key for _, key in rows})), (len(rows), len(rows)))
        self.assertGreater(len(rows), 95)
        self.assertEqual(read(3), rows)

    def test_workers_of_a_loader_read_a_mixture(self) -> None:
        torch_or_skip()
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        expected = sum(map(ids_of, self.mixed()), [])
        mixture = millrace.Mixture({DATASET: 0.7, SMALL: 0.3})
        dataset = FeedDataset(mixture, columns=["id"], batch_rows=40, home=self.home)
        for workers in (0, 2):
            dataset.set_epoch(0)
            self.assertEqual(together([DataLoader(dataset, batch_size=None, num_workers=workers)]), expected)

    def test_a_native_job_reads_the_order_of_the_feed(self) -> None:
        models = millrace.Volume("models", create=True, home=self.home)
        job = os.path.join(self.home, "mixed.toml")
        with open(job, "w", encoding="utf-8") as file:
            file.write(
                f'name = "mixed"\ndataset = ["{DATASET}=0.7", "small@latest:/rows=0.3"]\nfeatures = "id"\nlabel = "label"\n'
                'model = { kind = "mlp", inputs = 1, hidden = [], classes = 10 }\nseed = 5\nbatch_rows = 40\n'
                'epochs_max = 2\noptimizer = { kind = "sgd", learning_rate = 1e-9 }\noutput = { volume = "models" }\n'
            )
        report = json.loads(run(self.home, "--json", "train", job))
        feed = self.mixed(columns=["id", "label"], seed=5)
        self.assertEqual(report["rows_per_epoch"], [feed.rows] * 2)
        folder = f"/checkpoints/mixed/{report['run'][:16]}"
        names = [entry.path.rpartition("/")[2] for entry in models.list(folder)]
        newest = max(name for name in names if name.startswith("0"))
        self.assertEqual(json.loads(models.open(f"{folder}/{newest}/manifest.json").read())["plan"], feed.plan)
        lineage = json.loads(models.open("/models/mixed/1/bundle.json").read())["lineage"]
        expected = [{"dataset": DATASET, "weight": "0.7"}, {"dataset": SMALL, "weight": "0.3"}]
        self.assertEqual(lineage["mixture"], expected)

    def test_wrong_mixtures_are_refused_by_name(self) -> None:
        state = self.mixed().state_dict()
        for weights in ({DATASET: 0.6, SMALL: 0.3}, {SMALL: 0.3, DATASET: 0.7}, {DATASET: 1}):
            with self.assertRaisesRegex(millrace.UsageError, "resume .*order"):
                self.mixed(weights).load_state_dict(state)
        for arguments, kind, words in [
            ({"weights": {DATASET: 1, "small@v1:/texts": 1}}, millrace.ConflictError, ['"id" is Int64', "Utf8", "small@v1"]),
            ({"columns": None}, millrace.ConflictError, ["missing", SMALL, DATASET]),
            ({"weights": {DATASET: 0, SMALL: 1}}, millrace.UsageError, ["weight"]),
            ({"weights": {DATASET: "x"}}, millrace.UsageError, ["weight"]),
            ({"weights": {DATASET: None}}, millrace.UsageError, ["weight", DATASET]),
            ({"weights": {DATASET: 1, "none@v1:/": 1}}, millrace.NotFoundError, ["none"]),
            ({"until": "last"}, millrace.UsageError, ["until"]),
        ]:
            with self.assertRaises(kind) as caught:
                self.mixed(**arguments)
            for word in words:
                self.assertIn(word, str(caught.exception))
        with self.assertRaisesRegex(millrace.UsageError, "weight"):
            millrace.Mixture({})
        self.assertIn("DATASET=WEIGHT", error_of(self.home, "feed", "--mix", DATASET))


if __name__ == "__main__":
    unittest.main()
