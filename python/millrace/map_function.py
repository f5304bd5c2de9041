"""Functions of map jobs: found in a file, identified by its digest, and loaded in worker processes."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from millrace.errors import ConflictError, NotFoundError, UsageError

__all__ = ["FunctionSource", "check_not_loading"]

# Whether a worker process runs the file of its function.
_is_loading = False
# The scripts that this process has run: a file of two functions is run once.
_scripts: dict[str, types.ModuleType] = {}


def check_not_loading(function: Any) -> None:
    """Fails in a worker process that loads its function: each worker would start workers that do the same."""
    if _is_loading:
        raise UsageError(
            f"map {function!r}: the file of the function calls millrace.map when a worker process loads it; put the call "
            f"under if __name__ == \"__main__\":"
        )


@dataclass(frozen=True)
class FunctionSource:
    """A function of a Python file.

    ``module`` is the name by which the file is imported; none for a script, which is run as a module of its own.
    """

    file: str
    module: str | None
    name: str
    sha256: str

    @classmethod
    def of(cls, function: str | Callable[..., Any]) -> FunctionSource:
        """Finds the file of ``SCRIPT.py:FUNCTION``, ``MODULE:FUNCTION`` or of a function."""
        if isinstance(function, str):
            return cls._named(function)
        name = getattr(function, "__qualname__", "")
        module = getattr(function, "__module__", None)
        home = sys.modules.get(module or "")
        # The file of the module. That of the code is another one where a decorator has wrapped the function.
        file = getattr(home, "__file__", None) or ""
        if not name or not module or not os.path.isfile(file) or _resolve(home, name) is not function:
            raise UsageError(
                f"map {function!r}: worker processes load the function by its name from its file; write it at the top of a "
                f".py file, without a lambda, and pass values by arguments={{...}}"
            )
        return cls(os.path.abspath(file), None if module == "__main__" else module, name, _digest(_read(file)))

    @classmethod
    def _named(cls, text: str) -> FunctionSource:
        place, _, name = text.rpartition(":")
        if not place or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"map {text!r}: write SCRIPT.py:FUNCTION, or MODULE:FUNCTION for an installed module")
        if place.endswith(".py") or os.sep in place:
            return cls(os.path.abspath(place), None, name, _digest(_read(place)))
        try:
            spec = importlib.util.find_spec(place)
        except Exception as error:
            # The packages around the module are imported, and may raise anything.
            raise NotFoundError(f"map {text!r}: module {place!r} cannot be found: {type(error).__name__}: {error}") from error
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            raise NotFoundError(f"map {text!r}: there is no Python module {place!r}; a script is named by its file, with .py")
        return cls(spec.origin, place, name, _digest(_read(spec.origin)))

    def identity(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What makes a job another one: the name of the file, not its folder."""
        return {
            "file": os.path.basename(self.file) if self.module is None else self.module,
            "name": self.name,
            "sha256": self.sha256,
            "arguments": arguments,
        }

    def to_json(self) -> dict[str, Any]:
        """The arguments of this class."""
        return asdict(self)

    def load(self) -> Callable[..., Any]:
        """Imports or runs the file, which must be the one that was found.

        :raises Exception: whatever the file raises.
        """
        global _is_loading
        data = _read(self.file)
        if _digest(data) != self.sha256:
            raise ConflictError(f"map {self}: {self.file} has changed since the job began; run it again")
        _is_loading = True
        try:
            module = self._run(data) if self.module is None else self._import()
        finally:
            _is_loading = False
        function = _resolve(module, self.name)
        if function is None:
            names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_")
            raise NotFoundError(f"map {self}: {self.file} has no {self.name}; its functions are {', '.join(names) or 'none'}")
        if not callable(function):
            raise UsageError(f"map {self}: {self.name} is no function but {type(function).__name__}")
        return function

    def _import(self) -> types.ModuleType:
        module = importlib.import_module(str(self.module))
        found = getattr(module, "__file__", None) or "no file"
        if not os.path.isfile(found) or not os.path.samefile(found, self.file):
            raise ConflictError(
                f"map {self}: the module is {self.file}, and a worker process imports {found} by this name; rename one of "
                f"them, or name the script by its file, with .py"
            )
        return module

    def _run(self, data: bytes) -> types.ModuleType:
        if self.file in _scripts:
            return _scripts[self.file]
        # What stands beside a script can be imported, as when Python runs it.
        sys.path.insert(0, os.path.dirname(self.file))
        name = os.path.splitext(os.path.basename(self.file))[0]
        if name in sys.modules or not name.isidentifier():
            name = "__millrace_map__"
        module = types.ModuleType(name)
        module.__file__ = self.file
        sys.modules[name] = module
        exec(compile(data, self.file, "exec"), module.__dict__)
        _scripts[self.file] = module
        return module

    def __str__(self) -> str:
        return f"{os.path.basename(self.file) if self.module is None else self.module}:{self.name}"


def _resolve(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as source:
            return source.read()
    except OSError as error:
        raise NotFoundError(f"map: {file} cannot be read: {error.strerror or error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
