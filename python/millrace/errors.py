"""Errors of the package: one class for each exit code of the ``millrace`` command, with the command's text."""

__all__ = [
    "ConflictError",
    "CorruptError",
    "Error",
    "FunctionError",
    "MismatchError",
    "NoSpaceError",
    "NotFoundError",
    "UnavailableError",
    "UsageError",
]


class Error(Exception):
    """An error of Millrace. Its text says what was attempted, on what, what is wrong and what to do."""


class UsageError(Error, ValueError):
    """An argument, the configuration or a stored state is wrong."""


class NotFoundError(Error, FileNotFoundError):
    """A volume, snapshot, file or column does not exist."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class ConflictError(Error):
    """Something is in use, exists already, has changed, or is null where a number is needed."""


class FunctionError(Error):
    """A function of :func:`millrace.map` raised an exception, or ended its process.

    ``traceback`` is the exception's, as a text.
    """

    traceback: str = ""


class MismatchError(ConflictError):
    """An exported model computes other outputs than the model."""


class UnavailableError(Error):
    """A prerequisite is missing: a permission, a server."""


class CorruptError(Error):
    """Data does not match its checksum or its format."""


class NoSpaceError(Error):
    """No space is left."""
