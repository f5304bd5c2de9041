"""The feed as a dataset of PyTorch's ``DataLoader``, and checkpoints in volumes."""

from __future__ import annotations

import builtins
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from millrace.errors import CorruptError, Error, UsageError
from millrace.feed import Feed, Mixture
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

    It yields whole batches, so the loader must not batch again: pass ``batch_size=None``. Takes the arguments of
    :class:`millrace.Feed`, with tensors by default.

    The batches and their order are the same for every ``num_workers``. Of ``n`` workers, worker ``w`` reads batches
    ``w``, ``w + n``, ``w + 2n`` and so on, and the loader takes from the workers in turn. Each worker decodes the
    row groups that its batches touch, so several workers decode most of them several times. The feed decodes on
    threads of its own: use workers for transformations in Python, and ``num_workers=0`` without any.

    Each iteration of the loader starts from the position of this object, which moves only with ``num_workers=0``. Call
    :meth:`set_epoch` before each epoch, as for ``DistributedSampler``. Persistent workers hear nothing of it: they go on
    with the epochs that follow, and refuse to go on after a loop that was left early.
    """

    def __init__(self, dataset: str | Mixture, *, format: str = "torch", **arguments: Any) -> None:
        super().__init__()
        self.feed = Feed(dataset, format=format, **arguments)
        # Of a loader with several workers: where its iteration began, and the batches that this worker has taken.
        self._shared: dict[str, int] | None = None
        # The process in which the last iteration began, and its first place.
        self._begun: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        if self._shared is not None and self._shared["workers"] != workers:
            raise UsageError(
                f"resume {self.feed.dataset}: the state is that of a loader with num_workers="
                f"{self._shared['workers']}, this one has {workers}; use the same number"
            )
        if info is not None and self._begun is not None and self._begun[0] == os.getpid() and self._is_unfinished():
            return self._refuse()
        self._begun = (os.getpid(), self.feed._place)
        if info is None or workers == 1:
            return iter(self.feed)
        return self._iterate_shared(info.id, workers)

    def _refuse(self) -> Iterator[Any]:
        # An exception of a worker reaches the loop in the place of a batch; before one, it would end the worker.
        raise UsageError(
            f"read {self.feed.dataset}: the loop before was left early, and its persistent workers have read ahead; use "
            f"persistent_workers=False"
        )
        yield

    def _is_unfinished(self) -> bool:
        end = self.feed._end
        return self._shared is not None or (end is not None and self.feed._place < end)

    def _iterate_shared(self, worker: int, workers: int) -> Iterator[Any]:
        feed, reader = self.feed, self.feed._reader
        feed._check_offsets()
        shared = self._shared or {"rows": feed._place, "taken": 0, "workers": workers}
        self._shared = shared
        end = shared["rows"] if feed._is_over else feed._end_of_round(shared["rows"])
        ahead = worker + shared["taken"] * workers
        place = reader.place_after(shared["rows"], ahead) if ahead else shared["rows"]
        while place < end:
            batch = feed._convert(reader.next(place, end, workers))
            place = reader.place_after(place, workers)
            shared["taken"] += 1
            yield batch
        # Another iteration of a persistent worker goes on with the epochs that follow.
        feed._place, feed._is_over, self._shared = end, False, None

    def __len__(self) -> int:
        return len(self.feed)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the first row of an epoch."""
        self.feed.set_epoch(epoch)
        self._shared = self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """The position, for torchdata's ``StatefulDataLoader``. With several workers, it is that of one worker.

        With PyTorch's own ``DataLoader`` and workers, only the loop knows what it has taken: see
        :meth:`state_after`.
        """
        if self._shared is None:
            return self.feed.state_dict()
        return {"plan": self.feed.plan, **self._shared, **self.feed._offsets()}

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after ``batches`` batches of the iteration that the loader has begun.

        It resumes with any number of workers and ranks.
        """
        if self._begun is None or self._begun[0] != os.getpid():
            return self.feed.state_after(batches)
        return self.feed._state_after(self._begun[1], batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a position; that of one of several workers needs the same number of workers."""
        if "workers" not in state:
            self.feed.load_state_dict(state)
            self._shared = self._begun = None
            return
        numbers: dict[str, Any] = {name: state.get(name) for name in ("rows", "taken", "workers")}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise UsageError(f"resume {self.feed.dataset}: not a state of a worker")
        self.feed._load_offsets(state.get("offsets"))
        self.feed._set_position(state.get("plan"), numbers["rows"])
        self._shared, self._begun = numbers, None
