"""The feed: batches of a dataset at a snapshot, in one global order."""

from __future__ import annotations

import bisect
import copy
import datetime
import operator
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from millrace import _native
from millrace.division import dividing
from millrace.errors import ConflictError, Error, UsageError
from millrace.image import Image
from millrace.ranks import own_rank
from millrace.tokens import Tokens

__all__ = ["Feed", "Mixture"]

# The end of an endless feed: more rows than any reader reads.
_ENDLESS = 1 << 61
# The greatest values of arguments; other numbers have 61 bits.
_MOST = {"rank": (1 << 32) - 1, "world": (1 << 32) - 1, "batch_rows": 4_194_304}


# Held while another library begins an iteration: its threads may begin several of one feed.
_beginning = threading.Lock()


class _Ahead:
    """An iteration that is read ahead of its loop: the place behind the batches that were read, and its end."""

    def __init__(self, place: int, end: int) -> None:
        self.place, self.end = place, end


class Mixture:
    """Several datasets in one order, each with a fixed share of the rows: ``Feed(Mixture({"web@v1:/": 0.7, ...}))``.

    Every batch has rows of each dataset in proportion to the weights, at places that follow from the weights alone. Of
    any number of rows from the beginning, a dataset has its exact share, give or take fewer rows than there are datasets.
    Nothing is drawn by chance, padded or dropped: each dataset has its own order, goes on from epoch to epoch, and
    delivers each of its rows once before any comes again. The datasets must have the same columns with the same types.

    :param weights: the weight of each dataset, for example ``{"web@v1:/train": 0.7, "books@v3:/": 0.3}``. Weights are
        exact decimal numbers, relative to each other; their order is part of the order of the rows.
    :param until: the end of an epoch: ``"first"``, when a dataset has delivered all of its rows, so that no row of the
        first epoch comes twice; or ``"every"``, when all of them have. ``rows_per_epoch`` of the feed replaces it.
    """

    def __init__(self, weights: Mapping[str, Any], *, until: str = "first") -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise UsageError('a mixture needs the weight of each dataset, for example {"web@v1:/": 0.7, "books@v3:/": 0.3}')
        if until not in ("first", "every"):
            raise UsageError(f'until is {until!r}; it must be "first" or "every"')
        self.weights = {dataset: _decimal(f"weight of {dataset!r}", weight) for dataset, weight in weights.items()}
        self.until = until

    def __repr__(self) -> str:
        return f"millrace.Mixture({self.weights}, until={self.until!r})"


