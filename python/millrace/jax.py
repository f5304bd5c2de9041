"""Batches of a feed as JAX arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy

from millrace.errors import UsageError
from millrace.feed import Feed

__all__ = ["arrays"]


def arrays(feed: Feed, *, sharding: Any = None) -> Iterator[dict[str, Any]]:
    """The batches of a feed as dictionaries of JAX arrays: ``for batch in millrace.jax.arrays(feed)``.

    On a CPU the arrays are the memory of the batch where its alignment allows that. ``feed.state_dict()`` is the position
    after the batches that were taken. Another call goes on there, or with the epochs that follow.

    Without ``jax_enable_x64``, JAX has 32 bits: floats of 64 bits are rounded, and an integer that does not fit is an
    error that names its column.

    :param feed: a feed with ``format="numpy"``, and with ``pad=`` for columns of lists of any length. Several processes
        pass ``rank=jax.process_index()`` and ``world=jax.process_count()``.
    :param sharding: ``None`` for JAX's default device; ``"local"`` to split rows over the devices of this process; or a
        ``jax.sharding.Sharding`` of the global batch, of which this process has its part. Every device needs the same
        number of rows: pass ``epochs=None``, and ``batch_rows`` that the devices divide.
    :raises millrace.UsageError: for columns that are not numbers, and for rows that the devices do not divide.
    """
    if sharding == "local":
        mesh = jax.sharding.Mesh(numpy.array(jax.local_devices()), ("rows",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    for batch in feed:
        if not isinstance(batch, dict) or not all(isinstance(column, numpy.ndarray) for column in batch.values()):
            raise UsageError(f'read {feed.dataset} as JAX arrays: pass a feed with format="numpy"')
        yield {name: _array(feed, name, column, sharding) for name, column in batch.items()}


def _array(feed: Feed, name: str, column: Any, sharding: Any) -> Any:
    if not isinstance(column, numpy.ndarray) or column.dtype.kind not in "biuf":
        found = getattr(column, "dtype", type(column).__name__)
        raise UsageError(
            f"read {feed.dataset}: column {name!r} is {feed.schema.get(name, found)}, for which JAX has no array; pass pad= "
            f"for lists of numbers, or leave it out (columns=[...])"
        )
    if column.dtype.kind in "iu" and column.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        narrow = numpy.iinfo(column.dtype.kind + "4")
        if column.size and (column.min() < narrow.min or column.max() > narrow.max):
            raise UsageError(
                f"read {feed.dataset}: column {name!r} has integers of more than 32 bits; set "
                f'jax.config.update("jax_enable_x64", True), or leave it out (columns=[...])'
            )
    if sharding is None:
        return jax.numpy.from_dlpack(column)
    try:
        return jax.make_array_from_process_local_data(sharding, column)
    except ValueError as error:
        raise UsageError(
            f"read {feed.dataset}: column {name!r} of shape {column.shape} does not fit the sharding: {error}; read full "
            f"batches (epochs=None) of a number of rows that the devices divide"
        ) from error
