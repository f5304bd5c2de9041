"""An external sort: record batches in the order of their keys, in bounded memory.

Batches are collected up to a size, sorted, and written as a run to a temporary file that has no name, so nothing is left
of it after a crash. Runs are merged in passes over at most ``fan_in`` of them. The sort is stable: rows with equal keys come
in the order in which they were added, so that the order depends on the rows alone.
"""

from __future__ import annotations

import bisect
import errno
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from millrace.errors import Error, NoSpaceError, UsageError
from millrace.map_keys import Keys

__all__ = ["MEMORY_BYTES", "Sorter", "one_batch"]

# Rows that are sorted in memory. The sort takes about three times as much.
MEMORY_BYTES = 32 << 20
# Rows that are read, written and handed out at a time.
_BATCH_BYTES = 1 << 20
_FAN_IN = 32


class Sorter:
    """Sorts the batches that are added, all of one schema.

    :param memory_bytes: bytes of rows that are kept before they go to a temporary file.
    """

    def __init__(
        self, keys: Keys, *, memory_bytes: int = MEMORY_BYTES, batch_bytes: int = _BATCH_BYTES, fan_in: int = _FAN_IN
    ) -> None:
        self._keys = keys
        self._memory_bytes = memory_bytes
        self._batch_bytes = batch_bytes
        self._fan_in = fan_in
        self._batches: list[Any] = []
        self._bytes = 0
        self._runs: _Runs | None = None

    def add(self, batch: Any) -> None:
        """Adds rows."""
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= self._memory_bytes:
            self._spill()

    def sorted(self) -> Iterator[Any]:
        """All rows in order, in batches. Nothing may be added any more."""
        if self._runs is None:
            yield from self._in_memory()
            return
        self._spill()
        runs = self._runs
        while len(runs.places) > self._fan_in:
            merged = _Runs()
            for first in range(0, len(runs.places), self._fan_in):
                merged.write(self._merge(runs.read(first, first + self._fan_in)))
            runs.close()
            runs = self._runs = merged
        yield from self._merge(runs.read(0, len(runs.places)))

    def close(self) -> None:
        """Gives up memory and temporary file."""
        self._batches = []
        if self._runs is not None:
            self._runs.close()

    def _spill(self) -> None:
        if self._batches:
            self._runs = self._runs or _Runs()
            self._runs.write(self._in_memory())

    def _in_memory(self) -> Iterator[Any]:
        if self._batches:
            batch = one_batch(self._batches)
            self._batches, self._bytes = [], 0
            yield from self._in_order(batch)

    def _in_order(self, batch: Any) -> Iterator[Any]:
        import pyarrow
        import pyarrow.compute

        columns = self._keys.ordered(batch)
        names = [str(number) for number in range(len(columns))]
        table = pyarrow.table(columns, names=names)
        # Stable, with nulls at the end.
        order = pyarrow.compute.sort_indices(table, sort_keys=[(name, "ascending") for name in names])
        rows = max(1, batch.num_rows * self._batch_bytes // max(1, batch.nbytes))
        for first in range(0, batch.num_rows, rows):
            yield batch.take(order.slice(first, rows))

    def _merge(self, runs: Iterable[Iterator[Any]]) -> Iterator[Any]:
        heads = [head for head in (_Head(run, self._keys) for run in runs) if head.fill()]
        while len(heads) > 1:
            # All rows up to the first of the last keys have been read: of equal ones, the earlier run's come first.
            first = min(range(len(heads)), key=lambda number: heads[number].last)
            bound = heads[first].last
            pieces = [head.up_to(bound, number <= first) for number, head in enumerate(heads)]
            pieces = [piece for piece in pieces if piece.num_rows]
            if len(pieces) == 1:
                yield pieces[0]
            else:
                yield from self._in_order(one_batch(pieces))
            heads = [head for head in heads if head.fill()]
        for head in heads:
            yield head.rest()
            yield from head.run


class _Head:
    """The batch of a run that is merged."""

    def __init__(self, run: Iterator[Any], keys: Keys) -> None:
        self.run = run
        self._keys = keys
        self._batch: Any = None
        self._first = 0
        self._columns: list[Any] = []
        self.last: tuple[Any, ...] = ()

    def fill(self) -> bool:
        """Reads the next batch once this one is used up; whether there are rows."""
        if self._batch is None or self._first == self._batch.num_rows:
            self._batch, self._first = next(self.run, None), 0
            if self._batch is None:
                return False
            self._columns = self._keys.ordered(self._batch)
            self.last = self._key(self._batch.num_rows - 1)
        return True

    def up_to(self, bound: tuple[Any, ...], includes_bound: bool) -> Any:
        """The next rows, with keys up to a bound or below it."""
        search = bisect.bisect_right if includes_bound else bisect.bisect_left
        end = search(range(self._batch.num_rows), bound, self._first, key=self._key)
        piece = self._batch.slice(self._first, end - self._first)
        self._first = end
        return piece

    def rest(self) -> Any:
        """The rows of the batch that were not taken."""
        return self._batch.slice(self._first)

    def _key(self, row: int) -> tuple[Any, ...]:
        values = (column[row].as_py() for column in self._columns)
        return tuple((value is None, value) for value in values)


class _Runs:
    """Sorted runs in one temporary file without a name, each an Arrow IPC stream."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(prefix="millrace-sort-", buffering=0)
        except OSError as error:
            raise _failed("cannot create a temporary file", error) from error

    def write(self, batches: Iterator[Any]) -> None:
        """Appends a run."""
        import pyarrow

        first = next(batches, None)
        if first is None:
            return
        out = _Span(self._file, self._end, None)
        try:
            with pyarrow.ipc.new_stream(out, first.schema) as stream:
                stream.write_batch(first)
                for batch in batches:
                    stream.write_batch(batch)
        except OSError as error:
            raise _failed("cannot write a temporary file", error) from error
        self.places.append((self._end, out.place))
        self._end = out.place

    def read(self, first: int, end: int) -> list[Iterator[Any]]:
        """Some runs, batch by batch."""
        return [self._read(start, stop) for start, stop in self.places[first:end]]

    def _read(self, start: int, stop: int) -> Iterator[Any]:
        import pyarrow

        with pyarrow.ipc.open_stream(io.BufferedReader(_Span(self._file, start, stop), 1 << 16)) as stream:
            yield from stream

    def close(self) -> None:
        """Gives the space back."""
        self._file.close()


class _Span(io.RawIOBase):
    """A stretch of a file with a place of its own."""

    def __init__(self, file: Any, start: int, stop: int | None) -> None:
        self._file = file
        self._stop = stop
        self.place = start

    def readable(self) -> bool:
        return self._stop is not None

    def writable(self) -> bool:
        return self._stop is None

    def readinto(self, buffer: Any) -> int:
        assert self._stop is not None
        view = memoryview(buffer).cast("B")
        found = os.preadv(self._file.fileno(), [view[: max(0, self._stop - self.place)]], self.place)
        self.place += found
        return found

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            done = os.pwrite(self._file.fileno(), view[written:], self.place)
            self.place += done
            written += done
        return written


def one_batch(batches: list[Any]) -> Any:
    """All rows as one record batch.

    :raises millrace.UsageError: where a column cannot be one array, for example texts of more than 2 GiB.
    """
    import pyarrow

    if len(batches) == 1:
        return batches[0]
    try:
        found = pyarrow.Table.from_batches(batches).combine_chunks().to_batches()
    except pyarrow.ArrowException as error:
        raise UsageError(f"rows of these columns cannot be sorted: {error}; return smaller rows, or other types") from error
    if len(found) != 1:
        raise UsageError("rows of more than 2 GiB cannot be sorted; return smaller rows")
    return found[0]


def _failed(what: str, error: OSError) -> Error:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            f"{what} in {tempfile.gettempdir()}: {reason}; a part is sorted there: set TMPDIR to a larger disk, or take "
            f"more --parts or fewer --processes"
        )
    return Error(f"{what} in {tempfile.gettempdir()}: {reason}; set TMPDIR to another folder")
