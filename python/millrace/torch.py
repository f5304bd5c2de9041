"""The feed as a dataset of PyTorch's ``DataLoader``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from millrace.errors import UsageError
from millrace.feed import Feed

__all__ = ["FeedDataset"]


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

    def __init__(self, dataset: str, *, format: str = "torch", **arguments: Any) -> None:
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
        return {"plan": self.feed.plan, **self._shared}

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
        self.feed._set_position(state.get("plan"), numbers["rows"])
        self._shared, self._begun = numbers, None
