"""The half of ``millrace feed map`` in Python; private to that command.

One line of JSON on standard input holds the arguments of :func:`millrace.map`. A line on standard output says how far the
job is, and the last one how it ended. The end of standard input, SIGTERM and SIGINT stop the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from millrace.errors import Error, FunctionError
from millrace.mapping import map

_STOPS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    if sys.argv[1:] != ["map"]:
        print("this is the half of the command `millrace feed map` in Python; run that command", file=sys.stderr)
        return 2
    # Standard output is for the events alone: packages that a name of a function leads through may print when imported.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        # Texts of Python may hold halves of surrogate pairs, which UTF-8 and JSON elsewhere do not have.
        events.write(json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        events.flush()

    arguments = json.loads(sys.stdin.readline())
    # Pairs, whose order decides the parts.
    arguments["splits"] = dict(arguments["splits"]) or None
    for number in _STOPS:
        signal.signal(number, _stop)
    threading.Thread(target=_wait_for_end, daemon=True).start()
    try:
        done = map(**arguments, progress=lambda done, groups: tell({"done": done, "groups": groups}))
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            # Nothing hears it where the command was killed.
            tell({"interrupted": True})
        return 1
    except Error as error:
        _ignore_stops()
        text, name = str(error), type(error).__name__
        if isinstance(error, FunctionError) and error.traceback:
            print(error.traceback, file=sys.stderr, flush=True)
        tell({"error": text.partition("\n")[0], "class": name})
        return 1
    _ignore_stops()
    tell({"complete": dataclasses.asdict(done)})
    return 0


def _stop(*_: Any) -> NoReturn:
    # The end of the input and a signal may both come: the second one must not interrupt the end of the job.
    _ignore_stops()
    raise KeyboardInterrupt


def _ignore_stops() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


def _wait_for_end() -> None:
    # Not through `sys.stdin`, whose lock the end of the interpreter takes.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