class Feed:
    """Batches of a dataset, each row exactly once per epoch, in an order that does not depend on the readers.

    The dataset, ``seed`` and ``batch_rows`` alone decide the order; it is that of ``millrace feed``. Global batch
    ``b`` always has the same rows, and reader ``rank`` of ``world`` takes its part of each. Ranks may join and leave
    between batches.

    A feed is its own iterator. One iteration reads ``epochs`` epochs: batches are full and roll over from epoch to
    epoch, and the last one has the rows that are left, which the ranks share evenly. The next iteration goes on with
    the epochs that follow, in another order. Its first batch has the rest of the global batch in which the one before has
    ended, so it may be short, too. An iteration that was left early continues where it stopped. All ranks get the same
    number of batches. A batch with fewer rows than ranks leaves some of them with none: their mean loss is NaN.

    Reading and decoding run on threads of their own while Python works. One thread at a time may iterate; another one that
    asks for a batch meanwhile gets an error, not the same batch.

    :param dataset: ``VOLUME@SNAPSHOT:/PATH``, ``VOLUME@latest:/PATH`` or ``VOLUME:/PATH`` for the live volume; a
        file, or a folder of files of one format: Parquet, Arrow IPC, JSON lines, CSV, or tar shards of WebDataset. A
        format in front overrides the names of the files: ``folder:VOLUME@SNAPSHOT:/PATH`` reads files with one folder a
        class, as columns ``path``, ``data``, ``label`` and ``class``. Or a :class:`Mixture` of several.
        ``topic:NAME`` reads a bounded range of a topic, whose records are JSON objects, as columns of their fields and
        ``_partition``, ``_offset`` and ``_timestamp``.
    :param until: the end of a topic, resolved once into offsets: ``"latest"``, what has arrived (the default); a number of
        records; or a time, as ``datetime`` with a time zone or a text such as ``"2026-11-28T06:00:00Z"``. The topic's text
        can say it, too: ``topic:NAME@UNTIL``. Ranks must agree on the offsets: hand :meth:`state_dict` of one to
        :meth:`load_state_dict` of the others before the first batch, or give all of them its :attr:`dataset`.
    :param batch_rows: rows of a global batch, which the ranks share.
    :param epochs: epochs of one iteration; ``None`` reads without end, in full batches.
    :param rows_per_epoch: rows of an epoch, or a fraction of the rows below 1, for example ``0.1``; all rows by default.
        Each epoch goes on with the rows that follow those of the one before, so that every row comes once before any
        comes again. A feed may be resumed with another number.
    :param seed: seed of the order.
    :param rank: number of this reader, from 0. By default rank and world are those of the environment, if a launcher has
        set them: ``RANK`` and ``WORLD_SIZE`` of torchrun and ``millrace train --script``, ``OMPI_COMM_WORLD_*`` and ``PMI_*``
        of ``mpirun``, ``SLURM_PROCID`` of ``srun``. Without them, they are those of ``torch.distributed``, if its process group
        is initialized before the feed is made. Variables that contradict each other or the process group are an error.
        ``"env"`` makes it an error if there is neither. For a feed of its own in each process, pass ``rank=0, world=1``.
    :param world: number of readers, by default that of the environment, or 1.
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
        ``pyarrow.RecordBatch``. ``"dlpack"``: dictionaries of objects for ``from_dlpack`` of any library, with flags as
        bytes. Numbers and lists of a fixed size come without a copy. A null in them is an error,
        except with ``"arrow"``.
        Lists without a fixed size are arrays of their own for each row in ``"numpy"``. In ``"torch"`` they are one
        tensor ``[rows, length]`` where all rows have lists of one length, which each batch checks.
    :param pad: for columns of lists, the value that fills lists up to the longest one of the batch, for example
        ``{"tokens": 0}``. Such a column is ``[rows, longest]``, and ``tokens_length`` beside it holds the lengths.
    :param buckets: a column of lists with rising lengths, for example ``{"tokens": [64, 128, 256]}``. Batches have rows whose
        lists are of like length: up to 64, up to 128, up to 256, or longer. Nothing is cut off or dropped: within blocks of
        up to 64 batches, rows are sorted by bucket, cut into full batches, and these are shuffled. A few batches of a block
        hold rows of neighbouring buckets. With ``pad``, the lists of such a column are filled up to the smallest of these
        lengths that holds the longest one of the batch, so that a compiled model sees few shapes. A state fits the same
        ``batch_rows`` only.
    :param images: columns of encoded images, or of names of image files, with the :class:`millrace.Image` that each
        becomes. They are delivered as arrays or tensors ``[rows, *shape]``; with ``"arrow"``, as Arrow's extension type
        of tensors.
    :param keys: name of an additional column of augmentation keys: an ``int64`` for each row that depends on ``seed``,
        the epoch and the row only. Seed the random draws of a transform of your own with it.
    :param tokens: :class:`millrace.Tokens`, which packs a column of token lists into sequences of one length. The rows of
        the feed are sequences then, and ``columns``, ``images`` and ``pad`` do not apply.
    :param device: ``"cuda:0"``, or that of another number: batches come as tensors on this GPU. Threads of the feed copy
        them there ahead of the loop, through pinned memory and on a stream of their own; the stream that is current when
        a batch is taken waits for its copy. For ``format="torch"`` and ``"dlpack"``, with columns of numbers, flags and lists
        of a fixed size. It needs a wheel that was built with ``FEATURES=cuda``. ``"cpu"``: the same ring over memory of the
        host, for ``"numpy"``, too.

        Batches lie in a ring of slots that is allocated at the first batch, and a slot is filled again once all arrays and
        tensors of its batch are freed. A program that keeps batches makes the ring grow, to 64 slots and 4 GiB. One that
        holds all of them gets a :class:`millrace.ConflictError` after 5 seconds, and goes on where it was once it has let go
        of one. On a GPU, a slot is filled again behind the work that the stream of its batch had queued when the batch was
        freed. If another stream uses the batch, let that one wait for the first before it reads, and the first for it before
        the batch is freed: ``record_stream`` does not know the ring.
    :param share_cache: whether to share decoded row groups with the other processes of this user on this machine that pass
        ``True``, too, and read the same snapshot, order and columns: each row group is decoded once. It pays where they read
        the same row groups, as several ranks, or several workers of a ``DataLoader``, over one snapshot do. It costs time
        where each process reads row groups of its own. One process serves the others, and holds up to the limit of its own
        cache for them in addition; row groups that several processes hold take their memory once. A process whose peers die or fail
        decodes on its own. The kernel charges shared pages to the memory cgroup of the process that decoded them, until the
        serving process lets them go. Before they share, two processes prove to each other that they can read the home.
        Row groups of less than 256 KiB are not shared, nor those of a live volume or a topic.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :raises millrace.Error: with the text of the command, for example :class:`millrace.NotFoundError` for a snapshot
        or column that does not exist.
    """

    def __init__(
        self,
        dataset: str | Mixture,
        *,
        until: str | int | datetime.datetime | None = None,
        batch_rows: int = 128,
        epochs: int | None = 1,
        rows_per_epoch: int | float | None = None,
        seed: int = 0,
        rank: int | str | None = None,
        world: int | None = None,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        splits: Mapping[str, Any] | None = None,
        split: str | None = None,
        split_by: str | Sequence[str] | None = None,
        format: str = "numpy",
        pad: Mapping[str, int | float] | None = None,
        images: Mapping[str, Image] | None = None,
        keys: str | None = None,
        tokens: Tokens | None = None,
        buckets: Mapping[str, Sequence[int]] | None = None,
        device: Any = None,
        share_cache: bool = False,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(dataset, (str, Mixture)):
            raise UsageError(f"dataset is {dataset!r}; pass VOLUME@SNAPSHOT:/PATH, for example digits@v1:/train, or a Mixture")
        if epochs is not None:
            epochs = _integer("epochs", epochs, 1, ", or None to read without end")
        batch_rows, seed = _integer("batch_rows", batch_rows, 1), _integer("seed", seed, 0)
        if isinstance(columns, str):
            raise UsageError(f"columns is the text {columns!r}; pass a list of names")
        columns = None if columns is None else list(columns)
        rank, world = _shard(rank, world)
        pad = dict(pad or {})
        bounds = _bounds(buckets)
        self._convert = _converter(format, pad, bounds)
        device = None if device is None else _device(device, format)
        splits = None if splits is None else {name: _fraction(name, part) for name, part in splits.items()}
        split_keys = [split_by] if isinstance(split_by, str) else list(split_by or ())
        dataset = _bounded(dataset, until)
        mixture = dataset if isinstance(dataset, Mixture) else None
        length = None if rows_per_epoch is None else _epoch_rows(rows_per_epoch)
        self._reader = _native.Reader(
            [(dataset, "1")] if mixture is None else list(mixture.weights.items()),
            until=None if mixture is None else mixture.until,
            batch_rows=batch_rows,
            rows_per_epoch=length,
            seed=seed,
            rank=rank,
            world=world,
            columns=columns,
            filter=where,
            splits=list((splits or {}).items()),
            split=split,
            split_by=split_keys,
            format=format,
            device=device,
            home=None if home is None else os.fspath(home),
            images=_images(images),
            keys=keys,
            tokens=_tokens(tokens),
            buckets=next(iter(bounds.items()), None),
            share_cache=_flag("share_cache", share_cache),
        )
        self._arguments = {
            "batch_rows": batch_rows,
            "epochs": epochs,
            "rows_per_epoch": rows_per_epoch,
            "seed": seed,
            "rank": rank,
            "world": world,
            "columns": columns,
            "where": where,
            "splits": splits,
            "split": split,
            "split_by": split_keys or None,
            "format": format,
            "pad": pad,
            "images": None if images is None else dict(images),
            "keys": keys,
            "tokens": tokens,
            "buckets": bounds or None,
            "device": device,
            "share_cache": share_cache,
            "home": os.fspath(self._reader.home),
        }
        _check_pad(pad, self.schema, format)
        live = [source for source, _ in self._reader.datasets if "@" not in source.partition(":/")[0]]
        if world > 1 and live:
            warnings.warn(
                f"{live[0]} is the live volume: if it changes, ranks that open it before and after read different rows; "
                "name a snapshot",
                stacklevel=2,
            )
        self._until = None if mixture is None else mixture.until
        self._epochs = epochs
        # The place of the next row, counted over all epochs and ranks, and the end of the iteration that has begun.
        self._place = 0
        self._end: int | None = None
        # Whether the iteration has raised StopIteration.
        self._has_ended = False
        # Whether a state was loaded after the last batch of an iteration: that one has nothing left.
        self._is_over = False
        # The iteration from this position that another library reads ahead of its loop; none once the position was set.
        self._ahead: _Ahead | None = None
        # The lock of the thread that takes a batch, and the process to which it belongs.
        self._reading = os.getpid(), threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        again = dividing(sys._getframe(1), self._arguments["world"], 1)
        if again is not None:
            raise UsageError(f"read {self.dataset}: {again}")
        self._end, self._has_ended = self._place if self._is_over else None, False
        return self

    def __next__(self) -> Any:
        process, reading = self._reading
        if process != os.getpid():
            # After a fork, the thread that held the lock may not be here.
            self._reading = os.getpid(), (reading := threading.Lock())
        if not reading.acquire(blocking=False):
            raise UsageError(
                f"read {self.dataset}: another thread takes a batch of this feed at the moment, and both would get the same "
                f"one; let one thread iterate, or give each a feed with a rank of its own"
            )
        try:
            return self._next()
        finally:
            reading.release()

    def _next(self) -> Any:
        end = self._end
        if end is None:
            end = self._end = self._place if self._is_over else self._end_of_round(self._place)
        self._check_offsets()
        batch = self._reader.next(self._place, end, 1)
        if batch is None:
            self._has_ended, self._is_over = True, False
            raise StopIteration
        batch = self._convert(batch)
        self._ahead = None
        self._place = min(self._reader.place_after(self._place, 1), end)
        return batch

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Batches of the current iteration, from its beginning.

        An iteration of ``n`` epochs of ``r`` rows has ``ceil(n * r / batch_rows)`` batches from epoch 0. Iterations of one
        epoch differ by one batch where ``batch_rows`` does not divide ``r``. That of epoch ``e`` has
        ``ceil((e + 1) * r / batch_rows) - floor(e * r / batch_rows)``: sum this, or ``len`` after each :meth:`set_epoch`.
        """
        if self._epochs is None:
            raise TypeError("a feed with epochs=None has no end")
        start, end = self._round(self._place)
        return -(-end // self.batch_rows) - start // self.batch_rows

    @property
    def dataset(self) -> str:
        """The dataset. ``@latest`` has become the snapshot that was the newest, and a topic has its offsets."""
        return self._reader.dataset

    @property
    def plan(self) -> str:
        """SHA-256 of all that decides the batches: datasets, selection, weights, seed, batch size, shape of the shuffle."""
        return self._reader.plan

    @property
    def rows(self) -> int:
        """Rows of the dataset, or those that are selected, or the sequences of their tokens; of a mixture, the rows of an
        epoch without ``rows_per_epoch``."""
        return self._reader.rows

    @property
    def batch_rows(self) -> int:
        """Rows of a global batch."""
        return self._reader.batch_rows

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0; that of the last one, where its iteration is still to end."""
        return self._reader.epoch_of(self._place - self._is_over)

    @property
    def schema(self) -> dict[str, str]:
        """The columns that are read, with their Arrow types."""
        return dict(self._reader.fields)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were taken, in at most 128 bytes of JSON.

        For topics it also has their offsets: 32 bytes for each partition, as base64.

        Store it with what those batches have changed. It is the same for every rank, and fits any number of ranks. It
        counts rows, so that a feed with another ``batch_rows`` or ``rows_per_epoch`` goes on at the right one, too.
        After the last batch, inside the loop, the state says so: the first iteration after it is loaded is empty. A
        state that is taken behind the loop begins the next iteration.
        """
        return self._state(self._place, self._is_over or (self._place == self._end and not self._has_ended))

    def _state(self, place: int, is_over: bool) -> dict[str, Any]:
        # Always the same keys: torch.distributed.checkpoint loads only those of the state that it is given.
        return {"order": self._reader.order, "rows": place, "over": is_over, **self._offsets()}

    def state_after(self, batches: int) -> dict[str, Any]:
        """:meth:`state_dict` after ``batches`` more batches of this iteration, for loaders that count them.

        :raises millrace.UsageError: where TensorFlow reads ahead, and has not read that many batches of this iteration.
        """
        ahead = self._ahead
        if ahead is not None and batches > 0 and self._reader.place_after(self._place, batches - 1) >= ahead.place:
            raise UsageError(
                f"state of {self.dataset} after {batches} batches: TensorFlow has read fewer of the iteration that it began "
                "last; count from the beginning of each iteration, and pass epochs=n to the feed in place of repeat(n), "
                "which begins iterations ahead of the loop"
            )
        return self._state_after(self._place, batches)

    def _state_after(self, start: int, batches: int) -> dict[str, Any]:
        end = self._end_of_round(start)
        if batches == 0 and start == self._place:
            return self.state_dict()
        place = start if batches == 0 else min(self._reader.place_after(start, batches), end)
        return self._state(place, batches > 0 and place == end)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that a state counts, in the time that it takes to open the feed.

        With another ``batch_rows``, the first batch has the rows up to the next multiple of it. The number of lanes in
        which the state counts, at most 64, must divide it.

        :raises millrace.UsageError: when the state is one of other datasets, snapshots, selections, weights or seeds, or
            when ``batch_rows`` does not fit it.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"resume {self.dataset}: {state!r} is not a state of a feed; pass what state_dict() has returned")
        if "workers" in state:
            raise UsageError(f"resume {self.dataset}: the state is that of a worker of a DataLoader; load it there")
        order, rows = state.get("order"), state.get("rows")
        before = self._reader
        try:
            self._load_offsets(state.get("offsets"))
            if isinstance(order, str) and _is_place(rows):
                # Another batch can need another order: this one then reads that of the state.
                self._reader = self._reader.in_order(order) or self._reader
                self._set_place(rows)
            else:
                # States of earlier releases.
                self._set_position(state.get("plan"), rows)
        except BaseException:
            # A state that is refused changes nothing.
            self._reader = before
            raise
        is_end = self._epochs is not None and self._place > 0 and self._place == self._round(self._place)[0]
        self._is_over = is_end and state.get("over") is True

    def _check_offsets(self) -> None:
        """Refuse a topic of which each rank has found its own end."""
        world = self._arguments["world"]
        if world > 1 and self._reader.has_found_offsets:
            raise UsageError(
                f"read {self.dataset[:200]}: each of the {world} ranks has found the end of the topic by itself, and the "
                "ends can differ; hand state_dict() of one rank to load_state_dict() of all, or give its dataset to all"
            )

    def _offsets(self) -> dict[str, Any]:
        """The part of a state that says the offsets of topics."""
        ranges = self._reader.ranges
        return {"offsets": ranges} if ranges else {}

    def _load_offsets(self, offsets: Any) -> None:
        """Read the records of a state in place of those that have arrived since."""
        if offsets is None:
            return
        if not isinstance(offsets, (list, tuple)) or not all(isinstance(text, str) for text in offsets):
            raise UsageError(f"resume {self.dataset}: the state's offsets are no list of texts")
        if list(offsets) != self._reader.ranges or self._reader.has_found_offsets:
            self._reader = self._reader.with_ranges(list(offsets))

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the first row of an epoch, as PyTorch's ``DistributedSampler`` does.

        Iterations end at multiples of ``epochs``: one that begins in between is shorter.
        """
        epoch = _integer("epoch", epoch, 0)
        self._set_place(self._reader.epoch_start(epoch))

    def _set_position(self, plan: Any, place: Any) -> None:
        if not isinstance(plan, str) or not _is_place(place):
            raise UsageError(f"resume {self.dataset}: not a state of a feed: an order and a number of rows are needed")
        self._reader.check_plan(plan)
        self._set_place(place)

    def _set_place(self, place: int) -> None:
        if place >= _ENDLESS:
            raise UsageError(f"resume {self.dataset}: row {place} is beyond the order")
        self._place, self._end, self._has_ended, self._is_over, self._ahead = place, None, False, False, None

    def _begin_ahead(self) -> tuple[Feed, _Ahead]:
        """A copy that reads one iteration, and what is known of that one.

        It begins behind the iteration of which another copy has read all batches, else at the position. This feed moves to
        its beginning only: the loop has taken fewer batches than the copy has read.
        """
        with _beginning:
            before = self._ahead
            if before is not None and before.place >= before.end:
                self._set_place(before.end)
            own = copy.copy(self)
            end = own._place if own._is_over else own._end_of_round(own._place)
            self._ahead = _Ahead(own._place, end)
            return own, self._ahead

    def _end_of_round(self, place: int) -> int:
        return _ENDLESS if self._epochs is None else self._round(place)[1]

    def _round(self, place: int) -> tuple[int, int]:
        """The first place and the end of the iteration to which a place belongs."""
        first = self._reader.epoch_of(place) // self._epochs * self._epochs
        return self._reader.epoch_start(first), self._reader.epoch_start(first + self._epochs)

    def __reduce__(self) -> Any:
        # The copy would have offsets that no other rank has.
        self._check_offsets()
        datasets = self._reader.datasets
        source = datasets[0][0] if self._until is None else Mixture(dict(datasets), until=self._until)
        return _restore, (type(self), source, self._arguments, self.state_dict(), self._reader.contents)

    def __repr__(self) -> str:
        at = f"rank {self._arguments['rank']} of {self._arguments['world']}"
        return f"<millrace.Feed {self.dataset} {at}, row {self._place}>"


def _restore(
    kind: type[Feed],
    dataset: str | Mixture,
    arguments: dict[str, Any],
    state: dict[str, Any],
    contents: list[str | None] | None = None,
) -> Feed:
    feed = kind(dataset, **arguments)
    feed.load_state_dict(state)
    # Those who have read both would mix them in one epoch.
    if contents is not None:
        feed._reader.check_contents(contents)
    return feed


def _bounded(dataset: str | Mixture, until: Any) -> str | Mixture:
    """The dataset with the end of a topic in its text."""
    if until is None:
        return dataset
    if not isinstance(dataset, str) or not dataset.startswith("topic:") or "@" in dataset:
        raise UsageError(f"until is for a topic whose text has no end, topic:NAME; {dataset!r} is not")
    if isinstance(until, datetime.datetime):
        if until.tzinfo is None:
            raise UsageError(f"until is {until!r}, a time without a time zone; give it one, for example datetime.timezone.utc")
        until = until.isoformat()
    elif isinstance(until, bool) or not isinstance(until, (str, int)):
        raise UsageError(f'until is {until!r}; it must be "latest", a number of records, or a time')
    name, mark, options = dataset.partition("?")
    return f"{name}@{until}{mark}{options}"


def _shard(rank: int | str | None, world: int | None) -> tuple[int, int]:
    if rank == "env":
        if world is not None:
            raise UsageError('rank="env" takes the number of readers from WORLD_SIZE; leave world out')
        found = own_rank()
        if found is None:
            raise UsageError(
                'rank="env": RANK is not set, nor a variable of mpirun or srun, and torch.distributed is not initialized; '
                "start with torchrun or millrace train --script, call init_process_group before, or pass rank and world"
            )
        return found
    if rank is None:
        found = own_rank() if world is None else None
        if found is not None:
            return found
        rank = 0
    rank, world = _integer("rank", rank, 0), 1 if world is None else _integer("world", world, 1)
    if rank >= world:
        raise UsageError(f"rank {rank} of {world} readers: ranks run from 0 to one less than the readers")
    return rank, world


def _integer(name: str, value: Any, least: int, otherwise: str = "") -> int:
    try:
        number, kind = operator.index(value), ""
    except TypeError:
        number, kind = -1, "a whole number, "
    most = _MOST.get(name, (1 << 61) - 1)
    if isinstance(value, bool) or not least <= number <= most:
        raise UsageError(f"{name} is {value!r}; it must be {kind}{least} to {most}{otherwise}")
    return number


def _fraction(name: Any, part: Any) -> str:
    """The decimal digits of a fraction as it is written: 0.1 is a tenth, not the binary number beside it."""
    if not isinstance(name, str):
        raise UsageError(f"splits has the part {name!r}; names of parts are texts")
    return _decimal(f"splits, part {name!r}", part, "a fraction above 0 and at most 1")


def _decimal(name: str, value: Any, what: str = "a number above 0") -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise UsageError(f"{name}: {value!r} is not {what}")
    return format(Decimal(str(value)), "f")


def _epoch_rows(value: Any) -> str:
    """A whole number of rows, or a fraction with a point."""
    text = _decimal("rows_per_epoch", value, "a number of rows, or a fraction of them such as 0.1")
    is_fraction = isinstance(value, (float, Decimal)) and "." not in text
    return f"{text}.0" if is_fraction else text


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False")
    return value


def _is_place(rows: Any) -> bool:
    return isinstance(rows, int) and not isinstance(rows, bool) and 0 <= rows < _ENDLESS


def _images(images: Mapping[str, Image] | None) -> list[tuple[str, str]]:
    if images is not None and not isinstance(images, Mapping):
        raise UsageError(f'images is {images!r}; pass a millrace.Image for each column, as in {{"image": millrace.Image(224)}}')
    for column, image in (images or {}).items():
        if not isinstance(column, str) or not isinstance(image, Image):
            raise UsageError(f"images has {column!r}: {image!r}; pass the name of a column and a millrace.Image")
    return [(column, image.encode(column)) for column, image in (images or {}).items()]


def _tokens(tokens: Tokens | None) -> str | None:
    if tokens is not None and not isinstance(tokens, Tokens):
        raise UsageError(f"tokens is {tokens!r}; pass a millrace.Tokens, for example Tokens(\"ids\", length=2048)")
    return None if tokens is None else tokens.encode()


def _bounds(buckets: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]]:
    """The lengths of the buckets of at most one column."""
    if buckets is None:
        return {}
    example = 'pass one column of lists with rising lengths, for example {"tokens": [64, 128, 256]}'
    if not isinstance(buckets, Mapping) or len(buckets) != 1:
        raise UsageError(f"buckets is {buckets!r}; {example}")
    ((column, lengths),) = buckets.items()
    if not isinstance(column, str) or isinstance(lengths, (str, bytes)) or not isinstance(lengths, Sequence):
        raise UsageError(f"buckets is {buckets!r}; {example}")
    bounds = [_integer(f"buckets of column {column!r}: a length", length, 1) for length in lengths]
    if any(bound >= 1 << 31 for bound in bounds):
        raise UsageError(f"buckets of column {column!r}: the lengths are {bounds}; they must be below 2147483648")
    return {column: bounds}


