"""Columns as arrays, tensors and Arrow record batches."""

from __future__ import annotations

import itertools
import pickle
import unittest

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from support import DATASET, ROWS, TENSORS, HomeCase, rows, torch_or_skip

from millrace import _native


class NumpyTest(HomeCase):
    def test_columns_have_the_values_that_were_written(self) -> None:
        columns = ["id", "pixels", "label", "even", "at", "day", "name", "tokens", "kind"]
        written = rows(0, ROWS)
        for batch in self.feed(columns=columns):
            self.assertEqual(list(batch), columns)
            ids = batch["id"]
            self.assertEqual((ids.dtype, batch["label"].dtype), (numpy.int64, numpy.uint8))
            self.assertEqual((batch["pixels"].shape, batch["pixels"].dtype), ((len(ids), 4), numpy.float32))
            numpy.testing.assert_array_equal(batch["pixels"], (ids[:, None] * 4 + numpy.arange(4)))
            numpy.testing.assert_array_equal(batch["even"], ids % 2 == 0)
            numpy.testing.assert_array_equal(batch["at"], (ids * 1_000).astype("datetime64[us]"))
            numpy.testing.assert_array_equal(batch["day"], ids.astype("datetime64[D]"))
            for row, i in enumerate(ids):
                expected = written.slice(i, 1)
                self.assertEqual(batch["name"][row], expected["name"][0].as_py())
                self.assertEqual(batch["kind"][row], expected["kind"][0].as_py())
                self.assertEqual(batch["tokens"][row].tolist(), expected["tokens"][0].as_py())

    def test_arrays_are_the_memory_of_the_batch_and_writable(self) -> None:
        batch = next(self.feed(columns=["pixels"]))["pixels"]
        owner = batch
        while isinstance(owner, numpy.ndarray):
            owner = owner.base
        self.assertIsInstance(owner, _native.Values)
        self.assertEqual(owner.__array_interface__["data"][0], batch.ctypes.data)
        batch[0] = 7
        self.assertEqual(batch[0].tolist(), [7] * 4)

    def test_a_null_names_its_column(self) -> None:
        with self.assertRaisesRegex(millrace.ConflictError, '"score" has a null in row'):
            for _ in self.feed(columns=["score"]):
                pass

    def test_stored_tensors_have_their_shape(self) -> None:
        volume = millrace.Volume("digits", home=self.home)
        tensors = numpy.arange(24, dtype=numpy.float32).reshape(4, 2, 3)
        of_shape = pyarrow.FixedShapeTensorArray.from_numpy_ndarray
        columns = {"id": pyarrow.array(range(4)), "x": of_shape(tensors), "turned": of_shape(tensors.transpose(0, 2, 1))}
        table = pyarrow.table(columns)
        with volume.open("/tensors/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(table, out)
        batch = next(millrace.Feed("digits:/tensors", home=self.home, batch_rows=4))
        numpy.testing.assert_array_equal(batch["x"], tensors[batch["id"]])
        # The axes of these are stored in another order, which stays as it is.
        self.assertEqual(batch["turned"].shape, (4, 6))
        read = next(millrace.Feed("digits:/tensors", home=self.home, batch_rows=4, format="arrow"))
        self.assertEqual(read.schema.field("x").type, table.schema.field("x").type)

        # Another shape in another file: both are flat.
        with volume.open("/tensors/1.parquet", "wb") as out:
            other = pyarrow.table({"id": pyarrow.array(range(4, 8)), "x": of_shape(tensors.reshape(4, 3, 2))})
            pyarrow.parquet.write_table(other, out)
        batch = next(millrace.Feed("digits:/tensors", home=self.home, batch_rows=4, columns=["x"]))
        self.assertEqual(batch["x"].shape, (4, 6))

    def test_a_column_without_a_form_is_refused_when_the_feed_opens(self) -> None:
        volume = millrace.Volume("digits", home=self.home)
        with volume.open("/nested/0.arrow", "wb") as out:
            table = pyarrow.table({"point": [{"x": 1}]})
            with pyarrow.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)
        with self.assertRaisesRegex(millrace.UsageError, '"point" is Struct'):
            millrace.Feed("digits:/nested", home=self.home)
        self.assertEqual(next(millrace.Feed("digits:/nested", home=self.home, format="arrow")).num_rows, 1)


