"""A feed as a ``tf.data.Dataset``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy
import tensorflow

from millrace.errors import UsageError
from millrace.feed import Feed

__all__ = ["dataset"]


def dataset(feed: Feed) -> Any:
    """A ``tf.data.Dataset`` of the batches of a feed: dictionaries of tensors whose first dimension is open.

    Each iteration of the dataset is one iteration of the feed. The first one begins at the position of the feed, and each
    further one behind the one before: ``fit(epochs=n)`` and ``repeat(n)`` read the epochs that follow. After
    ``feed.set_epoch`` or ``feed.load_state_dict``, the next one begins there.

    TensorFlow reads ahead, so only the loop knows what it has taken. The feed stays at the beginning of the iteration that
    began last. After ``n`` batches of it, ``feed.state_after(n)`` is the state to store, and ``feed.load_state_dict`` goes
    on from it. ``repeat`` begins iterations before the loop has taken all batches of the one before. To store states, pass
    ``epochs=n`` to the feed instead.

    An iteration that was left early is begun again, unless TensorFlow had read ahead to its last batch. To depend on no
    timing, set the position after a loop that is left early. Under a strategy, ``fit`` of Keras takes one batch and begins
    again: with epochs of few batches, call ``set_epoch`` in ``on_epoch_begin``. ``fit`` takes the number of steps of an epoch
    from its first one: read the rest of a resumed epoch in a ``fit`` of its own.

    Strings and bytes are tensors of strings; lists of numbers are ragged tensors. The dataset is not sharded by
    TensorFlow: in ``strategy.distribute_datasets_from_function``, pass the feed ``rank=context.input_pipeline_id`` and
    ``world=context.num_input_pipelines``.

    :param feed: a feed with ``format="numpy"``.
    :raises millrace.UsageError: for columns that TensorFlow has no tensor for, such as times.
    """
    probe = copy.copy(feed)
    # A state of the last batch leaves an empty iteration, whose tensors are those of the others.
    probe._is_over = False
    probe = next(probe, None)
    if not isinstance(probe, dict) or not all(isinstance(column, numpy.ndarray) for column in probe.values()):
        raise UsageError(f'read {feed.dataset} as tf.data: pass a feed with format="numpy" that has rows')
    signature = {name: _spec(feed, name, column) for name, column in probe.items()}

    def batches() -> Iterator[dict[str, Any]]:
        own, ahead = feed._begin_ahead()
        for batch in own:
            tensors = {name: _tensor(feed, name, column, signature[name]) for name, column in batch.items()}
            ahead.place = own._place
            yield tensors

    made = tensorflow.data.Dataset.from_generator(batches, output_signature=signature)
    options = tensorflow.data.Options()
    # The feed gives each rank its part already.
    options.experimental_distribute.auto_shard_policy = tensorflow.data.experimental.AutoShardPolicy.OFF
    return made.with_options(options)


def _spec(feed: Feed, name: str, column: Any) -> Any:
    kind = feed.schema.get(name, "")
    listed = re.match(r"(?:Large)?List\((?:non-null )?(U?Int(?:8|16|32|64)|Float(?:16|32|64)|Boolean)\b", kind)
    if column.dtype.kind in "biuf":
        # Lists that are padded have another length in each batch.
        lengths = [None] * (column.ndim - 1) if listed else column.shape[1:]
        return tensorflow.TensorSpec((None, *lengths), column.dtype)
    if kind in ("Utf8", "LargeUtf8", "Utf8View", "Binary", "LargeBinary", "BinaryView"):
        return tensorflow.TensorSpec((None,), tensorflow.string)
    if listed:
        values = numpy.dtype("bool" if listed[1] == "Boolean" else listed[1].lower())
        return tensorflow.RaggedTensorSpec((None, None), values, ragged_rank=1)
    raise UsageError(
        f"read {feed.dataset}: column {name!r} is {kind}, for which TensorFlow has no tensor; leave it out (columns=[...])"
    )


def _tensor(feed: Feed, name: str, column: Any, spec: Any) -> Any:
    if column.dtype != object:
        return column
    if any(row is None for row in column):
        raise UsageError(
            f"read {feed.dataset}: column {name!r} has a null, for which TensorFlow has no value; fill it when the data is "
            f"written, or leave the column out (columns=[...])"
        )
    if isinstance(spec, tensorflow.RaggedTensorSpec):
        lengths = [len(row) for row in column]
        values = numpy.concatenate(column) if len(column) else numpy.empty(0, spec.dtype.as_numpy_dtype)
        return tensorflow.RaggedTensor.from_row_lengths(values.astype(spec.dtype.as_numpy_dtype, copy=False), lengths)
    return tensorflow.constant([row.encode() if isinstance(row, str) else bytes(row) for row in column], tensorflow.string)
