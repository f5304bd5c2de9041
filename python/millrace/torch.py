"""The feed as a dataset of PyTorch's ``DataLoader``, and checkpoints in volumes."""

from __future__ import annotations

import builtins
import os
import pickle
import sys
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing import context
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from millrace.division import dividing
from millrace.errors import CorruptError, Error, UsageError
from millrace.feed import _ENDLESS, Feed, Mixture
from millrace.loading import Iteration, Progress, loop_key
from millrace.volume import locate

__all__ = ["FeedDataset", "StorageReader", "StorageWriter", "checkpoints", "load", "remove_checkpoint", "save"]


def save(obj: Any, path: str, *, home: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """``torch.save`` into a volume: ``save(model.state_dict(), "runs:/digits/checkpoint.pt")``.

    The file appears when the call returns, whole and durable, in the place of an earlier one. If the call fails or the
    process dies, the earlier file stays. Tensors are written one after the other; the file is never in memory.

    :param path: ``VOLUME:/PATH``; missing folders are created.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :param options: those of ``torch.save``.
    :raises millrace.Error: that names the path.
    """
    volume, inside = locate(path, home)
    with volume.open(inside, "wb") as out:
        target = _Target(out)
        try:
            torch.save(obj, target, **options)
        except Exception as error:
            if target.error is None:
                raise Error(f"save {path}: {error}") from error
        if target.error is not None:
            raise target.error


def load(
    path: str,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    home: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """``torch.load`` from a volume, live or at a snapshot.

    :param path: ``VOLUME:/PATH`` or ``VOLUME@SNAPSHOT:/PATH``.
    :param map_location: the device of the tensors, as for ``torch.load``: ``"cpu"`` where they were saved on a GPU that
        is not here.
    :param weights_only: load tensors and plain values only. A file with anything else runs code when it is loaded: pass
        ``False`` for files that you trust.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :param options: those of ``torch.load``.
    :raises millrace.NotFoundError: if there is no such file.
    :raises millrace.CorruptError: if it is not a file of ``torch.save``.
    """
    if options.get("mmap"):
        raise UsageError(f"load {path}: mmap=True needs a file of the operating system; mount the volume, or leave it out")
    volume, inside = locate(path, home)
    with volume.open(inside) as file:
        try:
            return torch.load(file, map_location=map_location, weights_only=weights_only, **options)
        except Error:
            raise
        except (pickle.UnpicklingError, EOFError) as error:
            if weights_only and _is_archive(file):
                raise UsageError(
                    f"load {path}: it holds more than tensors and plain values; weights_only=False loads it, and runs "
                    f"code of the file: {error}"
                ) from error
            raise CorruptError(f"load {path}: it is not a file of torch.save: {_first_line(error)}") from error
        except Exception as error:
            # PyTorch's reader of archives has no error class of its own.
            kind = CorruptError if "PytorchStreamReader" in str(error) else Error
            raise kind(f"load {path}: {_first_line(error)}") from error


def checkpoints(path: str, *, home: str | os.PathLike[str] | None = None) -> builtins.list[str]:
    """The whole checkpoints that :class:`StorageWriter` has stored in the folders below a folder.

    ``checkpoints("runs:/digits")[-1]`` is the one with the highest step: numbers in names are compared as numbers. Saves
    that ended early are not listed.

    :param path: ``VOLUME:/PATH`` or ``VOLUME@SNAPSHOT:/PATH``; a folder that does not exist has none.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    """
    from millrace.checkpoint import whole

    return whole(path, home)


def remove_checkpoint(path: str, *, home: str | os.PathLike[str] | None = None) -> None:
    """Remove a checkpoint that :class:`StorageWriter` has stored. One that is half removed is not listed any more.

    :param path: the folder of the checkpoint, ``VOLUME:/PATH``.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :raises millrace.NotFoundError: if there is no such folder.
    """
    from millrace.checkpoint import remove

    remove(path, home)


def __getattr__(name: str) -> Any:
    # Imported when used: it takes a while, and older versions of PyTorch do not have it.
    if name in ("StorageReader", "StorageWriter"):
        from millrace import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Target:
    """A file whose errors are raised later: those of a write end the process in older versions of PyTorch."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._out.write(data)
            except BaseException as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


def _is_archive(file: Any) -> bool:
    file.seek(0)
    return bool(file.read(4) == b"PK\x03\x04")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FeedDataset(IterableDataset):
    """A :class:`millrace.Feed` for ``DataLoader(dataset, batch_size=None, num_workers=...)``.

    It yields whole batches, so the loader must not batch again: pass ``batch_size=None``; another one is refused. Takes
    the arguments of :class:`millrace.Feed`, with tensors by default.

    Each rank reads its part of each batch, so no library must divide the batches among the processes again: most rows would
    be lost. Loaders of ``Accelerator.prepare`` and the ``Trainer`` of Hugging Face, and ``sharding_filter`` of data pipes, are
    refused where they would. Keep the loader out of ``prepare``, or pass ``rank=0, world=1``.

    The batches and their order are the same for every ``num_workers``. Of ``n`` workers, worker ``w`` reads batches
    ``w``, ``w + n``, ``w + 2n`` and so on, and the loader takes from the workers in turn. Each worker decodes the
    row groups that its batches touch, so several workers decode most of them several times, unless
    ``share_cache=True`` makes them share: see :class:`millrace.Feed`. The feed decodes on
    threads of its own: use workers for transformations in Python, and ``num_workers=0`` without any.

    The first loop starts from the position of this object, and each further one begins the epochs that follow, with any
    number of workers. What is left of a loop that was left early is not read: to read it, pass the state after its last batch
    to :meth:`load_state_dict`. :meth:`set_epoch` says where the next loop begins, also to persistent workers. Without workers,
    a feed without end goes on where the loop before was left.

    Loops over one object follow each other: give loops that run at the same time, as of ``zip``, an object each. A process
    that gets the object by fork or spawn, and is no worker of a loader, has a position of its own.

    The first and the last batch of a loop may be short. ``len`` is the number of batches of the loop that has begun last.
    Loops differ by one batch where ``batch_rows`` does not divide the rows of an epoch. For the steps of ``n`` epochs, sum
    ``len`` after ``set_epoch`` of each, or read them in one loop with ``epochs=n``: see ``Feed.__len__``.
    """

    def __init__(self, dataset: str | Mixture, *, format: str = "torch", **arguments: Any) -> None:
        super().__init__()
        self.feed = Feed(dataset, format=format, **arguments)
        # Of a loader with several workers: where its iteration began, and the batches that this worker has taken. It stays
        # behind the last batch, until the next iteration begins.
        self._shared: dict[str, int] | None = None
        # The process in which the last iteration began, its first place, and how many have begun.
        self._begun: tuple[int, int] | None = None
        self._iterations = 0
        # The iteration of the last loop without workers; none once the position was set since.
        self._alone: Iteration | None = None
        self._progress = Progress()
        # The process that shares the numbers with its workers.
        self._owner = os.getpid()
        # The position of the loop's process that this object knows.
        self._version = self._progress.version
        _datasets.add(self)
        # Whether a state was loaded in this worker, whose position that is then.
        self._is_placed = False

    def _part(self) -> None:
        """In a process that got this object by fork or spawn and is no worker: share no position with the one before.

        Behind the loop that workers of the process before have begun, or at the position of this object.
        """
        if self._owner == os.getpid() or get_worker_info() is not None:
            return
        before = self._progress.begun(self._version)
        self._owner, self._progress, self._begun = os.getpid(), Progress(), None
        if before is not None and before.end < _ENDLESS:
            self.feed._set_place(before.end)
            self._shared = self._alone = None
        self._moved()

    def __iter__(self) -> Iterator[Any]:
        self._part()
        info = get_worker_info()
        try:
            self._check_division(1 if info is None else info.num_workers)
        except UsageError as error:
            if info is None:
                raise
            return self._refuse(error)
        if _collates(sys._getframe(1)):
            return self._refuse(
                UsageError(
                    f"read {self.feed.dataset}: the DataLoader would batch the batches of the feed again; pass "
                    f"batch_size=None, and batch_rows to the dataset"
                )
            )
        device = self.feed._arguments["device"]
        if info is not None and device not in (None, "cpu"):
            return self._refuse(
                UsageError(
                    f"read {self.feed.dataset}: its batches are for {device}, which workers do not hand on; pass "
                    f"num_workers=0: threads of the feed fill the GPU's memory ahead of the loop"
                )
            )
        if self._shared is not None and self._begun is not None and self._begun[0] == os.getpid():
            # It is that of the iteration before.
            self._shared = None
        self._iterations += 1
        if info is None:
            self._follow_workers()
            self._check_workers(1)
            self._begin_feed(self._first_iteration())
            return self._iterate_alone(iter(self.feed), self._iterations)
        try:
            iteration = self._begin(info)
        except Error as error:
            return self._refuse(error)
        if iteration.start >= _ENDLESS:
            return self._refuse(
                UsageError(
                    f"read {self.feed.dataset}: it has no end, and how much of it the loop before has taken is not known; go "
                    f"on with load_state_dict(state_after(batches)), or call set_epoch"
                )
            )
        is_empty = self._begin_feed(iteration)
        if info.num_workers == 1:
            return self._iterate_alone(iter(self.feed), self._iterations)
        if self._shared is None:
            self._shared = {"rows": iteration.start, "taken": 0, "workers": info.num_workers}
            if is_empty:
                self._shared["over"] = True
        return self._iterate_shared(info.id, self._shared, iteration)

    def _begin_feed(self, iteration: Iteration) -> bool:
        """Put the feed at the beginning of an iteration. Returns whether that one is empty."""
        is_empty = iteration.start >= iteration.end
        self.feed._set_place(iteration.start)
        # The feed has this from a state that the loop's process has loaded, also where that iteration is long over.
        self.feed._is_over = is_empty
        self._begun, self._alone = (os.getpid(), iteration.start), iteration
        return is_empty

    def _check_division(self, workers: int) -> None:
        """Refuse callers that divide the batches again."""
        again = dividing(sys._getframe(2), self.feed._arguments["world"], workers)
        if again is not None:
            raise UsageError(f"read {self.feed.dataset}: {again}")

    def _refuse(self, error: Error) -> Iterator[Any]:
        # An exception of a worker reaches the loop in the place of a batch; before one, it would end the worker.
        raise error
        yield

    def _begin(self, info: Any) -> Iteration:
        """Where the iteration begins in which this worker takes part. Worker 0 decides."""
        feed, progress = self.feed, self._progress
        if self._version != progress.version:
            # The loop's process has moved, after it had started this persistent worker.
            self._version = progress.version
            self._shared, self._alone, self._is_placed = None, None, False
            feed._set_place(progress.place)
            feed._is_over = progress.is_over
        is_placed, self._is_placed = self._is_placed, False
        before = None if is_placed else progress.begun(self._version)
        if before is not None:
            # A state that was loaded before that iteration is done with.
            self._shared = None
        self._check_workers(info.num_workers)
        # A persistent worker counts its iterations. One worker has no others to call.
        key = loop_key(info.seed - info.id, self._iterations, feed.dataset) if info.num_workers > 1 else 1
        if info.id > 0:
            iteration = progress.wait(key, feed.dataset)
            if is_placed:
                return self._resumed(iteration)
            self._shared = None
            return iteration
        if before is None:
            iteration = self._first_iteration(is_placed)
        elif before.end >= _ENDLESS:
            iteration = Iteration(before.end, before.end)
        else:
            iteration = Iteration(before.end, feed._end_of_round(before.end))
        progress.begin(self._version, key, iteration, waiting=info.num_workers - 1)
        return iteration

    def _first_iteration(self, is_placed: bool = False) -> Iteration:
        """The iteration that begins at the position of this object."""
        if self._shared is None:
            place, is_over = self._next_place(), self.feed._is_over
        elif is_placed:
            # Each worker has loaded how much of it that worker has taken.
            place, is_over = self._shared["rows"], bool(self._shared.get("over"))
        else:
            place, is_over = self._rest(self._shared)
            self._shared = None
        return Iteration(place, place if is_over else self.feed._end_of_round(place))

    def _rest(self, shared: dict[str, int]) -> tuple[int, bool]:
        """Where the rest of an iteration begins of which each worker has taken equally many batches; whether it is empty."""
        place = _after(self.feed, shared["rows"], shared["taken"] * shared["workers"])
        end = self.feed._end_of_round(shared["rows"])
        return min(place, end), bool(shared.get("over")) or place >= end

    def _resumed(self, iteration: Iteration) -> Iteration:
        """What is left of an iteration for this worker, which has loaded a state, while worker 0 has loaded its own."""
        place = self.feed._place
        if place == iteration.end:
            # In a state of an earlier release, this worker had taken all of its batches.
            return Iteration(place, place)
        if self._shared is not None and place != iteration.start:
            raise UsageError(
                f"resume {self.feed.dataset}: the state of this worker begins at row {place}, and that of worker 0 at row "
                f"{iteration.start}; load the states of one checkpoint"
            )
        # In a state of an earlier release, a worker that had taken no batch has the position of the loop's process.
        return iteration

    def _check_workers(self, workers: int) -> None:
        if self._shared is not None and self._shared["workers"] != workers:
            raise UsageError(
                f"resume {self.feed.dataset}: the state is that of a loader with num_workers="
                f"{self._shared['workers']}, this one has {workers}; use the same number"
            )

    def _next_place(self) -> int:
        """Where a loop begins: behind the loop without workers that was left early, or at the position."""
        place, alone = self.feed._place, self._alone
        is_left = alone is not None and alone.start < place < alone.end < _ENDLESS
        return alone.end if alone is not None and is_left else place

    def _follow_workers(self) -> None:
        """Without workers, go on behind the iteration that workers have begun."""
        before = self._progress.begun(self._version)
        if before is not None:
            if before.end >= _ENDLESS:
                raise UsageError(
                    f"read {self.feed.dataset}: it has no end, and how much of it the workers of the loop before have read is "
                    f"not known; go on with load_state_dict(state_after(batches)), or call set_epoch"
                )
            self.feed._set_place(before.end)
            self._shared = None
            self._moved()

    def _iterate_alone(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        while True:
            if number != self._iterations:
                raise UsageError(
                    f"read {self.feed.dataset}: another loop over this dataset has begun meanwhile, and both would share the "
                    f"batches; give each loop a dataset of its own"
                )
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _iterate_shared(self, worker: int, shared: dict[str, int], iteration: Iteration) -> Iterator[Any]:
        feed, reader, workers = self.feed, self.feed._reader, shared["workers"]
        feed._check_offsets()
        place = _after(feed, iteration.start, worker + shared["taken"] * workers)
        while place < iteration.end:
            batch = feed._convert(reader.next(place, iteration.end, workers))
            place = reader.place_after(place, workers)
            shared["taken"] += 1
            yield batch

    def __len__(self) -> int:
        self._part()
        before = None if get_worker_info() is not None else self._progress.begun(self._version)
        if before is None or before.end >= _ENDLESS:
            return len(self.feed)
        start, end = self.feed._round(before.start)
        return -(-end // self.feed.batch_rows) - start // self.feed.batch_rows

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the first row of an epoch."""
        # accelerate calls this in every process, and lets only the first one read: the others would wait for it.
        self._check_division(1)
        self._part()
        self.feed.set_epoch(epoch)
        self._shared = self._begun = self._alone = None
        self._moved()

    def _moved(self) -> None:
        """Tell the workers of this process, the persistent ones also, where the next iteration begins."""
        if get_worker_info() is None:
            place, is_over = self.feed._place, self.feed._is_over
            if self._shared is not None:
                place, is_over = self._rest(self._shared)
            self._version = self._progress.move(place, is_over)
        else:
            self._is_placed = True

    def state_dict(self) -> dict[str, Any]:
        """The position, for torchdata's ``StatefulDataLoader``. With several workers, it is that of one worker.

        :raises millrace.UsageError: in the process of a loop whose workers have begun to read. Only the loop knows what it
            has taken: see :meth:`state_after`.
        """
        self._part()
        if self._shared is not None:
            return {"plan": self.feed.plan, **self._shared, **self.feed._offsets()}
        if get_worker_info() is not None and self.feed._has_ended:
            # The loader goes on behind the iteration of this state: another one that begins there would be skipped.
            return self.feed._state(self.feed._place, True)
        if get_worker_info() is None and self._progress.begun(self._version) is not None:
            raise UsageError(
                f"state of {self.feed.dataset}: the workers of the DataLoader read ahead, and only the loop knows which batches "
                f"it has taken; count them and call state_after(batches), use torchdata's StatefulDataLoader, or call "
                f"set_epoch behind the loop"
            )
        return self.feed.state_dict()

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after ``batches`` batches of the iteration that the loader has begun.

        It resumes with any number of workers and ranks.
        """
        self._part()
        before = None if get_worker_info() is not None else self._progress.begun(self._version)
        if before is not None:
            return self.feed._state_after(before.start, batches)
        if self._begun is None or self._begun[0] != os.getpid():
            return self.feed.state_after(batches)
        return self.feed._state_after(self._begun[1], batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a position; that of one of several workers needs the same number of workers."""
        self._part()
        if "workers" not in state:
            self.feed.load_state_dict(state)
            self._shared = self._begun = self._alone = None
            self._moved()
            return
        numbers: dict[str, Any] = {name: state.get(name) for name in ("rows", "taken", "workers")}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise UsageError(f"resume {self.feed.dataset}: not a state of a worker")
        self.feed._load_offsets(state.get("offsets"))
        self.feed._set_position(state.get("plan"), numbers["rows"])
        if state.get("over") is True:
            numbers["over"] = True
        self._shared, self._begun, self._alone = numbers, None, None
        self._moved()

    def __getstate__(self) -> dict[str, Any]:
        self._part()
        state = dict(self.__dict__)
        if context.get_spawning_popen() is not None:
            # The new process does not see what divides the batches here.
            self._check_division(1)
        else:
            # A copy is no worker of this process. It does not hear how far its workers are: it begins behind their loop.
            before = self._progress.begun(self._version)
            state.update(_progress=None, _version=0, _begun=None, _alone=None, _is_placed=False)
            state["_copied_from"] = None if before is None or before.end >= _ENDLESS else before.end
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.pop("_copied_from", None)
        self.__dict__.update(state)
        _datasets.add(self)
        if self._progress is None:
            self._progress, self._owner = Progress(), os.getpid()
        if place is not None:
            self.feed._set_place(place)


# A loader calls nothing of its dataset in the loop's process before it forks workers.
_datasets: weakref.WeakSet[FeedDataset] = weakref.WeakSet()


def _part_all() -> None:
    for dataset in list(_datasets):
        dataset._part()


os.register_at_fork(before=_part_all)


def _after(feed: Feed, place: int, batches: int) -> int:
    """The place after that many batches."""
    return feed._reader.place_after(place, min(batches, _ENDLESS)) if batches else place


def _collates(caller: Any) -> bool:
    """Whether the iteration is for a loader that makes batches of what it gets."""
    fetcher = caller.f_locals.get("self")
    return type(fetcher).__name__ == "_IterableDatasetFetcher" and getattr(fetcher, "auto_collation", False) is True
