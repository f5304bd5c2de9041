"""Batches in a ring of slots: on the host against the usual feed, and on a GPU."""

from __future__ import annotations

import gc
import random
import unittest
import warnings
from typing import Any

import millrace
import numpy
from support import DATASET, TENSORS, HomeCase, digest, ids_of, skip, torch_or_skip
from test_fork import in_child

COLUMNS = [*TENSORS, "at", "day", "name", "tokens", "kind"]
# Those that lie in slots.
SLOTTED = [*TENSORS, "at"]


def copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: column.copy() for name, column in batch.items()}


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class HostTest(HomeCase):
    def assert_equal(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        self.assertEqual(list(found), list(expected))
        for name, column in expected.items():
            self.assertEqual((found[name].dtype, found[name].shape), (column.dtype, column.shape), name)
            if column.dtype == object:
                self.assertEqual([repr(value) for value in found[name]], [repr(value) for value in column], name)
            else:
                self.assertEqual(found[name].tobytes(), column.tobytes(), name)

    def test_batches_are_those_of_the_usual_feed(self) -> None:
        for options in ({}, {"rank": 2, "world": 3}, {"where": "label != 3", "keys": "key"}, {"batch_rows": 4_096}):
            options = {"columns": COLUMNS, "epochs": 2, "batch_rows": 96, **options}
            staged, usual = self.feed(device="cpu", **options), self.feed(**options)
            self.assertEqual(len(staged), len(usual))
            for found, expected in zip(staged, usual, strict=True):
                self.assert_equal(found, expected)

    def test_slots_are_used_again_and_arrays_are_their_memory(self) -> None:
        addresses: dict[str, set[int]] = {name: set() for name in SLOTTED}
        batches = 0
        for batch in self.feed(columns=SLOTTED, device="cpu", batch_rows=16, epochs=2):
            batches += 1
            for name in SLOTTED:
                addresses[name].add(address(batch[name]))
            batch["pixels"][:] = 7
        self.assertEqual(batches, 125)
        for name, found in addresses.items():
            # Four ahead of the loop, that of the loop, and the one before, which the loop still has.
            self.assertLessEqual(len(found), 6, name)

    def test_batches_that_are_kept_in_part_stay_as_they_were(self) -> None:
        chance = random.Random(5)
        feed = self.feed(columns=SLOTTED, device="cpu", batch_rows=20, epochs=4)
        kept: list[tuple[Any, Any]] = []
        for number, batch in enumerate(feed):
            # A view of one column keeps the whole slot.
            name = chance.choice(SLOTTED)
            view = batch[name][1:5]
            kept.append((view, view.copy()))
            del batch, view
            while len(kept) > 40 or (kept and chance.random() < 0.5):
                found, expected = kept.pop(chance.randrange(len(kept)))
                self.assertEqual(found.tobytes(), expected.tobytes(), number)
                del found, expected
        for found, expected in kept:
            self.assertEqual(found.tobytes(), expected.tobytes())

    def test_a_program_that_holds_all_slots_gets_an_error_and_goes_on(self) -> None:
        feed = self.feed(columns=["id", "pixels"], device="cpu", batch_rows=8)
        held: list[dict[str, Any]] = []
        with self.assertRaisesRegex(millrace.ConflictError, r"holds batches in all 64 slots .*clone\(\)"):
            for batch in feed:
                held.append(batch)
            self.fail("125 batches were held")
        self.assertEqual(len(held), 64)
        # The error has the last batch in its frames no more than the list has.
        del batch
        gc.collect()
        ids = sum(map(ids_of, held), [])
        for batch in held:
            numpy.testing.assert_array_equal(batch["pixels"][:, 0], batch["id"] * 4)
        del batch
        held.clear()
        self.assertEqual(digest(ids + sum(map(ids_of, feed), [])), digest(self.order(batch_rows=8)))

    def test_positions_are_those_of_the_usual_feed(self) -> None:
        staged, usual = self.feed(device="cpu"), self.feed()
        first = ids_of(next(staged)) + ids_of(next(staged))
        usual.load_state_dict(staged.state_dict())
        self.assertEqual(digest(first + sum(map(ids_of, usual), [])), digest(self.order()))
        staged.set_epoch(0)
        self.assertEqual(digest(sum(map(ids_of, staged), [])), digest(self.order()))

    def test_a_fork_leaves_the_slots_to_the_parent(self) -> None:
        feed = self.feed(columns=["id", "pixels"], device="cpu", batch_rows=50)
        kept = [next(feed) for _ in range(3)]
        expected = [copied(batch) for batch in kept]
        order = self.order(batch_rows=50)

        def child() -> None:
            for found, before in zip(kept, expected):
                self.assert_equal(found, before)
            kept.clear()
            rest = sum(map(ids_of, feed), [])
            assert rest == order[150:], rest

        in_child(child)
        rest = sum(map(ids_of, feed), [])
        for found, before in zip(kept, expected):
            self.assert_equal(found, before)
        self.assertEqual(rest, order[150:])

    def test_other_libraries_take_the_memory_by_dlpack(self) -> None:
        for device in (None, "cpu"):
            feed = self.feed(columns=TENSORS, format="dlpack", device=device)
            for batch, expected in zip(feed, self.feed(columns=TENSORS), strict=True):
                self.assertEqual(batch["id"].__dlpack_device__(), (1, 0))
                arrays = {name: numpy.from_dlpack(column) for name, column in batch.items()}
                del batch
                for name, array in arrays.items():
                    self.assertEqual(array.tobytes(), expected[name].tobytes(), name)
        batch = next(self.feed(format="dlpack", device="cpu"))
        with self.assertRaisesRegex(BufferError, "not copied"):
            batch["id"].__dlpack__(dl_device=(2, 0))

    def test_what_cannot_be_staged_is_refused_when_the_feed_opens(self) -> None:
        for words, options in (
            ('not format="arrow"', {"format": "arrow", "device": "cpu"}),
            ("NumPy has memory of the host only", {"device": "cuda:0"}),
            ('device is "disk"; it must be', {"format": "dlpack", "device": "disk"}),
            ("no column has numbers", {"columns": ["name"], "device": "cpu"}),
            ('"tokens" is .* format="dlpack"', {"columns": ["tokens"], "format": "dlpack"}),
            ('"name" is .* format="dlpack"', {"columns": ["name"], "format": "dlpack"}),
            ("not for 'dlpack'", {"columns": ["id"], "format": "dlpack", "pad": {"id": 0}}),
        ):
            with self.assertRaisesRegex(millrace.UsageError, words):
                self.feed(**options)
        with self.assertRaisesRegex(millrace.ConflictError, '"score" has a null in row'):
            for _ in self.feed(columns=["id", "score"], device="cpu"):
                pass
        # Without CUDA in the wheel, without a driver, or with too few GPUs.
        with self.assertRaisesRegex(millrace.UnavailableError, "stage batches on cuda:999: .*(no CUDA|libcuda|GPUs|CUDA)"):
            self.feed(format="dlpack", device="cuda:999")


class TorchTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch_or_skip()
        super().setUpClass()

    def setUp(self) -> None:
        # More workers than processors are intended.
        warnings.filterwarnings("ignore", "This DataLoader will create")

    def test_tensors_keep_their_slots_in_any_order_of_release(self) -> None:
        torch, chance = self.torch, random.Random(1)
        staged = self.feed(columns=TENSORS, format="torch", device="cpu", batch_rows=25, epochs=3)
        usual = self.feed(columns=TENSORS, format="torch", batch_rows=25, epochs=3)
        kept: list[tuple[Any, Any]] = []
        for found, expected in zip(staged, usual, strict=True):
            kept += [(found[name], expected[name]) for name in TENSORS]
            del found
            chance.shuffle(kept)
            while len(kept) > 30:
                tensor, same = kept.pop()
                self.assertTrue(torch.equal(tensor, same))
                del tensor

    def test_workers_of_loaders_have_rings_of_their_own(self) -> None:
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        expected = digest(self.order(epochs=2))
        for workers, method in ((0, None), (2, "fork"), (1, "spawn")):
            dataset = FeedDataset(DATASET, columns=["id", "pixels"], home=self.home, device="cpu")
            loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)
            # All batches are kept.
            batches = [*loader, *loader]
            self.assertEqual(digest(sum(map(ids_of, batches), [])), expected, (workers, method))
            for batch in batches:
                self.assertTrue(self.torch.equal(batch["pixels"][:, 0], batch["id"] * 4.0))


