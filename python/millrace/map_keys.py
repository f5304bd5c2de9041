"""Keys of reduce jobs: which columns can be one, their order, and the hash that decides the part of a row.

Each key column becomes a column of integers or bytes with the same order, in which equal keys are equal values: a float
becomes an integer, with one value for -0.0 and 0.0 and one for every NaN. Null is a key of its own, after all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from millrace.errors import UsageError

__all__ = ["Keys"]

# The hash of null, and the multiplier between columns. Parts on disk depend on them: they never change.
_NULL = 0x9AE16A3B2F90404F
_FACTOR = 31
# The NaN after all numbers.
_NAN = (1 << 63) - 1


class Keys:
    """The key columns of a job.

    :param names: one column or several.
    :param schema: the columns of the rows, a ``pyarrow.Schema``.
    :raises millrace.UsageError: for a column that is missing, or whose type can be no key.
    """

    def __init__(self, names: Sequence[str], schema: Any) -> None:
        self.names = list(names)
        for name in self.names:
            if name not in schema.names:
                columns = ", ".join(schema.names)
                raise UsageError(f"the function returned no key column {name!r}; its columns are {columns}")
            kind = schema.field(name).type
            if not _is_key(kind):
                raise UsageError(
                    f"key column {name!r} is {kind}; a key is an integer, a float of 32 or 64 bits, a boolean, a text, "
                    f"bytes, a date, or a time of microseconds or coarser: cast it in the function"
                )

    def ordered(self, batch: Any) -> list[Any]:
        """The key columns of a record batch as arrays of integers or bytes with the same order."""
        return [_ordered(batch.column(name)) for name in self.names]

    def parts(self, batch: Any, parts: int) -> Any:
        """The part of each row, a NumPy array of integers below ``parts``. Equal keys have equal parts, for ever."""
        import numpy

        total = numpy.zeros(batch.num_rows, numpy.uint64)
        for array in self.ordered(batch):
            total = _mixed(total * numpy.uint64(_FACTOR) + _hashed(array))
        return (total % numpy.uint64(parts)).astype(numpy.int64)

    def values(self, batch: Any, rows: Any) -> list[Any]:
        """The keys of some rows, as the function gets them: a value, or a tuple for several columns."""
        columns = [_values(batch.column(name).take(rows)) for name in self.names]
        return columns[0] if len(columns) == 1 else list(zip(*columns))


def _is_key(kind: Any) -> bool:
    from pyarrow import types

    return (
        types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_date32(kind)
        or (types.is_timestamp(kind) and kind.unit != "ns")
    )


def _ordered(array: Any) -> Any:
    import pyarrow
    from pyarrow import types

    kind = array.type
    if types.is_boolean(kind):
        return array.cast(pyarrow.int8())
    if types.is_string(kind):
        # The order of UTF-8 is that of code points.
        return array.view(pyarrow.binary())
    if types.is_large_string(kind):
        return array.view(pyarrow.large_binary())
    if types.is_date32(kind):
        return array.view(pyarrow.int32())
    if types.is_timestamp(kind):
        # Times as numbers: local times come twice when clocks are set back.
        return array.view(pyarrow.int64())
    if types.is_floating(kind):
        return _ordered_float(array)
    return array


def _ordered_float(array: Any) -> Any:
    import numpy
    import pyarrow

    nulls = array.is_null().to_numpy(zero_copy_only=False)
    values = array.to_numpy(zero_copy_only=False).astype(numpy.float64) + 0.0
    bits = values.view(numpy.int64).copy()
    bits[bits < 0] ^= _NAN
    bits[numpy.isnan(values)] = _NAN
    return pyarrow.array(bits, mask=nulls)


def _hashed(array: Any) -> Any:
    """A hash of each value of an ordered column."""
    import numpy
    from pyarrow import types

    nulls = array.is_null().to_numpy(zero_copy_only=False)
    if types.is_integer(array.type):
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        if values.dtype != numpy.uint64:
            values = values.astype(numpy.int64).view(numpy.uint64)
        hashes = _mixed(values)
    else:
        encoded = array.dictionary_encode()
        distinct = [hashlib.blake2b(value, digest_size=8).digest() for value in encoded.dictionary.to_pylist()]
        # One more, for columns of nulls only.
        table = numpy.frombuffer(b"".join([*distinct, bytes(8)]), "<u8").astype(numpy.uint64)
        hashes = table[encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)]
    hashes[nulls] = numpy.uint64(_NULL)
    return hashes


def _mixed(values: Any) -> Any:
    """The finaliser of splitmix64, which has each bit of the value change all bits of the hash."""
    import numpy

    values = values + numpy.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


def _values(array: Any) -> list[Any]:
    values = array.to_pylist()
    # -0.0 and 0.0 are one key.
    return [value + 0.0 if isinstance(value, float) else value for value in values]
