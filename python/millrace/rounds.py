"""The fence of a training script's rounds: a process of an earlier round writes no file of a volume any more.

``millrace train --script`` begins a round without a machine that it has lost. That machine's processes may go on for a
while, or for long if its launcher hangs. Each round has a number. The first process of a round that opens a live volume
stores the number there, and every file that a process makes visible expects it, in the same transaction.

Removing, moving and making folders look before, not in the same transaction. Files that are written through a mount, or
outside of volumes, are not fenced.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

from millrace import _native
from millrace.errors import ConflictError, Error

# Keys of volumes, one for a run: the number of the newest round and the run before, or _OVER.
_PREFIX = "script-round/"
# The value once a later run of the job has begun.
_OVER = b"over"
# Other processes of the round change the same key at the same time.
_ATTEMPTS = 100


@dataclass(frozen=True)
class _Round:
    """The round that this process belongs to."""

    job: str
    run: str
    number: int
    # The run of the same job and home whose launcher has ended.
    former: str | None

    @property
    def key(self) -> str:
        return _PREFIX + self.run

    @property
    def value(self) -> bytes:
        return f"{self.number} {self.former or ''}".encode()


@cache
def _own() -> _Round | None:
    """None outside of ``millrace train --script``."""
    run, number = os.environ.get("MILLRACE_RUN", ""), os.environ.get("MILLRACE_ROUND", "")
    if not _is_run(run) or not (number.isascii() and number.isdecimal()):
        return None
    former = os.environ.get("MILLRACE_FORMER_RUN", "")
    job = os.environ.get("MILLRACE_JOB", "")
    return _Round(job, run, int(number), former if _is_run(former) and former != run else None)


def _is_run(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def is_fenced() -> bool:
    """Whether this process belongs to a round."""
    return _own() is not None


def enter(volume: _native.Volume) -> None:
    """Store the number of this round in a live volume that is opened, if it takes that now."""
    if _own() is None or "@" in volume.spec:
        return
    try:
        _claim(volume, "open")
        _enter_volume_of_run(os.fspath(volume.home))
    except Error:
        # Reading harms nothing. A write fails, and says why.
        pass


@cache
def _enter_volume_of_run(home: str) -> None:
    """The volume that versions are published to, as a rule, even if this process does that at its end only."""
    name = os.environ.get("MILLRACE_RUN_VOLUME", "")
    if name:
        _claim(_native.Volume(name, create=False, home=home), "open")


def check(volume: _native.Volume, what: str) -> None:
    """Fail if this process belongs to an earlier round.

    :raises millrace.ConflictError: that begins with ``what``.
    """
    _claim(volume, what)


def commit(volume: _native.Volume, file: _native.Writer, what: str) -> None:
    """Make a file visible, unless this process belongs to an earlier round.

    :raises millrace.ConflictError: that begins with ``what``.
    """
    own = _claim(volume, what)
    if own is None:
        file.commit()
        return
    try:
        volume.publish([file], put=[], delete=[], expect=[(own.key, own.value)], absent=[])
    except ConflictError:
        _claim(volume, what)
        raise


def _claim(volume: _native.Volume, what: str) -> _Round | None:
    own = _own()
    if own is None:
        return None
    for _ in range(_ATTEMPTS):
        found = volume.key(own.key)
        if found == own.value:
            return own
        if found is not None and (found == _OVER or _number(found) >= own.number):
            raise _refused(own, found, what)
        put, delete = [(own.key, own.value)], []
        if found is None and own.former is not None:
            # Two runs of a job have a key at most.
            before = (volume.key(_PREFIX + own.former) or b"").decode(errors="replace").partition(" ")[2]
            delete = [_PREFIX + before] if _is_run(before) else []
            put.append((_PREFIX + own.former, _OVER))
        try:
            volume.publish([], put=put, delete=delete, expect=[(own.key, found)], absent=[])
        except ConflictError:
            continue
        return own
    raise ConflictError(f"{what}: other processes change the key {own.key} again and again; try again")


def _number(value: bytes) -> int:
    """The number of a value; 0 for one that is none."""
    number = value.partition(b" ")[0]
    return int(number) if number.isdigit() and len(number) <= 20 else 0


def _refused(own: _Round, found: bytes, what: str) -> ConflictError:
    later = f"a later run of job {own.job}" if found == _OVER else f"round {_number(found)} of job {own.job}"
    return ConflictError(
        f"{what}: {later} has begun, and this process belongs to round {own.number} of run {own.run:.12}, whose launcher "
        f"was lost; nothing was changed: end this process"
    )