def _device(device: Any, format: str) -> str:
    """The name of the device, which is a text or a device of PyTorch."""
    name = str(device)
    if format == "arrow":
        raise UsageError(f'device is {name!r}: batches for a device are arrays or tensors, not format="arrow"')
    if name != "cpu" and format == "numpy":
        raise UsageError(f'device is {name!r}, and NumPy has memory of the host only; pass format="torch" or "dlpack"')
    if name != "cpu" and format == "torch" and not _needs("torch", "torch").cuda.is_available():
        raise UsageError(f"device is {name!r}, and this PyTorch finds no CUDA; install one for CUDA, or leave device out")
    return name


def _width(longest: int, bounds: Sequence[int]) -> int:
    """The length to which lists are filled up: that of their bucket, if there is one."""
    at = bisect.bisect_left(bounds, longest)
    return bounds[at] if at < len(bounds) else longest


def _check_pad(pad: dict[str, Any], schema: dict[str, str], format: str) -> None:
    if pad and format in ("arrow", "dlpack"):
        raise UsageError(f'pad is for format="numpy" and "torch", not for {format!r}')
    for name, value in pad.items():
        if name not in schema:
            raise UsageError(f"pad names column {name!r}, which the feed does not read; it reads {', '.join(schema)}")
        if not schema[name].startswith(("List(", "LargeList(")):
            raise UsageError(f"pad names column {name!r}, which is {schema[name]}: only lists are filled up")
        if not isinstance(value, (int, float)):
            raise UsageError(f"pad of column {name!r} is {value!r}; it must be a number")
        if f"{name}_length" in schema:
            raise UsageError(f"the lengths of column {name!r} would replace column {name + '_length'!r}; leave it out")


