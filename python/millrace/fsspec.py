"""Volumes as a file system of fsspec: ``millrace://VOLUME/PATH`` and ``millrace://VOLUME@SNAPSHOT/PATH``."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from fsspec.spec import AbstractFileSystem

from millrace import rounds
from millrace.errors import Error, NotFoundError, UsageError
from millrace.volume import Volume, Writer

__all__ = ["MillraceFileSystem"]

_COPY_BYTES = 16 << 20


class MillraceFileSystem(AbstractFileSystem):
    """Files of volumes for pandas, pyarrow and everything else that opens files with fsspec.

    A written file appears when it is closed, as a whole. Snapshots are read-only. The files of ``fsspec.open`` are closed
    after an exception, too: to give a file up, write it in ``fs.transaction``, or with :class:`millrace.Volume`.

    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    """

    protocol = "millrace"
    root_marker = ""

    def __init__(self, home: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._home = home

    def _volume(self, path: str) -> tuple[Volume, str, str]:
        """The volume of a path, its name in the path, and the path inside of it."""
        name, _, inside = self._strip_protocol(path).partition("/")
        if not name:
            raise UsageError(f"millrace://{path}: name a volume: millrace://VOLUME/PATH")
        if name.endswith(":"):
            raise UsageError(f"millrace://{path}: URLs have no colon behind the volume; write millrace://{name[:-1]}/{inside}")
        return Volume(name, home=self._home), name, f"/{inside}"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        volume, name, inside = self._volume(path)
        found = volume._native.info(inside)
        entries = volume._native.list(inside) if found["type"] == "directory" else [found]
        entries = [_named(entry, name) for entry in entries]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        volume, name, inside = self._volume(path)
        return _named(volume._native.info(inside), name)

    def isdir(self, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == "directory")
        except (NotFoundError, UsageError):
            return False
        except Error as error:
            # A folder of the path is a file.
            if type(error) is not Error:
                raise
            return False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if options.get("compression") is not None and "w" in mode:
            # Files that compress do not close the file below them.
            raise UsageError(f"open {path}: compression is not supported here; use fsspec.open(..., compression=...)")
        if "b" not in mode and options.get("compression") is None and not self._intrans:
            # fsspec's own text files would make a half-written file visible after an exception.
            volume, _, inside = self._volume(path)
            text = {key: options[key] for key in ("encoding", "errors", "newline") if key in options}
            return volume.open(inside, mode, **text)
        return super().open(path, mode, **options)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **options: Any) -> Any:
        volume, _, inside = self._volume(path)
        if mode == "wb":
            return Writer(volume._native.write(inside), autocommit, (volume._native, inside))
        return volume.open(inside, mode)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], timezone.utc)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        self.makedirs(path, exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        volume, _, inside = self._volume(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        rounds.check(volume._native, f"make folder {path}")
        volume._native.make_dirs(inside)

    def rmdir(self, path: str) -> None:
        volume, _, inside = self._volume(path)
        rounds.check(volume._native, f"remove {path}")
        volume._native.remove_dir(inside)

    def rm_file(self, path: str) -> None:
        # Removing a tree comes here for its folders, too.
        if self.isdir(path):
            return self.rmdir(path)
        volume, _, inside = self._volume(path)
        rounds.check(volume._native, f"remove {path}")
        volume._native.remove(inside)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file; folders are created."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            while part := source.read(_COPY_BYTES):
                target.write(part)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Move files: inside a volume at once, to another one by copies."""
        is_one = isinstance(path1, str) and isinstance(path2, str) and not recursive
        if is_one and not self.isdir(path2) and self._volume(path1)[1] == self._volume(path2)[1]:
            self.mv_file(path1, path2)
        else:
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **options)

    def mv_file(self, path1: str, path2: str, **options: Any) -> None:
        """Move a file inside a volume, atomically."""
        source, first, inside = self._volume(path1)
        _, second, target = self._volume(path2)
        if first != second:
            raise UsageError(f"move {path1} to {path2}: a file can only be moved inside its volume")
        rounds.check(source._native, f"move {path1} to {path2}")
        source._native.rename(inside, target)


def _named(entry: dict[str, Any], volume: str) -> dict[str, Any]:
    return {**entry, "name": f"{volume}{entry['name']}".rstrip("/")}
