"""The fence of a training script's rounds: a process of an earlier round writes no file of a volume any more.

``millrace train --script`` begins a round without a machine that it has lost. That machine's processes may go on for a
while, or for long if its launcher hangs: also when the job was started again meanwhile, more than once. Each call of
``millrace train`` has a number in its home, each round of it another one, and both only grow. The first process of a round
that opens a live volume stores the numbers there, and every file that a process makes visible expects them, in the same
transaction.

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

# Keys of volumes, one for a job of a home: the numbers of the newest launch and round, and the run.
_PREFIX = "script-round/"
# Other processes of the round change the same key at the same time.
_ATTEMPTS = 100


@dataclass(frozen=True)
class _Round:
    """The round that this process belongs to."""

    job: str
    run: str
    # The job in the home of its launcher.
    id: str
    launch: int
    number: int

    @property
    def key(self) -> str:
        return _PREFIX + self.id

    @property
    def value(self) -> bytes:
        return f"{self.launch} {self.number} {self.run}".encode()


@cache
def _own() -> _Round | None:
    """None outside of ``millrace train --script``."""
    run, number = os.environ.get("MILLRACE_RUN", ""), os.environ.get("MILLRACE_ROUND", "")
    id, _, launch = os.environ.get("MILLRACE_LAUNCH", "").partition(":")
    if not re.fullmatch("[0-9a-f]{64}", run) or not _is_number(number):
        return None
    if not re.fullmatch("[0-9a-f]{32}", id) or not _is_number(launch):
        raise Error("MILLRACE_LAUNCH is missing: install the version of the program millrace that this package has")
    return _Round(os.environ.get("MILLRACE_JOB", ""), run, id, int(launch), int(number))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20


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


def expected(volume: _native.Volume, what: str) -> tuple[str, bytes] | None:
    """The key of the volume and its value that another program's transaction has to expect.

    :raises millrace.ConflictError: that begins with ``what``, if this process belongs to an earlier round.
    """
    own = _claim(volume, what)
    return None if own is None else (own.key, own.value)


def _claim(volume: _native.Volume, what: str) -> _Round | None:
    own = _own()
    if own is None:
        return None
    for _ in range(_ATTEMPTS):
        found = volume.key(own.key)
        if found == own.value:
            return own
        if _numbers(found) >= (own.launch, own.number):
            raise _refused(own, found, what)
        try:
            volume.publish([], put=[(own.key, own.value)], delete=[], expect=[(own.key, found)], absent=[])
        except ConflictError:
            continue
        return own
    raise ConflictError(f"{what}: other processes change the key {own.key} again and again; try again")


def _numbers(value: bytes | None) -> tuple[int, int]:
    """The launch and the round of a value; 0 for what is none."""
    launch, _, rest = (value or b"").decode(errors="replace").partition(" ")
    number = rest.partition(" ")[0]
    return (int(launch), int(number)) if _is_number(launch) and _is_number(number) else (0, 0)


def _refused(own: _Round, found: bytes | None, what: str) -> ConflictError:
    launch, number = _numbers(found)
    if launch == own.launch and own.run.encode() not in (found or b""):
        return ConflictError(
            f"{what}: run {own.run:.12} of job {own.job} has the number of another run, as in a copy of its launcher's home; "
            f"nothing was changed: remove the file trainer/{own.job}.launches of this home, and start the job again"
        )
    later = f"a later run of job {own.job}" if launch > own.launch else f"round {number} of job {own.job}"
    return ConflictError(
        f"{what}: {later} has begun, and this process belongs to round {own.number} of run {own.run:.12}, whose launcher "
        f"was lost; nothing was changed: end this process"
    )