def _converter(format: str, pad: dict[str, Any], bounds: dict[str, list[int]]) -> Any:
    if format == "numpy":
        return _Numpy(pad, bounds)
    if format == "torch":
        return _Torch(pad, bounds)
    if format == "arrow":
        return _Arrow()
    if format == "dlpack":
        return _dlpack
    raise UsageError(f'format is {format!r}; it must be "numpy", "arrow", "torch" or "dlpack"')


def _check_lists(name: str, valid: list[bool] | None) -> None:
    if valid is not None:
        raise ConflictError(f"column {name!r} has a null in row {valid.index(False)} of the batch, which is no list")


class _Numpy:
    def __init__(self, pad: dict[str, Any], bounds: dict[str, list[int]]) -> None:
        self._numpy = _needs("numpy", "numpy")
        self._pad, self._bounds = pad, bounds

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for name, column in columns.items():
            if name in self._pad:
                arrays[name], arrays[f"{name}_length"] = self._padded(name, *column)
            else:
                arrays[name] = self._array(column)
        return arrays

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

    def _padded(self, name: str, values: Any, ends: list[int], valid: list[bool] | None) -> tuple[Any, Any]:
        _check_lists(name, valid)
        numpy, values = self._numpy, self._numpy.asarray(values)
        pad = self._pad[name]
        if values.dtype.kind not in "fiu" or (values.dtype.kind in "iu" and not isinstance(pad, int)):
            raise UsageError(f"pad of column {name!r} is {pad!r}, which is no {values.dtype}")
        lengths = numpy.diff(numpy.asarray(ends, dtype=numpy.int64))
        width = _width(int(lengths.max(initial=0)), self._bounds.get(name, ()))
        try:
            padded = numpy.full((len(lengths), width), pad, dtype=values.dtype)
        except OverflowError as error:
            raise UsageError(f"pad of column {name!r} is {pad!r}, which is no {values.dtype}") from error
        # NumPy makes an infinity of a number beyond the type.
        if values.dtype.kind == "f" and numpy.isfinite(pad) and not numpy.isfinite(values.dtype.type(pad)):
            raise UsageError(f"pad of column {name!r} is {pad!r}, which is no {values.dtype}")
        padded[numpy.arange(width) < lengths[:, None]] = values
        return padded, lengths


