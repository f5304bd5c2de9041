"""What the process of a ``DataLoader`` loop and its workers tell each other about the iterations of a dataset."""

from __future__ import annotations

import hashlib
import inspect
import os
import time
from multiprocessing import Pipe, process
from multiprocessing.connection import wait
from typing import NamedTuple

import torch

from millrace.errors import Error

__all__ = ["Iteration", "Progress", "loop_key"]

# Iterations that may begin at the same time. A later one takes the entry of the oldest.
_ENTRIES = 64
# Longest wait for the first worker of a loader.
_WAIT_S = 60.0
# Interval at which a worker looks without a call: another loop's workers may have taken the call for this one.
_LOOK_S = 1.0
# Places of the fields: position of the loop's process; iteration that workers began last; entries that were written; one
# entry for each iteration.
_VERSION, _PLACE, _IS_OVER, _BEGUN, _START, _END, _WRITTEN, _FIRST = range(8)
_MIX = 0x2545F4914F6CDD1D
_MASK = (1 << 63) - 1


class Iteration(NamedTuple):
    """The first place of an iteration and the place after its last one."""

    start: int
    end: int


class Progress:
    """Numbers in memory that a process shares with the workers that it starts, by fork or spawn.

    The loop's process writes a position with a version that rises. The first worker of each iteration decides where the
    iteration begins, and calls the others, which wait for that, through a pipe. Memory and pipe have no name: nothing is
    left of them when the processes end.
    """

    def __init__(self) -> None:
        self._fields = torch.zeros(_FIRST + 4 * _ENTRIES, dtype=torch.int64).share_memory_()
        self._called, self._call = Pipe(duplex=False)
        # Of several workers that hear one call, one takes it. A pipe that is full of calls needs no more.
        for end in (self._called, self._call):
            os.set_blocking(end.fileno(), False)

    @property
    def version(self) -> int:
        return int(self._fields[_VERSION])

    @property
    def place(self) -> int:
        return int(self._fields[_PLACE])

    @property
    def is_over(self) -> bool:
        return bool(self._fields[_IS_OVER])

    def move(self, place: int, is_over: bool = False) -> int:
        """Says that the next iteration begins at a place, and whether it is empty. Returns the version of that."""
        self._fields[_PLACE], self._fields[_IS_OVER] = place, is_over
        self._fields[_VERSION] += 1
        return self.version

    def begun(self, version: int) -> Iteration | None:
        """The iteration that workers began last, if they began one since that version of the position."""
        if int(self._fields[_BEGUN]) != version + 1:
            return None
        return Iteration(int(self._fields[_START]), int(self._fields[_END]))

    def begin(self, version: int, key: int, iteration: Iteration, waiting: int = 0) -> None:
        """Says where the iteration of this key begins and ends, to that many waiting workers."""
        self._fields[_START], self._fields[_END] = iteration
        self._fields[_BEGUN] = version + 1
        at = _FIRST + 4 * (int(self._fields[_WRITTEN]) % _ENTRIES)
        self._fields[_WRITTEN] += 1
        # A reader that sees half of it finds a wrong sum.
        for value in (key, *iteration, _sum(key, iteration)):
            self._fields[at] = value
            at += 1
        try:
            os.write(self._call.fileno(), bytes(waiting))
        except BlockingIOError:
            pass

    def wait(self, key: int, what: str) -> Iteration:
        """The iteration of this key, once its first worker has begun it."""
        entries = self._fields[_FIRST:].view(_ENTRIES, 4)
        deadline = time.monotonic() + _WAIT_S
        while True:
            for found, start, end, check in entries.tolist():
                iteration = Iteration(start, end)
                if found == key and check == _sum(key, iteration):
                    return iteration
            left = deadline - time.monotonic()
            if left <= 0:
                raise Error(
                    f"read {what}: worker 0 of the DataLoader has not begun within {_WAIT_S:.0f} s, and the others read "
                    f"where it does; begin the loop again, with fewer workers if the machine is busy"
                )
            if wait([self._called], min(left, _LOOK_S)):
                try:
                    os.read(self._called.fileno(), 1)
                except BlockingIOError:
                    pass


def loop_key(seed: int, iteration: int, what: str) -> int:
    """A number that the workers of a loop have in common in their iteration of this number, and no other loop has.

    The seeds of two loops can be equal. The pipe on which the workers of a loop answer is theirs alone, and the kernel
    numbers pipes anew only after 2^32 others.
    """
    worker = process.current_process()
    try:
        # Arguments of the workers of a DataLoader, PyTorch 1.13 to 2.15, and of torchdata 0.11.
        started = inspect.signature(worker._target).bind(*worker._args, **worker._kwargs)  # type: ignore[attr-defined]
        pipe = os.fstat(started.arguments["data_queue"]._reader.fileno())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise Error(
            f"read {what}: this worker does not know which workers read with it, because a loader other than PyTorch's has "
            f"started it ({error!r}); use one worker or none"
        ) from error
    digest = hashlib.blake2b(f"{pipe.st_dev} {pipe.st_ino} {seed} {iteration}".encode(), digest_size=8).digest()
    # Never 0, which is in unused entries.
    return int.from_bytes(digest, "little") & _MASK | 1


def _sum(key: int, iteration: Iteration) -> int:
    return (key ^ iteration.start * 3 ^ iteration.end * 5 ^ _MIX) & _MASK