class GpuTest(HomeCase):
    """With a wheel that was built with CUDA, and a PyTorch for CUDA: ``make gpu PYTHON=...``."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch_or_skip()
        if not cls.torch.cuda.is_available():
            skip("gpu", "PyTorch finds no GPU")
        super().setUpClass()

    def gpu_feed(self, **options: Any) -> millrace.Feed:
        return self.feed(**{"columns": TENSORS, "format": "torch", "device": "cuda:0", "batch_rows": 25, **options})

    def test_batches_are_on_the_gpu_and_those_of_the_usual_feed(self) -> None:
        torch = self.torch
        for found, expected in zip(self.gpu_feed(epochs=2), self.feed(columns=TENSORS, format="torch", batch_rows=25, epochs=2)):
            for name in TENSORS:
                self.assertEqual(found[name].device, torch.device("cuda:0"))
                self.assertTrue(torch.equal(found[name].cpu(), expected[name]), name)

    def test_a_batch_that_is_freed_stays_until_its_stream_has_passed(self) -> None:
        torch = self.torch
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                sums, ids = [], []
                for batch in self.gpu_feed():
                    # The copy out of the slot runs long after the tensors are freed.
                    torch.cuda._sleep(20_000_000)
                    sums.append(batch["pixels"].sum(dim=1))
                    ids.append(batch["id"].clone())
                    del batch
                expected = torch.cat(ids) * 16.0 + 6
                self.assertTrue(torch.equal(torch.cat(sums), expected))
                self.assertEqual(digest(torch.cat(ids).tolist()), digest(self.order(batch_rows=25)))

    def test_workers_of_loaders_are_refused(self) -> None:
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        dataset = FeedDataset(DATASET, columns=["id"], home=self.home, device="cuda:0")
        with self.assertRaisesRegex(millrace.UsageError, "num_workers=0"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")))
        batches = DataLoader(dataset, batch_size=None)
        self.assertEqual(digest(sum(map(ids_of, batches), [])), digest(self.order()))


if __name__ == "__main__":
    unittest.main()