class _Torch:
    def __init__(self, pad: dict[str, Any], bounds: dict[str, list[int]]) -> None:
        self._torch = _needs("torch", "torch")
        self._pad, self._bounds = pad, bounds
        # The length of the lists of a column, once known.
        self._widths: dict[str, int] = {}

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for name, column in columns.items():
            if isinstance(column, _native.Values):
                tensors[name] = self._tensor(name, column)
            elif name in self._pad:
                tensors[name], tensors[f"{name}_length"] = self._padded(name, *column)
            else:
                tensors[name] = self._stacked(name, *column)
        return tensors

    def _tensor(self, name: str, column: Any) -> Any:
        try:
            tensor = self._torch.from_dlpack(column)
        except (RuntimeError, BufferError, TypeError) as error:
            raise UsageError(
                f"column {name!r} is {column.typestr}, for which this PyTorch has no tensor ({error}); leave it out "
                f'(columns=[...]) or read format="numpy"'
            ) from error
        return tensor.view(self._torch.bool) if column.is_flags else tensor

    def _stacked(self, name: str, values: Any, ends: list[int], valid: list[bool] | None) -> Any:
        _check_lists(name, valid)
        lengths = [end - begin for begin, end in zip(ends, ends[1:])]
        width = self._widths.setdefault(name, lengths[0]) if lengths else self._widths.get(name, 0)
        for row, length in enumerate(lengths):
            if length != width:
                raise UsageError(
                    f"column {name!r} has lists of {width} and, in row {row} of the batch, of {length} elements; pass "
                    f"pad={{{name!r}: 0}} to fill them up"
                )
        return self._tensor(name, values).view(len(lengths), width)

    def _padded(self, name: str, values: Any, ends: list[int], valid: list[bool] | None) -> tuple[Any, Any]:
        _check_lists(name, valid)
        torch, values, pad = self._torch, self._tensor(name, values), self._pad[name]
        is_float = values.dtype.is_floating_point
        limits = None if is_float else torch.iinfo(values.dtype)
        if limits is not None and not (isinstance(pad, int) and limits.min <= pad <= limits.max):
            raise UsageError(f"pad of column {name!r} is {pad!r}, which is no {values.dtype}")
        lengths = torch.tensor([end - begin for begin, end in zip(ends, ends[1:])], dtype=torch.int64)
        width = _width(int(lengths.max()) if len(lengths) else 0, self._bounds.get(name, ()))
        try:
            padded = torch.full((len(lengths), width), pad, dtype=values.dtype)
        except (RuntimeError, OverflowError) as error:
            raise UsageError(f"pad of column {name!r} is {pad!r}, which is no {values.dtype}") from error
        padded[torch.arange(width) < lengths[:, None]] = values
        return padded, lengths


def _dlpack(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


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
