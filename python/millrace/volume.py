"""Files of a volume: live or at a snapshot, with atomic writes."""

from __future__ import annotations

import builtins
import io
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from millrace import _native, rounds
from millrace.errors import UsageError

__all__ = ["Entry", "Snapshot", "Volume"]

# Bytes that a reader fetches and a writer sends at a time.
_BUFFER_BYTES = 1 << 20
# Most bytes that a reader fetches and a writer sends at a time.
_WHOLE_BYTES = 16 << 20


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a volume."""

    name: str
    created_at: datetime


@dataclass(frozen=True)
class Entry:
    """A file or folder; ``type`` is ``"file"``, ``"directory"``, ``"link"`` or ``"other"``."""

    path: str
    type: str
    size: int
    modified_at: datetime


class Volume:
    """A volume, live or at a snapshot.

    :param name: ``VOLUME`` or ``VOLUME@SNAPSHOT``; ``VOLUME@latest`` is the newest snapshot.
    :param create: create the volume if it does not exist.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    """

    def __init__(self, name: str, *, create: bool = False, home: str | os.PathLike[str] | None = None) -> None:
        self._native = _native.Volume(name, create=create, home=None if home is None else os.fspath(home))
        rounds.enter(self._native)

    @property
    def name(self) -> str:
        """The name, with the snapshot."""
        return self._native.spec

    def list(self, path: str = "/", *, snapshot: str | None = None) -> builtins.list[Entry]:
        """The entries of a folder, by name."""
        return [_entry(found) for found in self._at(snapshot).list(path)]

    def info(self, path: str, *, snapshot: str | None = None) -> Entry:
        """A file or folder. Symbolic links are followed."""
        return _entry(self._at(snapshot).info(path))

    def open(
        self,
        path: str,
        mode: str = "rb",
        *,
        snapshot: str | None = None,
        encoding: str = "utf-8",
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """Open a file: ``"rb"`` or ``"r"`` to read, ``"wb"`` or ``"w"`` to write.

        A written file appears when it is closed, as a whole and durably, in the place of an earlier one. It never
        appears if the ``with`` block ends with an exception, or if the process dies.
        """
        kind = mode.replace("b", "").replace("t", "")
        if kind not in ("r", "w") or len(mode) > 2:
            raise UsageError(f'open {path}: mode is {mode!r}; it must be "r", "rb", "w" or "wb"')
        volume = self._at(snapshot)
        if kind == "r":
            reader = _BufferedReader(_Reader(volume.open(path), path), _BUFFER_BYTES)
            return reader if "b" in mode else io.TextIOWrapper(reader, encoding, errors, newline)
        if "@" in volume.spec:
            raise UsageError(f"open {path}: {volume.spec} is a snapshot, which is read-only; write to the live volume")
        writer = Writer(volume.write(path), fence=(volume, path))
        return writer if "b" in mode else _TextWriter(writer, encoding, errors, newline)

    def remove(self, path: str) -> None:
        """Remove a file."""
        rounds.check(self._native, f"remove {self.name}:{path}")
        self._native.remove(path)

    def snapshot(self, name: str) -> Snapshot:
        """Take a snapshot of the live volume. It takes the same time whatever the size."""
        return _snapshot(self._native.snapshot(name))

    def snapshots(self) -> builtins.list[Snapshot]:
        """The snapshots, oldest first."""
        return [_snapshot(found) for found in self._native.snapshots()]

    def _at(self, snapshot: str | None) -> _native.Volume:
        if snapshot is None:
            return self._native
        volume = self._native.spec.split("@")[0]
        return _native.Volume(f"{volume}@{snapshot}", create=False, home=os.fspath(self._native.home))

    def __reduce__(self) -> Any:
        return _restore, (self.name, os.fspath(self._native.home))

    def __repr__(self) -> str:
        return f"<millrace.Volume {self.name}>"


class _Reader(io.RawIOBase):
    def __init__(self, file: _native.File, name: str) -> None:
        self._file = file
        self.name = name
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        # The buffer may be a tensor of any size: what is fetched at a time is a copy.
        found = self._file.read_at(self._offset, min(len(view), _WHOLE_BYTES))
        view[: len(found)] = found
        self._offset += len(found)
        return len(found)

    def readall(self) -> bytes:
        parts = []
        while found := self._file.read_at(self._offset, _WHOLE_BYTES):
            parts.append(bytes(found))
            self._offset += len(found)
        return b"".join(parts)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}: before the beginning of the file")
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _BufferedReader(io.BufferedReader):
    @property
    def size(self) -> int:
        """Bytes of the file, as fsspec has it."""
        return self.raw._file.size


class Writer(io.BufferedIOBase):
    """A file that is being written: it appears when it is closed, or never if it is discarded.

    Without ``autocommit``, it appears when :meth:`commit` is called after it was closed, for transactions of fsspec.
    ``fence`` names the volume and the path: a process of an earlier round of a training script makes nothing visible.
    """

    def __init__(
        self, file: _native.Writer, autocommit: bool = True, fence: tuple[_native.Volume, str] | None = None
    ) -> None:
        self._file = file
        self._autocommit = autocommit
        self._fence = fence
        self._buffer = bytearray()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._check()
        view = memoryview(data)
        # An empty array of several dimensions has no form as bytes.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._written += len(view)
        try:
            if len(view) >= _BUFFER_BYTES:
                self._send()
                # A tensor of any size: what is sent at a time is a copy.
                for start in range(0, len(view), _WHOLE_BYTES):
                    self._file.append(bytes(view[start : start + _WHOLE_BYTES]))
            else:
                self._buffer += view
                if len(self._buffer) >= _BUFFER_BYTES:
                    self._send()
        except BaseException:
            # Closing must not make a part of the file visible.
            self.discard()
            raise
        return len(view)

    def tell(self) -> int:
        self._check()
        return self._written

    def flush(self) -> None:
        # What was written is not visible before the file is closed.
        self._check()

    def close(self) -> None:
        """Make the file visible, as a whole and durably."""
        if self.closed:
            return
        try:
            self._send()
            if self._autocommit:
                self._publish()
        except BaseException:
            self.discard()
            raise
        super().close()

    def commit(self) -> None:
        """Make a file visible that was opened without ``autocommit``."""
        self._send()
        self._publish()

    def _publish(self) -> None:
        if self._fence is None:
            self._file.commit()
        else:
            volume, path = self._fence
            rounds.commit(volume, self._file, f"write {volume.spec}:{path}")

    def discard(self) -> None:
        """Give up what was written."""
        self._buffer = bytearray()
        self._file.discard()
        if not self.closed:
            super().close()

    def _send(self) -> None:
        if self._buffer:
            self._file.append(bytes(self._buffer))
            self._buffer = bytearray()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # A file that nobody closed may be half-written.
        self.discard()


class _TextWriter(io.TextIOWrapper):
    def __init__(self, writer: Any, encoding: str, errors: str | None, newline: str | None) -> None:
        super().__init__(writer, encoding, errors, newline)
        self._writer = writer

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.discard()

    def __del__(self) -> None:
        if not self.closed:
            self._writer.discard()


def locate(path: str | os.PathLike[str], home: str | os.PathLike[str] | None) -> tuple[Volume, str]:
    """The volume of ``VOLUME:/PATH`` or ``VOLUME@SNAPSHOT:/PATH``, and the path inside of it."""
    name, colon, inside = os.fspath(path).partition(":")
    if not name or not colon or not inside.startswith("/"):
        raise UsageError(f"{os.fspath(path)!r} names no file of a volume: write VOLUME:/PATH or VOLUME@SNAPSHOT:/PATH")
    return Volume(name, home=home), inside


def _entry(found: dict[str, Any]) -> Entry:
    modified_at = datetime.fromtimestamp(found["mtime"], timezone.utc)
    return Entry(found["name"], found["type"], found["size"], modified_at)


def _snapshot(found: tuple[str, float]) -> Snapshot:
    return Snapshot(found[0], datetime.fromtimestamp(found[1], timezone.utc))


def _restore(name: str, home: str) -> Volume:
    return Volume(name, home=home)
