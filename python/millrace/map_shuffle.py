"""Files between map and reduce: the output of one input group, with the rows of each part together.

A file is a sequence of segments, each an Arrow IPC stream with rows of one part, in the order of the function's output.
After them stands the index: for each segment its part, offset, length and rows, as signed integers of 64 bits in little
endian. The last 16 bytes are the number of segments and the magic ``MLRSHUF1``. The volume checks the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from millrace.errors import CorruptError, UsageError
from millrace.map_keys import Keys
from millrace.map_output import Output
from millrace.map_record import Groups
from millrace.volume import Volume, Writer

__all__ = ["ShuffleOutput", "segments"]

_MAGIC = b"MLRSHUF1"
_TAIL = struct.Struct("<q8s")
_SEGMENT_BYTES = 32


class ShuffleOutput(Output):
    """The output of an input group, split by the hash of the key.

    :param key: the key columns.
    :param parts: the number of parts.
    """

    def __init__(self, groups: Groups, group: int, key: list[str], parts: int) -> None:
        super().__init__(groups, group)
        self._key = key
        self._parts = parts
        self._keys: Keys | None = None
        self._segments: list[tuple[int, int, int, int]] = []

    def _adapt(self, table: Any) -> Any:
        """Texts in the place of dictionaries: each group has a dictionary of its own."""
        import pyarrow

        schema = _decoded(table.schema.remove_metadata())
        if schema.equals(table.schema, check_metadata=True):
            return table
        try:
            return table.cast(schema)
        except (pyarrow.ArrowException, NotImplementedError) as error:
            raise UsageError(f"the function returned columns that cannot be sorted by key: {error}") from error

    def _begin(self, file: Writer, schema: Any) -> None:
        self._keys = Keys(self._key, schema)

    def _encode(self, table: Any) -> None:
        import numpy
        import pyarrow

        assert self._keys is not None and self._file is not None
        try:
            for batch in table.combine_chunks().to_batches():
                part = self._keys.parts(batch, self._parts)
                order = numpy.argsort(part, kind="stable")
                rows = batch.take(pyarrow.array(order))
                ends = numpy.searchsorted(part[order], numpy.arange(self._parts + 1))
                for number in numpy.flatnonzero(numpy.diff(ends)).tolist():
                    self._segment(number, rows.slice(ends[number], ends[number + 1] - ends[number]))
        except (pyarrow.ArrowException, NotImplementedError) as error:
            raise UsageError(f"the function returned columns that cannot be sorted by key: {error}") from error

    def _segment(self, part: int, rows: Any) -> None:
        import pyarrow

        assert self._file is not None
        buffer = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(buffer, rows.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as out:
            out.write_batch(rows)
        data = buffer.getvalue()
        self._segments.append((part, self._file._written, data.size, rows.num_rows))
        self._file.write(data)

    def _end(self) -> None:
        import numpy

        assert self._file is not None
        self._file.write(numpy.array(self._segments, "<i8").tobytes())
        self._file.write(_TAIL.pack(len(self._segments), _MAGIC))


def segments(volume: Volume, path: str, part: int) -> Iterator[Any]:
    """The record batches of one part in a file, in their order.

    :raises millrace.CorruptError: when the file is no such file.
    """
    import numpy
    import pyarrow

    file = volume._native.open(path)
    try:
        count, magic = _TAIL.unpack(_read(file, path, file.size - _TAIL.size, _TAIL.size))
        if magic != _MAGIC or not 0 <= count <= file.size // _SEGMENT_BYTES:
            raise CorruptError(f"read {volume.name}:{path}: it is no file between map and reduce")
        index = _read(file, path, file.size - _TAIL.size - count * _SEGMENT_BYTES, count * _SEGMENT_BYTES)
        for number, offset, length, _ in numpy.frombuffer(index, "<i8").reshape(-1, 4).tolist():
            if number == part:
                try:
                    with pyarrow.ipc.open_stream(pyarrow.py_buffer(_read(file, path, offset, length))) as stream:
                        yield from stream
                except pyarrow.ArrowException as error:
                    raise CorruptError(f"read {volume.name}:{path}: part {part} at byte {offset}: {error}") from error
    finally:
        file.close()


def _read(file: Any, path: str, offset: int, length: int) -> bytes:
    data: bytes = file.read_at(offset, length) if offset >= 0 and length >= 0 else b""
    if len(data) != length:
        raise CorruptError(f"read {path}: {length} bytes at {offset} are missing; the file is cut off")
    return data


def _decoded(schema: Any) -> Any:
    import pyarrow

    fields = [pyarrow.field(field.name, _decoded_type(field.type), field.nullable) for field in schema]
    return pyarrow.schema(fields)


def _decoded_type(kind: Any) -> Any:
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_list(kind):
        return pyarrow.list_(_decoded_type(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(_decoded_type(kind.value_type))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_decoded_type(field.type)) for field in kind])
    return kind
