"""The reduce half of map jobs: sorts the rows of one part by key, and calls a function with each key.

A part is done in one worker process: it reads the part of each input group in their order, sorts externally, and hands the
rows of one key after the other to the function, so neither a part nor a key has to fit in memory. The output is staged, and
becomes durable together with the record that the part is done.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from millrace.errors import Error, UsageError
from millrace.map_failure import FunctionFailed, shortened
from millrace.map_function import FunctionSource
from millrace.map_keys import Keys
from millrace.map_output import GroupOutput, ReturnedError, tables
from millrace.map_record import Job
from millrace.map_shuffle import segments
from millrace.map_sort import Sorter

__all__ = ["PARTS_MAX", "Reducer", "Reduction"]

PARTS_MAX = 4_096
_KEYS_MAX = 16
# Characters of a key in an error.
_KEY_TEXT_MAX = 100


@dataclass(frozen=True)
class Reduction:
    """What a job does with the output of its map function.

    ``arguments`` are those of the function; rows go to one of ``parts`` parts by the hash of the ``key`` columns.
    """

    source: FunctionSource
    arguments: dict[str, Any]
    key: list[str]
    parts: int

    def check(self) -> None:
        """Fails for key columns or a number of parts that are not possible."""
        what = f"reduce {self.source}"
        if not self.key or len(self.key) > _KEYS_MAX or not all(isinstance(name, str) and name for name in self.key):
            raise UsageError(f"{what}: the key is {self.key!r}; name 1 to {_KEYS_MAX} columns")
        if len(set(self.key)) < len(self.key):
            raise UsageError(f"{what}: a key column is named twice; name each once")
        if self.parts > PARTS_MAX:
            raise UsageError(f"{what}: {self.parts} parts; at most {PARTS_MAX} are possible")

    def to_json(self) -> dict[str, Any]:
        """The fields, for :meth:`from_json` in another process."""
        return {"source": self.source.to_json(), "arguments": self.arguments, "key": self.key, "parts": self.parts}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Reduction:
        return cls(**{**fields, "source": FunctionSource(**fields["source"])})


class Reducer:
    """Computes parts of jobs with a loaded function."""

    def __init__(self, reduction: Reduction, function: Callable[..., Any]) -> None:
        self._reduction = reduction
        self._function = function
        self._files: tuple[str, list[str]] | None = None

    def compute(self, job: Job, part: int) -> bool:
        """Computes a part; returns whether it is this worker's output that was published."""
        if job.parts.is_done(part):
            return False
        what = f"reduce {self._reduction.source}: part {part} of {self._reduction.parts}"
        output = GroupOutput(job.parts, part)
        sorter: Sorter | None = None
        rows = keys = 0
        try:
            names: Keys | None = None
            for batch in self._batches(job, part):
                if names is None:
                    names = Keys(self._reduction.key, batch.schema)
                    sorter = Sorter(names)
                assert sorter is not None
                rows += batch.num_rows
                sorter.add(batch)
            if names is not None and sorter is not None:
                found = _Pieces(_pieces(sorter.sorted(), names))
                for _, pieces in itertools.groupby(found, operator.attrgetter("order")):
                    keys += 1
                    self._reduce(pieces, output, what)
                    if found.failure is not None:
                        # The function has caught it, and the rows behind it are missing.
                        raise UsageError(f"{what}: the rows of key {keys} and of those behind it: {found.failure}") from found.failure
            return output.finish(rows, keys)
        except BaseException as error:
            output.discard()
            if not isinstance(error, Error):
                raise
            if job.has_ended():
                # Another process has done the rest, and has removed what was read here.
                return False
            if str(error).startswith(what):
                raise
            raise type(error)(f"{what}: {error}") from error
        finally:
            if sorter is not None:
                sorter.close()

    def _batches(self, job: Job, part: int) -> Iterator[Any]:
        if self._files is None or self._files[0] != job.run:
            records = job.groups.records()
            self._files = job.run, [job.groups.file_of(group) for group in sorted(records) if records[group].file is not None]
        for path in self._files[1]:
            yield from segments(job.target.volume, path, part)

    def _reduce(self, pieces: Iterator[_Piece], output: GroupOutput, what: str) -> None:
        first = next(pieces)
        where = f"{what}, key {shortened(repr(first.key), _KEY_TEXT_MAX)}"
        batches = (piece.rows for piece in itertools.chain([first], pieces))
        try:
            returned = tables(self._function(first.key, batches, **self._reduction.arguments), takes_rows=True)
            while (table := next(returned, None)) is not None:
                output.write(table)
        except ReturnedError as error:
            raise UsageError(f"{where}: {error}") from error
        except Error as error:
            raise type(error)(f"{where}: {error}") from error
        except BaseException as error:
            raise FunctionFailed(where, error) from error


@dataclass(frozen=True)
class _Piece:
    """Rows of one batch that have the same key. ``order`` is the key as it was sorted."""

    order: tuple[Any, ...]
    key: Any
    rows: Any


class _Pieces:
    """The pieces, and the error that ended them: the function that reads them may catch it."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self.failure: Exception | None = None

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> _Piece:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise


def _pieces(batches: Iterator[Any], keys: Keys) -> Iterator[_Piece]:
    import numpy
    import pyarrow

    for batch in batches:
        columns = keys.ordered(batch)
        differs = numpy.zeros(max(0, batch.num_rows - 1), bool)
        for column in columns:
            differs |= numpy.diff(column.dictionary_encode("encode").indices.to_numpy(zero_copy_only=False)) != 0
        starts = numpy.concatenate([[0], numpy.flatnonzero(differs) + 1])
        ends = [*starts[1:].tolist(), batch.num_rows]
        rows = pyarrow.array(starts)
        orders = zip(*(column.take(rows).to_pylist() for column in columns))
        for start, end, order, key in zip(starts.tolist(), ends, orders, keys.values(batch, rows)):
            yield _Piece(order, key, batch.slice(start, end - start))
