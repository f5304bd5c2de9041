"""Libraries that divide the batches of a feed among processes again."""

from __future__ import annotations

import os
import socket
import sys
import unittest
import warnings
from typing import Any
from unittest import mock

import millrace
from support import DATASET, DEADLINE_S, ROWS, HomeCase, ids_of, python, require, torch_or_skip

# Each of two processes tries loaders that accelerate has prepared, and prints the refusals.
PREPARED = """
import os, millrace
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from millrace.torch import FeedDataset
from torch.utils.data import DataLoader

def loader(plain=False, dispatch=True, options={}, **arguments):
    dataset = FeedDataset("digits@v1:/train", home=os.environ["HOME_DIR"], columns=["id"], **arguments)
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    made = DataLoader(dataset, batch_size=None if dispatch else 1, collate_fn=None if dispatch else first, **options)
    return made if plain else Accelerator(cpu=True, dataloader_config=config).prepare(made)

def first(batches):
    return batches[0]

Accelerator(cpu=True)
kept = [int(i) for batch in loader(plain=True) for i in batch["id"]]
# The inner loop reads a dataset of its own within that of a prepared loader.
for _ in loader(rank=0, world=1, batch_rows=500):
    assert [int(i) for batch in loader(plain=True) for i in batch["id"]] == kept
whole = [int(i) for batch in loader(rank=0, world=1, batch_rows=500) for i in batch["id"]]
print("whole", len(kept), len(whole), sum(whole), flush=True)
workers = [{"num_workers": 1, "multiprocessing_context": way} for way in ("fork", "spawn")]
for tried in [{}, {"dispatch": False}, *({"options": options} for options in workers)]:
    try:
        for batch in loader(**tried):
            raise AssertionError(f"{tried}: {batch}")
    except millrace.UsageError as error:
        print("refused", error, flush=True)
"""


class DivisionTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch_or_skip()
        super().setUpClass()

    def dataset(self, **arguments: Any) -> Any:
        from millrace.torch import FeedDataset

        return FeedDataset(DATASET, home=self.home, columns=["id"], **arguments)

    def test_prepared_loaders_that_would_lose_rows_are_refused(self) -> None:
        require("accelerate")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        processes = []
        for rank in ("0", "1"):
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with mock.patch.dict(os.environ, {**launched, "OMP_NUM_THREADS": "1"}):
                processes.append(python(self.home, PREPARED))
        total = 0
        for process in processes:
            output, errors = process.communicate(timeout=DEADLINE_S)
            self.assertEqual(process.returncode, 0, errors)
            lines = output.splitlines()
            name, kept, whole, ids = lines[0].split()
            self.assertEqual((name, int(kept), int(whole)), ("whole", ROWS // 2, ROWS // 2))
            total += int(ids)
            self.assertEqual(len(lines), 5, output)
            for line in lines[1:]:
                self.assertRegex(line, "^refused read digits@v1:/train: accelerate .* batches of the 2 ranks again")
                self.assertRegex(line, "keep the loader out of Accelerator.prepare.* rank=0, world=1")
        self.assertEqual(total, sum(range(ROWS)), "with rank=0 and world=1, accelerate divides and loses nothing")

    def test_a_sharding_filter_is_refused_behind_ranks_and_workers(self) -> None:
        from torch.utils.data import DataLoader, graph_settings
        from torch.utils.data.datapipes.iter import IterableWrapper

        def pipe(parts: int, **arguments: Any) -> Any:
            made = IterableWrapper(self.dataset(**arguments)).sharding_filter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph_settings.apply_sharding(made, parts, 0)
            return made

        for parts, world in ((1, 2), (2, 1)):
            # One of both divides.
            ids = [i for batch in pipe(parts, rank=0, world=world, batch_rows=100) for i in ids_of(batch)]
            self.assertEqual(len(ids), ROWS // 2)
        with self.assertRaisesRegex(millrace.UsageError, "batches of the 2 ranks again.*leave sharding_filter out"):
            list(pipe(2, rank=0, world=2))
        if sys.platform == "linux":
            loader = DataLoader(pipe(1), batch_size=None, num_workers=2, multiprocessing_context="fork")
            with self.assertRaisesRegex(millrace.UsageError, "batches of the workers again"):
                list(loader)

    def test_classes_of_other_modules_are_not_taken_for_theirs(self) -> None:
        class IterableDatasetShard:
            """The name of a class of accelerate, in another module."""

            num_processes = 2

            def __init__(self, dataset: Any) -> None:
                self.dataset = dataset

            def __iter__(self) -> Any:
                return iter(self.dataset)

        shard = IterableDatasetShard(self.dataset(rank=0, world=2, batch_rows=100))
        self.assertEqual(sum(len(ids_of(batch)) for batch in shard), ROWS // 2)


if __name__ == "__main__":
    unittest.main()
