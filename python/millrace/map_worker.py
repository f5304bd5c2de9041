"""A worker process of a map job: reads input groups or parts, calls the function, and publishes what it returns.

The driver writes a line of JSON for each request to standard input, and gets a line for each answer. The worker ends at
once when its input ends: the driver is gone, and a group that was begun has left nothing. What the function prints goes to
standard error.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from millrace.errors import Error
from millrace.feed import Feed
from millrace.map_failure import TRACE_MAX, FunctionFailed, shortened, text_of
from millrace.map_function import FunctionSource
from millrace.map_output import GroupOutput, Output, ReturnedError, tables
from millrace.map_record import Job, Target, describe
from millrace.map_reduce import Reducer, Reduction
from millrace.map_shuffle import ShuffleOutput

__all__ = ["main"]


class _Worker:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._source = FunctionSource(**setup["function"])
        self._arguments = setup["arguments"]
        self._feed = Feed(setup["dataset"], **setup["feed"])
        if self._feed.plan != setup["plan"]:
            raise Error(f"map {self._source}: {setup['dataset']} has changed since the job began; run it again")
        sys.path[:0] = [path for path in setup["path"] if path not in sys.path]
        self._function = _load(self._source)
        self._reduction = Reduction.from_json(setup["reduction"]) if setup["reduction"] is not None else None
        self._reducer = None if self._reduction is None else Reducer(self._reduction, _load(self._reduction.source))
        self._target = Target(setup["to"], setup["feed"]["home"])
        self._job: Job | None = None

    def take(self, job: dict[str, Any]) -> None:
        """Works for a run from now on."""
        self._job = Job(self._target, job["manifest"], job["run_value"].encode())

    def compute(self, group: int) -> bool:
        """Computes a group; returns whether it is this worker's output that was published."""
        job = self._job
        assert job is not None
        if job.groups.is_done(group):
            return False
        output = self._output(job, group)
        try:
            # The rows are the function's alone: it may change them, and drop them early.
            returned = tables(self._call(self._feed._convert(self._feed._reader.read_group(group)), group))
            while True:
                try:
                    table = next(returned, None)
                except ReturnedError:
                    raise
                except BaseException as error:
                    raise self._failed(group, error) from error
                if table is None:
                    break
                output.write(table)
            found = self._feed._reader.group(group)
            return output.finish(found[3] if found else 0)
        except FunctionFailed:
            output.discard()
            raise
        except Error as error:
            output.discard()
            raise type(error)(f"map {self._source}: {describe(self._feed, group)}: {error}") from error
        except BaseException:
            output.discard()
            raise

    def reduce(self, part: int) -> bool:
        """Reduces a part; returns whether it is this worker's output that was published."""
        assert self._job is not None and self._reducer is not None
        return self._reducer.compute(self._job, part)

    def _output(self, job: Job, group: int) -> Output:
        if self._reduction is None:
            return GroupOutput(job.groups, group)
        return ShuffleOutput(job.groups, group, self._reduction.key, self._reduction.parts)

    def _call(self, rows: Any, group: int) -> Any:
        try:
            return self._function(rows, **self._arguments)
        except BaseException as error:
            raise self._failed(group, error) from error

    def _failed(self, group: int, error: BaseException) -> FunctionFailed:
        return FunctionFailed(f"map {self._source}: {describe(self._feed, group)}", error)


def _load(source: FunctionSource) -> Any:
    try:
        return source.load()
    except Error:
        raise
    except BaseException as error:
        raise FunctionFailed(f"map {source}: {source.file} cannot be loaded", error) from error


def main() -> None:
    """Answers requests until the input ends."""
    # The driver decides what an interrupt means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_read, args=(requests, lines, is_busy), daemon=True).start()
    worker: _Worker | None = None
    while (line := lines.get()) is not None:
        request = json.loads(line)
        try:
            if "setup" in request:
                worker = _Worker(request["setup"])
                answer: dict[str, Any] = {}
            elif worker is None:
                raise Error("a worker was asked before it was set up")
            elif "job" in request:
                worker.take(request["job"])
                answer = {}
            elif "part" in request:
                answer = {"computed": worker.reduce(request["part"])}
            else:
                answer = {"computed": worker.compute(request["group"])}
        except FunctionFailed as failed:
            answer = {"error": str(failed), "class": "FunctionError", "traceback": failed.traceback}
        except Error as error:
            answer = {"error": str(error), "class": _class(error)}
        except BaseException as error:
            trace = shortened(traceback.format_exc().rstrip(), TRACE_MAX)
            answer = {"error": text_of(error), "class": "Error", "traceback": trace}
        is_busy.clear()
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except OSError:
            # The driver is gone.
            return


def _read(requests: Any, lines: queue.SimpleQueue[str | None], is_busy: threading.Event) -> None:
    for line in requests:
        # Here and not where the request is taken: the driver may be gone before that.
        is_busy.set()
        lines.put(line)
    lines.put(None)
    if is_busy.is_set():
        # No caller waits for the answer, and no reader sees what was staged. What the function has started ends, too.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


def _class(error: Error) -> str:
    """The public class of an error."""
    import millrace.errors

    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in millrace.errors.__all__)


if __name__ == "__main__":
    main()
