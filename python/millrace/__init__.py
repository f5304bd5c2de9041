"""Snapshots of Millrace volumes as training batches and files.

- :class:`Feed`: batches of a dataset in one global order, for any number of readers.
- :class:`Image`: what a column of images becomes.
- :class:`Tokens`: the packing of tokens into sequences of one length.
- :class:`Mixture`: several datasets in one order, by weight.
- :class:`Volume`: files of a volume, live or at a snapshot.
- :mod:`millrace.torch`: the feed as a dataset of PyTorch's ``DataLoader``, and checkpoints in volumes.
- :mod:`millrace.flight`: batches that servers on other machines read and decode.
- :func:`map`: a Python function over a dataset on several processes, into a new folder, exactly once, and a reduce function
  over the keys of what it returned.
- :func:`publish`: a PyTorch model as a version for the model server.
- :mod:`millrace.fsspec`: volumes as a file system of fsspec.

Processes may fork. Millrace closes what it has open before Python forks, and both processes open it again at their
next call. A child that is forked while a file is being written cannot use Millrace.
"""

import atexit
import os

from millrace import _native
from millrace.errors import (
    ConflictError,
    CorruptError,
    Error,
    FunctionError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from millrace.export import publish
from millrace.feed import Feed, Mixture
from millrace.image import Image
from millrace.mapping import Mapped

# Not in `__all__`: a star import keeps Python's own `map`.
from millrace.mapping import map as map
from millrace.tokens import Tokens
from millrace.volume import Snapshot, Volume

__all__ = [
    "ConflictError",
    "CorruptError",
    "Error",
    "Feed",
    "FunctionError",
    "Image",
    "Mapped",
    "MismatchError",
    "Mixture",
    "NoSpaceError",
    "NotFoundError",
    "Snapshot",
    "Tokens",
    "UnavailableError",
    "UsageError",
    "Volume",
    "close",
    "publish",
]

__version__: str = _native.__version__


def close() -> None:
    """Close the homes, feeds and files that this process has open.

    Feeds and files open again at their next use. Files that are being written are lost. Python calls this at its
    end; call it to let go of a home earlier, for example for ``millrace restore``.
    """
    _native.close()


os.register_at_fork(
    before=_native.before_fork,
    after_in_parent=_native.after_fork_in_parent,
    after_in_child=_native.after_fork_in_child,
)
atexit.register(close)
