"""Storage of ``torch.distributed.checkpoint`` in volumes. :mod:`millrace.torch` has the same names."""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millrace import rounds
from millrace.errors import ConflictError, Error, NotFoundError, UnavailableError, UsageError
from millrace.volume import locate

try:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.filesystem import FileSystemBase
except ImportError as error:
    import torch

    raise UnavailableError(
        f"storage of torch.distributed.checkpoint needs PyTorch 2.4 or newer, this one is {torch.__version__}; "
        f"millrace.torch.save and load work with it"
    ) from error

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["StorageReader", "StorageWriter"]

# The file that makes a checkpoint whole, and the end of the names of the others.
_METADATA = ".metadata"
_DATA = ".distcp"


class StorageWriter(FileSystemWriter):  # type: ignore[misc]
    """Stores checkpoints of ``torch.distributed.checkpoint`` in a volume.

    ``dcp.save(state, storage_writer=StorageWriter("runs:/digits/step-100"))``, and ``dcp.async_save`` the same way. Each
    rank writes its part as files of its own; the file ``.metadata``, written last, makes the checkpoint whole.
    A save that ends early leaves no checkpoint, or the one before.

    Files of different saves have different names. A save into the folder of another one replaces it as a whole, and
    removes its files and those of saves that ended early. Two saves into one folder must not run at the same time.

    :param path: the folder of the checkpoint, ``VOLUME:/PATH``. ``checkpoint_id`` of ``dcp.save`` may name another one.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :param overwrite: whether a whole checkpoint in the folder may be replaced.
    :param options: those of ``torch.distributed.checkpoint.FileSystemWriter``, for example ``thread_count``.
    """

    def __init__(
        self,
        path: str,
        *,
        home: str | os.PathLike[str] | None = None,
        overwrite: bool = True,
        **options: Any,
    ) -> None:
        # Files are durable when they are closed; there is no descriptor to sync.
        super().__init__(".", **{**options, "sync_files": False, "overwrite": overwrite})
        self.fs = _Files(home)
        self.path = self.fs.init_path(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # PyTorch looks for a parameter of the name kwargs.
        if not kwargs.get("use_collectives", True):
            raise UsageError(f"save {self.path}: use_collectives=False is not supported: no rank would write last")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        if not self.overwrite and self.fs.exists(f"{self.path}/{_METADATA}"):
            raise ConflictError(f"save {self.path}: a checkpoint is there already; use another folder or overwrite=True")
        with warnings.catch_warnings():
            # Replacing a checkpoint is safe here.
            warnings.filterwarnings("ignore", "Detected an existing checkpoint")
            return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{uuid.uuid4().hex}_")
        done = super().write_data(dataclasses.replace(plan, storage_data=prefix), planner)
        # PyTorch does not notice when one of several threads fails.
        if len(done.value()) != len(plan.items):
            raise Error(f"save {self.path}: a thread has failed to write its part; its error is printed above")
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        used = {result.storage_data.relative_path for part in results for result in part}
        lost = used - set(self.fs.names(self.path))
        if lost:
            raise ConflictError(f"save {self.path}: {min(lost)} has been removed; did another save use this folder?")
        super().finish(metadata, results)
        for name in self.fs.names(self.path):
            if name.endswith(_DATA) and name not in used:
                self.fs.remove(f"{self.path}/{name}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return _Files.validate_checkpoint_id(checkpoint_id)


class StorageReader(FileSystemReader):  # type: ignore[misc]
    """Loads checkpoints that :class:`StorageWriter` has stored, on any number of ranks.

    ``dcp.load(state, storage_reader=StorageReader("runs:/digits/step-100"))``. PyTorch's metadata is a pickle, which can
    run code: load checkpoints that you trust.

    :param path: the folder of the checkpoint, ``VOLUME:/PATH`` or ``VOLUME@SNAPSHOT:/PATH``.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :param options: those of ``torch.distributed.checkpoint.FileSystemReader``.
    """

    def __init__(self, path: str, *, home: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(".", **options)
        self.fs = _Files(home)
        self.path = self.fs.init_path(path)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        try:
            return super().read_metadata(*args, **options)
        except NotFoundError as error:
            raise NotFoundError(
                f"load {self.path}: no whole checkpoint is there: {error}; millrace.torch.checkpoints lists those that are"
            ) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return _Files.validate_checkpoint_id(checkpoint_id)


class _Files(FileSystemBase):  # type: ignore[misc]
    """Files of volumes, as PyTorch's writer and reader call them. Paths are ``VOLUME:/PATH``."""

    def __init__(self, home: str | os.PathLike[str] | None) -> None:
        self._home = None if home is None else os.fspath(home)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        volume, inside = locate(path, self._home)
        with volume.open(inside, mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        volume, inside = locate(path, self._home)
        target = locate(new_path, self._home)[1]
        if not rounds.is_fenced():
            volume._native.rename(inside, target)
            return
        # A rename expects nothing in its transaction. The metadata is small: its copy does.
        with volume.open(inside) as stored, volume.open(target, "wb") as out:
            out.write(stored.read())
        volume.remove(inside)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        # The newest snapshot may be another one soon.
        volume, inside = locate(path, self._home)
        return f"{volume.name}:{inside.rstrip('/')}"

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        volume, inside = locate(path, self._home)
        rounds.check(volume._native, f"make folder {os.fspath(path)}")
        volume._native.make_dirs(inside or "/")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str) and re.fullmatch(r"[\w.@-]+:/.*", checkpoint_id) is not None

    def exists(self, path: str | os.PathLike[str]) -> bool:
        volume, inside = locate(path, self._home)
        try:
            volume.info(inside)
        except NotFoundError:
            return False
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        # PyTorch removes the metadata of the checkpoint before and then renames that of the new one. The rename replaces
        # it in one step; without it, a crash between the two would lose both.
        pass

    def names(self, path: str) -> list[str]:
        volume, inside = locate(path, self._home)
        return [entry.path.rpartition("/")[2] for entry in volume.list(inside or "/")]

    def remove(self, path: str) -> None:
        volume, inside = locate(path, self._home)
        try:
            volume.remove(inside)
        except NotFoundError:
            pass


def whole(path: str, home: str | os.PathLike[str] | None) -> list[str]:
    """The whole checkpoints in the folders below a folder, by name."""
    files = _Files(home)
    volume, inside = locate(path, home)
    try:
        entries = volume.list(inside)
    except NotFoundError:
        return []
    folders = [f"{volume.name}:{entry.path}" for entry in entries if entry.type == "directory"]
    return sorted((folder for folder in folders if files.exists(f"{folder}/{_METADATA}")), key=_natural)


def remove(path: str, home: str | os.PathLike[str] | None) -> None:
    """Removes a checkpoint; the file that makes it whole first."""
    files = _Files(home)
    volume, inside = locate(path, home)
    names = files.names(path)
    # PyTorch's name for metadata that is being written: a save may have ended there.
    own = (_METADATA, f"{_METADATA}.tmp")
    strange = [name for name in names if name not in own and not name.endswith(_DATA)]
    if strange:
        raise UsageError(f"remove {path}: it is no checkpoint, or holds more than one: {min(strange)}")
    for name in sorted(names, key=lambda name: name != _METADATA):
        files.remove(f"{path}/{name}")
    rounds.check(volume._native, f"remove {path}")
    volume._native.remove_dir(inside)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