class ArrowTest(HomeCase):
    def test_batches_are_record_batches_with_nulls(self) -> None:
        read = pyarrow.Table.from_batches(list(self.feed(columns=None, format="arrow"))).sort_by("id")
        written = rows(0, ROWS)
        for name in written.column_names:
            self.assertEqual(read[name].to_pylist(), written[name].to_pylist(), name)

    def test_schema_names_columns_and_types(self) -> None:
        schema = self.feed(columns=["id", "name"]).schema
        self.assertEqual(schema, {"id": "Int64", "name": "Utf8"})


class TorchTest(HomeCase):
    def test_tensors_share_the_memory_of_the_batch(self) -> None:
        torch = torch_or_skip()
        for batch in self.feed(columns=TENSORS, format="torch"):
            self.assertEqual(batch["id"].dtype, torch.int64)
            self.assertEqual((batch["even"].dtype, batch["label"].dtype), (torch.bool, torch.uint8))
            self.assertTrue(torch.equal(batch["pixels"], (batch["id"][:, None] * 4 + torch.arange(4)).float()))
            self.assertTrue(torch.equal(batch["even"], batch["id"] % 2 == 0))

    def test_columns_without_tensors_are_refused_when_the_feed_opens(self) -> None:
        torch_or_skip()
        for column in ("name", "at", "day", "kind"):
            with self.assertRaisesRegex(millrace.UsageError, f'"{column}" is '):
                millrace.Feed(DATASET, columns=[column], format="torch", home=self.home)

    def test_lists_of_one_length_are_one_tensor_and_others_need_a_filler(self) -> None:
        torch = torch_or_skip()
        volume = millrace.Volume("lists", create=True, home=self.home)
        for name, lengths in (("equal", [3] * 40), ("ragged", [i % 4 for i in range(40)])):
            tokens = pyarrow.array([list(range(i, i + n)) for i, n in enumerate(lengths)], pyarrow.list_(pyarrow.int32()))
            table = pyarrow.table({"id": list(range(40)), "tokens": tokens})
            with volume.open(f"/{name}/0.parquet", "wb") as out:
                pyarrow.parquet.write_table(table, out)
        for batch in millrace.Feed("lists:/equal", batch_rows=16, format="torch", home=self.home):
            self.assertTrue(torch.equal(batch["tokens"], (batch["id"][:, None] + torch.arange(3)).int()))
        with self.assertRaisesRegex(millrace.UsageError, r"'tokens' has lists of \d and, in row \d+ .* pad="):
            next(millrace.Feed("lists:/ragged", batch_rows=16, format="torch", home=self.home))
        for format in ("torch", "numpy"):
            feed = millrace.Feed("lists:/ragged", batch_rows=16, format=format, pad={"tokens": -1}, home=self.home)
            for batch in pickle.loads(pickle.dumps(feed)):
                rows = zip(batch["id"].tolist(), batch["tokens"].tolist(), batch["tokens_length"].tolist())
                width = max(id % 4 for id in batch["id"].tolist())
                for id, tokens, length in rows:
                    expected = list(range(id, id + id % 4)) + [-1] * (width - id % 4)
                    self.assertEqual((tokens, length), (expected, id % 4), format)
            # A rank without a row of the last batch.
            parts = list(millrace.Feed("lists:/ragged", batch_rows=39, rank=0, world=2, format=format,
                                       pad={"tokens": 0}, home=self.home))
            self.assertEqual(tuple(parts[-1]["tokens"].shape), (0, 0))
            for pad in ({"tokens": 0.5}, {"tokens": 1 << 31}, {"tokens": -(1 << 40)}):
                with self.assertRaisesRegex(millrace.UsageError, "pad of column 'tokens'"):
                    next(millrace.Feed("lists:/ragged", format=format, pad=pad, home=self.home))
        for pad, words in (({"id": 0}, "only lists"), ({"nope": 0}, "does not read"), ({"tokens": "x"}, "a number")):
            with self.assertRaisesRegex(millrace.UsageError, words):
                millrace.Feed("lists:/ragged", pad=pad, home=self.home)

    def test_pads_beyond_a_float_are_refused(self) -> None:
        volume = millrace.Volume("floats", create=True, home=self.home)
        lists = pyarrow.array([[0.5], []], pyarrow.list_(pyarrow.float32()))
        with volume.open("/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(pyarrow.table({"x": lists}), out)
        with self.assertRaisesRegex(millrace.UsageError, "pad of column 'x' is 1e\\+40, which is no float32"):
            next(millrace.Feed("floats:/", pad={"x": 1e40}, home=self.home))
        batch = next(millrace.Feed("floats:/", pad={"x": float("inf")}, home=self.home))
        self.assertEqual(sorted(batch["x"].ravel().tolist()), [0.5, float("inf")])

    def test_lists_of_lists_are_refused_when_the_feed_opens(self) -> None:
        torch_or_skip()
        volume = millrace.Volume("nested", create=True, home=self.home)
        boxes = pyarrow.array([[[1, 2], [3]], [[4]]], pyarrow.list_(pyarrow.list_(pyarrow.int32())))
        with volume.open("/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(pyarrow.table({"boxes": boxes}), out)
        for format in ("torch", "numpy"):
            for pad in (None, {"boxes": 0}):
                with self.assertRaisesRegex(millrace.UsageError, "boxes"):
                    millrace.Feed("nested:/", format=format, pad=pad, home=self.home)
        batch = next(millrace.Feed("nested:/", batch_rows=2, format="arrow", home=self.home))
        self.assertEqual(sorted(batch["boxes"].to_pylist()), sorted(boxes.to_pylist()))

    def test_a_null_names_its_column(self) -> None:
        torch_or_skip()
        with self.assertRaisesRegex(millrace.ConflictError, '"score" has a null in row'):
            for _ in self.feed(columns=["score"], format="torch"):
                pass

    def test_training_steps_equal_those_on_the_same_batches_by_hand(self) -> None:
        torch = torch_or_skip()

        def train(batches: list[tuple[object, object]]) -> list[object]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for pixels, labels in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(pixels / (4 * ROWS)), labels.long()).backward()
                optimizer.step()
            for parameter, start in zip(model.parameters(), before, strict=True):
                self.assertGreater(float((parameter.detach() - start).abs().max()), 0.01, "the steps change the weights")
            return [parameter.detach().clone() for parameter in model.parameters()]

        fed, by_hand = [], []
        feed = self.feed(columns=TENSORS, format="torch", epochs=None)
        for _ in range(20):
            batch = next(feed)
            fed.append((batch["pixels"], batch["label"]))
            ids = batch["id"].tolist()
            pixels = torch.tensor([[i * 4 + k for k in range(4)] for i in ids], dtype=torch.float32)
            by_hand.append((pixels, torch.tensor([i % 10 for i in ids], dtype=torch.uint8)))
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        dataset = FeedDataset(DATASET, columns=TENSORS, home=self.home, epochs=None)
        batches = itertools.islice(DataLoader(dataset, batch_size=None, num_workers=2), 20)
        loaded = [(batch["pixels"].clone(), batch["label"].clone()) for batch in batches]
        expected = train(by_hand)
        for name, read in (("feed", fed), ("loader", loaded)):
            for one, other in zip(train(read), expected, strict=True):
                self.assertTrue(torch.equal(one, other), name)


if __name__ == "__main__":
    unittest.main()
