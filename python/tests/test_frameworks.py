"""The feed in JAX and TensorFlow."""

from __future__ import annotations

import copy
import itertools
import os
import unittest
from typing import Any
from unittest import mock

import millrace
import numpy
from support import DATASET, DEADLINE_S, ROWS, HomeCase, digest, ids_of, python, require

# TensorFlow tells much of this machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class JaxTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        require("jax")
        super().setUpClass()

    def test_arrays_have_the_rows_of_the_feed_and_resume(self) -> None:
        import millrace.jax

        feed = self.feed(columns=["id", "pixels", "label", "even"])
        ids = []
        for batch in itertools.islice(millrace.jax.arrays(feed), 3):
            ids += ids_of(batch)
            own = numpy.asarray(batch["id"])
            self.assertEqual(str(batch["even"].dtype), "bool")
            numpy.testing.assert_array_equal(batch["even"], own % 2 == 0)
            numpy.testing.assert_array_equal(batch["pixels"], own[:, None] * 4 + numpy.arange(4))
        resumed = self.feed(columns=["id"])
        resumed.load_state_dict(feed.state_dict())
        for batch in millrace.jax.arrays(resumed):
            ids += ids_of(batch)
        self.assertEqual(digest(ids), digest(self.order()))

    def test_iterations_read_the_epochs_that_follow(self) -> None:
        import millrace.jax

        feed = self.feed()
        ids = [i for _ in range(2) for batch in millrace.jax.arrays(feed) for i in ids_of(batch)]
        self.assertEqual(digest(ids), digest(self.order(epochs=2)))

    def test_what_jax_cannot_hold_is_refused(self) -> None:
        import millrace.jax

        for column in ("name", "at", "tokens"):
            with self.assertRaisesRegex(millrace.UsageError, f"column '{column}' is .*JAX has no array"):
                next(millrace.jax.arrays(self.feed(columns=[column])))
        for format in ("arrow", "torch"):
            with self.assertRaisesRegex(millrace.UsageError, 'format="numpy"'):
                next(millrace.jax.arrays(self.feed(format=format)))

        class Large:
            dataset, schema = "large", {"id": "Int64"}

            def __iter__(self) -> object:
                return iter([{"id": numpy.array([1 << 31])}])

        with self.assertRaisesRegex(millrace.UsageError, "column 'id' has integers of more than 32 bits"):
            next(millrace.jax.arrays(Large()))

    def test_rows_are_split_over_local_devices(self) -> None:
        code = """
import os
import jax, numpy
import millrace, millrace.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_enable_x64", True)
assert jax.local_device_count() == 4

def feed(**arguments):
    return millrace.Feed("digits@v1:/train", home=os.environ["HOME_DIR"], columns=["id", "pixels"], **arguments)

plain = next(feed(batch_rows=64, epochs=None))
batch = next(millrace.jax.arrays(feed(batch_rows=64, epochs=None), sharding="local"))
assert len(batch["pixels"].addressable_shards) == 4
assert {shard.data.shape for shard in batch["pixels"].addressable_shards} == {(16, 4)}
assert batch["id"].dtype == "int64"
numpy.testing.assert_array_equal(numpy.asarray(batch["id"]), plain["id"])
mesh = Mesh(numpy.array(jax.devices()).reshape(2, 2), ("rows", "parts"))
both = NamedSharding(mesh, PartitionSpec("rows"))
batch = next(millrace.jax.arrays(feed(batch_rows=64, epochs=None), sharding=both))
total = jax.jit(lambda x: x.sum(), out_shardings=None)(batch["pixels"])
assert float(total) == float(plain["pixels"].sum())
try:
    next(millrace.jax.arrays(feed(batch_rows=63), sharding="local"))
except millrace.UsageError as error:
    assert "does not fit the sharding" in str(error), error
else:
    raise AssertionError("63 rows on 4 devices")
"""
        with mock.patch.dict(os.environ, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}):
            process = python(self.home, code)
        _, errors = process.communicate(timeout=DEADLINE_S)
        self.assertEqual(process.returncode, 0, errors)


class TensorFlowTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        require("tensorflow")
        super().setUpClass()

    def test_tensors_have_types_shapes_and_the_rows_of_the_feed(self) -> None:
        import tensorflow

        import millrace.tf

        feed = self.feed(columns=["id", "pixels", "even", "tokens", "kind"])
        made = millrace.tf.dataset(feed)
        self.assertEqual(made.element_spec["pixels"], tensorflow.TensorSpec((None, 4), tensorflow.float32))
        self.assertEqual(made.element_spec["kind"], tensorflow.TensorSpec((None,), tensorflow.string))
        self.assertIsInstance(made.element_spec["tokens"], tensorflow.RaggedTensorSpec)
        ids = []
        for batch in made.prefetch(2):
            own = batch["id"].numpy()
            ids += ids_of({"id": own})
            numpy.testing.assert_array_equal(batch["pixels"], own[:, None] * 4 + numpy.arange(4))
            self.assertEqual(batch["tokens"].to_list(), [list(range(i % 5)) for i in own])
            self.assertEqual(batch["kind"].numpy().tolist(), [f"kind {i % 3}".encode() for i in own])
        self.assertEqual(digest(ids), digest(self.order()))

    def test_a_counted_position_resumes(self) -> None:
        import millrace.tf

        feed = self.feed()
        ids = [i for batch in millrace.tf.dataset(feed).prefetch(4).take(3) for i in ids_of({"id": batch["id"].numpy()})]
        state = feed.state_after(3)
        self.assertEqual(feed.state_dict()["rows"], 0)
        resumed = self.feed()
        resumed.load_state_dict(state)
        ids += [i for batch in millrace.tf.dataset(resumed) for i in ids_of({"id": batch["id"].numpy()})]
        self.assertEqual(digest(ids), digest(self.order()))

    def test_epochs_differ(self) -> None:
        import millrace.tf

        feed = self.feed()
        made, ids = millrace.tf.dataset(feed), []
        for epoch in range(2):
            feed.set_epoch(epoch)
            ids += [i for batch in made for i in ids_of({"id": batch["id"].numpy()})]
        self.assertEqual(digest(ids), digest(self.order(epochs=2)))

    @staticmethod
    def ids(made: Any) -> list[int]:
        return [i for batch in made for i in ids_of({"id": batch["id"].numpy()})]

    def test_iterations_read_the_epochs_that_follow(self) -> None:
        import millrace.tf

        feed = self.feed()
        made = millrace.tf.dataset(feed)
        ids = self.ids(made) + self.ids(made.prefetch(2).repeat(2))
        # Another dataset of the feed goes on, too.
        ids += self.ids(millrace.tf.dataset(feed).prefetch(4))
        self.assertEqual(digest(ids), digest(self.order(epochs=4)))
        self.assertEqual(feed.epoch, 3)
        for _ in range(2):
            feed.set_epoch(0)
            self.assertEqual(digest(self.ids(made)), digest(self.order()))
        self.assertEqual(digest(ids[ROWS : 2 * ROWS]), digest(self.ids(made)))

    def test_a_loop_that_was_left_is_begun_again_or_resumed(self) -> None:
        import millrace.tf

        feed = self.feed()
        made = millrace.tf.dataset(feed)
        # The dataset reads no further than the loop takes.
        left = self.ids(made.take(2))
        ids = self.ids(made)
        self.assertEqual(left, ids[:256])
        ids += self.ids(made.take(3))
        state = feed.state_after(3)
        self.assertEqual(feed.epoch, 1)
        with self.assertRaisesRegex(millrace.UsageError, "after 4 batches: TensorFlow has read fewer"):
            feed.state_after(4)
        feed.load_state_dict(state)
        for _ in range(2):
            ids += self.ids(made)
        self.assertEqual(digest(ids), digest(self.order(epochs=3)))
        # All batches of an iteration, without its end.
        batches = len(feed)
        ids = self.ids(made.take(batches))
        # The state of the last batch has nothing left, and the iteration after it begins the next epoch.
        feed.load_state_dict(feed.state_after(batches))
        self.assertEqual(self.ids(made), [])
        self.assertEqual(digest(ids + self.ids(made)), digest(self.order(epochs=5)[3 * ROWS :]))

    def test_a_feed_without_end_begins_at_its_position(self) -> None:
        import millrace.tf

        feed = self.feed(epochs=None)
        made = millrace.tf.dataset(feed)
        for _ in range(2):
            self.assertEqual(digest(self.ids(made.take(16))), digest(self.order(epochs=3)[: 16 * 128]))
        feed.load_state_dict(feed.state_after(16))
        self.assertEqual(digest(self.ids(made.take(4))), digest(self.order(epochs=3)[16 * 128 : 20 * 128]))

    def test_epochs_of_keras_are_those_that_follow(self) -> None:
        import tensorflow

        import millrace.tf

        feed = millrace.Feed(DATASET, columns=["id"], home=self.home, batch_rows=64, rows_per_epoch=0.25)
        trained: list[int] = []

        class Record(tensorflow.keras.layers.Layer):
            def call(self, rows: Any) -> Any:
                def record(values: Any) -> Any:
                    trained.extend(int(value) for value in values.numpy().ravel())
                    return values

                kept = tensorflow.py_function(record, [rows], rows.dtype)
                kept.set_shape(rows.shape)
                return tensorflow.cast(kept, "float32")

        def features(batch: Any) -> Any:
            return batch["id"][:, None], tensorflow.zeros_like(batch["id"], "float32")[:, None]

        model = tensorflow.keras.Sequential([Record(), tensorflow.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        # Epochs of 4, 5, 5 and 5 batches.
        steps: list[int] = []
        count = tensorflow.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
        model.fit(millrace.tf.dataset(feed).map(features), epochs=4, verbose=0, callbacks=[count])
        self.assertEqual(steps, [*range(4), *range(5), *range(5), *range(5)])
        self.assertEqual(digest(trained), digest(self.order(batch_rows=64)))

    def test_a_rank_without_rows_gets_empty_batches(self) -> None:
        import millrace.tf

        rows = []
        for rank in range(3):
            feed = self.feed(columns=["id", "tokens", "kind"], batch_rows=2, rank=rank, world=3)
            batch = next(iter(millrace.tf.dataset(feed)))
            rows.append([int(column.shape[0]) for column in batch.values()])
        self.assertEqual(sorted(rows), [[0, 0, 0], [1, 1, 1], [1, 1, 1]])

    def test_what_tensorflow_cannot_hold_is_refused(self) -> None:
        import millrace.tf

        with self.assertRaisesRegex(millrace.UsageError, "column 'at' is .*TensorFlow has no tensor"):
            millrace.tf.dataset(self.feed(columns=["at"]))
        with self.assertRaisesRegex(Exception, "column 'name' has a null"):
            list(millrace.tf.dataset(self.feed(columns=["name"])))

    def test_keras_trains_from_the_dataset(self) -> None:
        import tensorflow

        import millrace.tf

        feed = millrace.Feed(DATASET, columns=["pixels", "label"], home=self.home, batch_rows=100)
        pairs = millrace.tf.dataset(feed).map(lambda batch: (batch["pixels"] / 4000, batch["label"]))
        model = tensorflow.keras.Sequential([tensorflow.keras.layers.Dense(10)])
        model.compile("sgd", tensorflow.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        steps: list[int] = []
        count = tensorflow.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
        history = model.fit(pairs, epochs=1, verbose=0, callbacks=[count])
        self.assertEqual(steps, list(range(ROWS // 100)))
        self.assertTrue(numpy.isfinite(history.history["loss"][0]))
        self.assertEqual(copy.copy(feed).state_dict(), feed.state_dict())


if __name__ == "__main__":
    unittest.main()
