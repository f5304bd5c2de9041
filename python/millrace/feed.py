"""The feed: batches of a dataset at a snapshot, in one global order."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from millrace import _native
from millrace.errors import Error, UsageError

__all__ = ["Feed"]

# The end of an endless feed: more rows than any reader reads.
_ENDLESS = 1 << 61


class Feed:
    """Batches of a dataset, each row exactly once per epoch, in an order that does not depend on the readers.

    The dataset, ``seed`` and ``batch_rows`` alone decide the order; it is that of ``millrace feed``. Global batch
    ``b`` always has the same rows, and reader ``rank`` of ``world`` takes its part of each. Ranks may join and leave
    between batches.

    A feed is its own iterator. One iteration reads ``epochs`` epochs: batches are full and roll over from epoch to
    epoch, and the last one has the rows that are left, which the ranks share evenly. The next iteration goes on with
    the epochs that follow, in another order. An iteration that was left early continues where it stopped. All ranks
    get the same number of batches. A batch with fewer rows than ranks leaves some of them with none.

    Reading and decoding run on threads of their own while Python works. One thread at a time may iterate.

    :param dataset: ``VOLUME@SNAPSHOT:/PATH``, ``VOLUME@latest:/PATH`` or ``VOLUME:/PATH`` for the live volume; a
        folder of Parquet or Arrow IPC files.
    :param batch_rows: rows of a global batch, which the ranks share.
    :param epochs: epochs of one iteration; ``None`` reads without end, in full batches.
    :param seed: seed of the order.
    :param rank: number of this reader, from 0; ``"env"`` takes ``RANK`` and ``WORLD_SIZE``, as torchrun sets them.
    :param world: number of readers, 1 by default.
    :param columns: columns to read, in this order; all by default.
    :param where: reads only the rows for which this condition is true, for example ``"label != 3 and score >= 0.5"``.
        Texts stand in single quotes, column names with signs in double quotes; ``in (...)``, ``is null``, ``and``,
        ``or``, ``not`` and parentheses work as in SQL. A comparison with null is not true.
    :param splits: parts into which a hash splits the rows, with their fractions, for example ``{"train": 0.8, "val":
        0.1, "test": 0.1}``. The parts are disjoint, and complete if the fractions are 1 together. A row keeps its part
        as long as the fractions of the parts up to it stay.
    :param split: the part to read.
    :param split_by: column, or columns, whose values decide the part of a row: rows with equal values are in one part.
        By default its file and its number in the file decide.
    :param format: ``"numpy"``: dictionaries of arrays. ``"torch"``: dictionaries of tensors. ``"arrow"``:
        ``pyarrow.RecordBatch``. Numbers and lists of a fixed size come without a copy. A null in them is an error,
        except with ``"arrow"``.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :raises millrace.Error: with the text of the command, for example :class:`millrace.NotFoundError` for a snapshot
        or column that does not exist.
    """

    def __init__(
        self,
        dataset: str,
        *,
        batch_rows: int = 128,
        epochs: int | None = 1,
        seed: int = 0,
        rank: int | str = 0,
        world: int | None = None,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        splits: Mapping[str, Any] | None = None,
        split: str | None = None,
        split_by: str | Sequence[str] | None = None,
        format: str = "numpy",
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        if epochs is not None:
            epochs = _integer("epochs", epochs, 1, ", or None to read without end")
        batch_rows, seed = _integer("batch_rows", batch_rows, 0), _integer("seed", seed, 0)
        if isinstance(columns, str):
            raise UsageError(f"columns is the text {columns!r}; pass a list of names")
        columns = None if columns is None else list(columns)
        rank, world = _shard(rank, world)
        splits = None if splits is None else {name: _fraction(name, part) for name, part in splits.items()}
        keys = [split_by] if isinstance(split_by, str) else list(split_by or ())
        self._convert = _converter(format)
        self._reader = _native.Reader(
            dataset,
            batch_rows=batch_rows,
            seed=seed,
            rank=rank,
            world=world,
            columns=columns,
            filter=where,
            splits=list((splits or {}).items()),
            split=split,
            split_by=keys,
            format=format,
            home=None if home is None else os.fspath(home),
        )
        self._arguments = {
            "batch_rows": batch_rows,
            "epochs": epochs,
            "seed": seed,
            "rank": rank,
            "world": world,
            "columns": columns,
            "where": where,
            "splits": splits,
            "split": split,
            "split_by": keys or None,
            "format": format,
            "home": os.fspath(self._reader.home),
        }
        self._rows = None if epochs is None else self._reader.rows * epochs
        # The place of the next row, counted over all epochs and ranks, and the end of the iteration that has begun.
        self._place = 0
        self._end: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self._end = None
        return self

    def __next__(self) -> Any:
        if self._end is None:
            self._end = self._end_of_round(self._place)
        batch = self._reader.next(self._place, self._end, 1)
        if batch is None:
            raise StopIteration
        batch = self._convert(batch)
        self._place = min(self._reader.place_after(self._place, 1), self._end)
        return batch

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Batches of the current iteration, from its beginning."""
        if self._rows is None:
            raise TypeError("a feed with epochs=None has no end")
        end = self._end_of_round(self._place)
        return -(-end // self.batch_rows) - (end - self._rows) // self.batch_rows

    @property
    def dataset(self) -> str:
        """The dataset. ``@latest`` has become the snapshot that was the newest."""
        return self._reader.dataset

    @property
    def plan(self) -> str:
        """SHA-256 of all that decides the order: dataset, seed, batch size and the shape of the shuffle."""
        return self._reader.plan

    @property
    def rows(self) -> int:
        """Rows of the dataset."""
        return self._reader.rows

    @property
    def batch_rows(self) -> int:
        """Rows of a global batch."""
        return self._reader.batch_rows

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self._place // self._reader.rows

    @property
    def schema(self) -> dict[str, str]:
        """The columns that are read, with their Arrow types."""
        return dict(self._reader.fields)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were taken, in at most 128 bytes of JSON.

        Store it with what those batches have changed. It is the same for every rank, and fits any number of ranks.
        """
        return {"plan": self.plan, "rows": self._place}

    def state_after(self, batches: int) -> dict[str, Any]:
        """:meth:`state_dict` after ``batches`` more batches of this iteration, for loaders that count them."""
        return self._state_after(self._place, batches)

    def _state_after(self, start: int, batches: int) -> dict[str, Any]:
        end = self._end_of_round(start)
        place = start if batches == 0 else min(self._reader.place_after(start, batches), end)
        return {"plan": self.plan, "rows": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that a state counts, in the time that it takes to open the feed.

        :raises millrace.UsageError: when the state is one of another dataset, snapshot, seed or batch size.
        """
        plan, rows = state.get("plan"), state.get("rows")
        if "workers" in state:
            raise UsageError(f"resume {self.dataset}: the state is that of a worker of a DataLoader; load it there")
        self._set_position(plan, rows)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the first row of an epoch, as PyTorch's ``DistributedSampler`` does.

        Iterations end at multiples of ``epochs``: one that begins in between is shorter.
        """
        epoch = _integer("epoch", epoch, 0)
        self._set_position(self.plan, epoch * self._reader.rows)

    def _set_position(self, plan: Any, place: Any) -> None:
        if not isinstance(plan, str) or not isinstance(place, int) or not 0 <= place < _ENDLESS:
            raise UsageError(f"resume {self.dataset}: not a state of a feed: a plan and a number of rows are needed")
        self._reader.check_position(plan, place)
        self._place, self._end = place, None

    def _end_of_round(self, place: int) -> int:
        return _ENDLESS if self._rows is None else (place // self._rows + 1) * self._rows

    def __reduce__(self) -> Any:
        return _restore, (type(self), self.dataset, self._arguments, self.state_dict())

    def __repr__(self) -> str:
        at = f"rank {self._arguments['rank']} of {self._arguments['world']}"
        return f"<millrace.Feed {self.dataset} {at}, row {self._place}>"


def _restore(kind: type[Feed], dataset: str, arguments: dict[str, Any], state: dict[str, Any]) -> Feed:
    feed = kind(dataset, **arguments)
    feed.load_state_dict(state)
    return feed


def _shard(rank: int | str, world: int | None) -> tuple[int, int]:
    if rank == "env":
        if world is not None:
            raise UsageError('rank="env" takes the number of readers from WORLD_SIZE; leave world out')
        return _number("RANK"), _number("WORLD_SIZE")
    rank, world = _integer("rank", rank, 0), 1 if world is None else _integer("world", world, 1)
    if rank >= world:
        raise UsageError(f"rank {rank} of {world} readers: ranks run from 0 to one less than the readers")
    return rank, world


def _integer(name: str, value: Any, least: int, otherwise: str = "") -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    # A rank and a world have 32 bits, the other numbers 64.
    most = (1 << 32) - 1 if name in ("rank", "world") else (1 << 61) - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise UsageError(f"{name} is {value!r}; it must be at least {least} and at most {most}{otherwise}")
    return number


def _fraction(name: Any, part: Any) -> str:
    """The decimal digits of a fraction as it is written: 0.1 is a tenth, not the binary number beside it."""
    if not isinstance(name, str):
        raise UsageError(f"splits has the part {name!r}; names of parts are texts")
    if isinstance(part, str):
        return part
    if isinstance(part, bool) or not isinstance(part, (int, float, Decimal)):
        raise UsageError(f"splits, part {name!r}: {part!r} is not a fraction above 0 and at most 1")
    return format(Decimal(str(part)), "f")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise UsageError(f'rank="env": {variable} is {text!r}, not a number; start with torchrun, or pass rank and world')
    return int(text)


def _converter(format: str) -> Any:
    if format == "numpy":
        return _Numpy()
    if format == "torch":
        return _Torch()
    if format == "arrow":
        return _Arrow()
    raise UsageError(f'format is {format!r}; it must be "numpy", "arrow" or "torch"')


class _Numpy:
    def __init__(self) -> None:
        self._numpy = _needs("numpy", "numpy")

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {name: self._array(column) for name, column in columns.items()}

    def _array(self, column: Any) -> Any:
        numpy = self._numpy
        if isinstance(column, _native.Values):
            return numpy.asarray(column)
        if isinstance(column, list):
            array = numpy.empty(len(column), dtype=object)
            array[:] = column
            return array
        values, ends, valid = column
        values = numpy.asarray(values)
        array = numpy.empty(len(ends) - 1, dtype=object)
        for row in range(len(array)):
            if valid is None or valid[row]:
                array[row] = values[ends[row] : ends[row + 1]]
        return array


class _Torch:
    def __init__(self) -> None:
        self._torch = _needs("torch", "torch")

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {name: self._tensor(name, column) for name, column in columns.items()}

    def _tensor(self, name: str, column: Any) -> Any:
        try:
            tensor = self._torch.from_dlpack(column)
        except (RuntimeError, BufferError, TypeError) as error:
            raise UsageError(
                f"column {name!r} is {column.typestr}, for which this PyTorch has no tensor ({error}); leave it out "
                f'(columns=[...]) or read format="numpy"'
            ) from error
        return tensor.view(self._torch.bool) if column.is_flags else tensor


class _Arrow:
    def __init__(self) -> None:
        self._pyarrow = _needs("pyarrow", "arrow")

    def __call__(self, batch: Any) -> Any:
        return self._pyarrow.record_batch(batch)


def _needs(module: str, format: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Error(f'format="{format}" needs {module}, which is not installed: pip install {module}') from error
