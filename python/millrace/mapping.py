"""The driver of map jobs: Python functions over the input groups of a dataset and over keys, on worker processes."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace import errors
from millrace.errors import Error, FunctionError, UnavailableError, UsageError
from millrace.feed import Feed, _integer
from millrace.map_function import FunctionSource, check_not_loading
from millrace.map_record import GROUPS_MAX, Job, Target, describe
from millrace.map_reduce import Reduction

__all__ = ["Mapped", "map"]

# Workers that a group may end before the job fails: a machine without memory kills one that did nothing wrong.
_DEATHS_MAX = 3
# The parts of a job that reduces. Not by the processors: the job may go on at another machine.
_PARTS = 16
# Seconds that workers have to end when their input has ended.
_PATIENCE_S = 10
# Seconds between two looks at a signal.
_SLICE_S = 0.2


@dataclass(frozen=True)
class Mapped:
    """A complete job.

    ``source`` has the snapshot that was read. ``computed`` of the ``groups`` input groups were computed by this call;
    the others were done before, or by another process. ``rows_read`` and ``rows`` count the rows of all groups and of
    their output, in ``files`` of ``bytes``. A job with a reduce function also has ``parts``, of which this call
    ``reduced`` some, and ``keys``; ``rows`` are then those that the reduce function returned.
    """

    source: str
    to: str
    groups: int
    computed: int
    rows_read: int
    rows: int
    files: int
    bytes: int
    parts: int | None = None
    reduced: int | None = None
    keys: int | None = None


def map(
    function: str | Callable[..., Any],
    source: str,
    to: str,
    *,
    processes: int | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    splits: Mapping[str, Any] | None = None,
    split: str | None = None,
    split_by: str | Sequence[str] | None = None,
    format: str = "arrow",
    arguments: Mapping[str, Any] | None = None,
    key: str | Sequence[str] | None = None,
    reduce: str | Callable[..., Any] | None = None,
    reduce_arguments: Mapping[str, Any] | None = None,
    parts: int | None = None,
    allow_changed_function: bool = False,
    progress: Callable[[int, int], None] | None = None,
    home: str | os.PathLike[str] | None = None,
) -> Mapped:
    """Call a function with each input group of a dataset, and write what it returns to a new folder, exactly once.

    An input group is a row group of a Parquet file, or a record batch of an Arrow file. Where row groups have more than
    256 MiB, all of them are read in parts of about 16 MiB. The output of group ``n`` is the file
    ``part-0000000n.parquet``. It becomes visible in one step with the record that the group is done. So each group has
    its output once, whatever process is killed, and with several drivers at once. The same call goes on where an earlier
    one stopped. When all groups are done, it returns at once.

    The function is called in worker processes. They load its file, so it must be at the top of one: not a lambda, and not
    a function of a notebook. A script that calls this for a function of its own does so under
    ``if __name__ == "__main__":``. What the function returns for a group does not depend on the others, but all tables must
    have the same columns. Several calls for one group are possible when a process dies: only the last has an output.

    With ``reduce``, the output of the function is not written to the folder. Its rows are split by a hash of their ``key``
    into parts, each part is sorted by key, and the reduce function is called once for each key, with all of its rows.
    What it returns for the keys of part ``n`` is the file ``part-0000000n.parquet``. The folder appears when all parts
    are done. Neither a part nor the rows of a key have to fit in memory; a part is sorted in ``TMPDIR`` where it is large.

    :param function: ``SCRIPT.py:FUNCTION``, ``MODULE:FUNCTION``, or a function of a file. It gets the rows of a group, and
        ``arguments``. It returns a ``pyarrow.Table`` or ``RecordBatch``, a dictionary of columns, a data frame, or None for
        no output. It may also return or yield several of these, which are written one after the other.
    :param source: ``VOLUME@SNAPSHOT:/PATH`` or ``VOLUME@latest:/PATH``, as for :class:`millrace.Feed`.
    :param to: ``VOLUME:/PATH``, a folder that is missing, empty, or that of the same job.
    :param processes: worker processes, by default one for each processor.
    :param columns: columns that the function gets, all by default.
    :param where: gives the function only the rows for which this condition is true. ``where``, ``splits``, ``split``
        and ``split_by`` are those of :class:`millrace.Feed`.
    :param format: ``"arrow"``: the function gets a ``pyarrow.RecordBatch``. ``"numpy"``, ``"torch"``: dictionaries, as
        :class:`millrace.Feed` gives them.
    :param arguments: values for named parameters of the function, which JSON can hold.
    :param key: a column, or several, of what the function returns: integers, floats, booleans, texts, bytes, dates or
        times. Null is a key of its own; so is NaN, and -0.0 is 0.0.
    :param reduce: the reduce function, named as ``function`` is, or by its bare name where it is in the same file. It
        gets the key, as a value of Python or a tuple of several columns, and an iterator of ``pyarrow.RecordBatch`` with
        the rows of the key, in the order of the input. It returns what ``function`` may return, or a dictionary of single
        values for one row.
    :param reduce_arguments: values for named parameters of the reduce function, which JSON can hold.
    :param parts: parts of a job that reduces, 1 to 4,096; by default 16, or those of the job in the folder.
    :param allow_changed_function: go on although the file of the function or its arguments have changed since groups
        were done. Their output stays.
    :param progress: called with the groups that are done and all groups, after each one.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :raises millrace.FunctionError: when the function raises an exception; the groups that other workers have begun are
        finished.
    :raises millrace.ConflictError: when the folder holds something else, or columns differ between groups or parts.
    """
    check_not_loading(function)
    source_of = FunctionSource.of(function)
    arguments = _json_object(source_of, arguments)
    reduction = _reduction(function, source_of, key, reduce, reduce_arguments, parts)
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UnavailableError("millrace.map needs pyarrow, which is not installed: pip install pyarrow") from error
    options: dict[str, Any] = {"columns": columns, "where": where, "splits": splits, "split": split, "split_by": split_by}
    # Input groups have no ranks: those of the environment are not asked for.
    feed = Feed(source, format=format, home=home, rank=0, world=1, **options)
    options = {name: feed._arguments[name] for name in (*options, "format", "home", "rank", "world")}
    if feed._reader.ranges:
        raise UsageError(f"map {source}: a topic is not mapped; land it with millrace ingest, and map a snapshot")
    # A format may stand in front: FORMAT:VOLUME@SNAPSHOT:/PATH.
    if "@" not in feed.dataset.partition(":/")[0]:
        raise UsageError(f"map {source}: the live volume may change while the job runs; take a snapshot, and name it")
    groups = feed._reader.groups
    if groups > GROUPS_MAX:
        raise UsageError(f"map {source}: {groups} input groups; a dataset has at most {GROUPS_MAX} files")
    processes = _processors() if processes is None else _integer("processes", processes, 1)
    target = Target(to, options["home"])
    manifest = target.manifest()
    if reduction is not None and parts is None and manifest is not None and isinstance(manifest.get("parts"), int):
        reduction = replace(reduction, parts=manifest["parts"])
    identity = {
        "source": feed.dataset,
        "plan": feed.plan,
        "groups": groups,
        "columns": options["columns"],
        "format": options["format"],
        "function": source_of.identity(arguments),
    }
    if reduction is not None:
        identity["key"] = reduction.key
        identity["reduce"] = reduction.source.identity(reduction.arguments)
        identity["parts"] = reduction.parts
    setup = {
        "function": source_of.to_json(),
        "arguments": arguments,
        "dataset": feed.dataset,
        "feed": options,
        "plan": feed.plan,
        "to": str(target),
        "path": [path for path in sys.path if path],
        "reduction": None if reduction is None else reduction.to_json(),
    }
    total = groups + (0 if reduction is None else reduction.parts)
    with _Pool(source_of, feed, setup) as pool:
        if manifest is None or manifest.get("completed") is None:
            # Before the folder belongs to the job: a function that cannot be loaded leaves no trace.
            pool.start_first()
        job = Job.begin(target, identity, allow_changed_function)
        if not job.is_complete:
            report = progress or _ignore
            done = 0
            units = {"group": (job.groups, groups)}
            if reduction is not None:
                units["part"] = (job.parts, reduction.parts)
            for unit, (record, count) in units.items():
                before = set(record.records())
                pending = [number for number in range(count) if number not in before]
                if manifest is not None:
                    # Another driver may be at work: it begins at the other end.
                    pending.reverse()
                done += len(before)
                report(done, total)
                # The parts begin when all groups are done, by this driver or another one.
                pool.run(job, unit, pending, processes, lambda more, done=done: report(done + more, total))
                done += len(pending)
            job.complete(groups)
    found = job.manifest["completed"]
    mapped = Mapped(
        feed.dataset, str(target), groups, pool.computed["group"], found["rows_read"], found["rows"], found["files"],
        found["bytes"],
    )
    if reduction is None:
        return mapped
    return replace(mapped, parts=reduction.parts, reduced=pool.computed["part"], keys=found["keys"])


class _Pool:
    """Worker processes, each with a thread of this process that hands it one group or part after the other."""

    def __init__(self, source: FunctionSource, feed: Feed, setup: dict[str, Any]) -> None:
        self._source = source
        self._feed = feed
        self._setup = setup
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._pending: collections.deque[int] = collections.deque()
        self._deaths: collections.Counter[int] = collections.Counter()
        self._finished = 0
        self._running = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.computed: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._changed:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.wait(deadline)
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0, _PATIENCE_S)
        for worker in workers:
            worker.close()

    def start_first(self) -> None:
        """Starts one worker, which loads the function."""
        self._idle.append(self._start())

    def run(self, job: Job, unit: str, pending: list[int], processes: int, report: Callable[[int], None]) -> None:
        """Has groups or parts computed. The first error stops it once the other workers have finished theirs.

        :param unit: ``"group"`` or ``"part"``.
        """
        self._pending.extend(pending)
        self._deaths.clear()
        self._finished = 0
        assert job.run_value is not None
        begin = {"job": {"manifest": job.manifest, "run_value": job.run_value.decode()}}
        for _ in range(min(processes, len(pending))):
            self._running += 1
            threading.Thread(target=self._serve, args=(begin, unit), daemon=True).start()
        reported = 0
        while True:
            with self._changed:
                # In slices: not every system interrupts a wait for a signal.
                self._changed.wait_for(lambda: self._finished > reported or self._running == 0, _SLICE_S)
                finished, is_over = self._finished, self._running == 0
            if finished > reported:
                reported = finished
                report(finished)
            if is_over:
                break
        if self._error is not None:
            raise self._error

    def _serve(self, begin: dict[str, Any], unit: str) -> None:
        worker: _Worker | None = None
        try:
            while (group := self._next()) is not None:
                try:
                    if worker is None:
                        worker = self._take()
                        worker.ask(begin)
                    computed = worker.ask({unit: group})["computed"]
                except _Died as died:
                    worker = None
                    self._requeue(group, unit, died)
                    continue
                with self._changed:
                    self._finished += 1
                    self.computed[unit] += computed
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                if worker is not None:
                    self._idle.append(worker)
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            if self._error is not None or self._is_closed or not self._pending:
                return None
            return self._pending.popleft()

    def _requeue(self, group: int, unit: str, died: _Died) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._deaths[group] += 1
            if self._deaths[group] < _DEATHS_MAX:
                self._pending.appendleft(group)
                return
        where = f"map {self._source}: {describe(self._feed, group)}"
        if unit == "part":
            reduction = Reduction.from_json(self._setup["reduction"])
            where = f"reduce {reduction.source}: part {group} of {reduction.parts}"
        raise FunctionError(f"{where}: {_DEATHS_MAX} worker processes ended at it, the last one {died}")

    def _take(self) -> _Worker:
        with self._changed:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._changed:
            self._workers.add(worker)
            is_closed = self._is_closed
        if is_closed:
            worker.stop()
        try:
            worker.ask({"setup": self._setup})
        except _Died as died:
            raise FunctionError(f"map {self._source}: a worker process ended while it loaded the function, {died}") from died
        return worker


class _Died(Exception):
    """A worker process has ended."""


class _Worker:
    """A worker process and its two pipes."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "millrace.map_worker"]
        # A session of its own: Ctrl-C in the terminal is for the driver.
        try:
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise UnavailableError(
                f"map: a worker process cannot be started: {sys.executable}: {error.strerror or error}; use fewer processes"
            ) from error
        self._received = b""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        :raises millrace.Error: the error of the worker.
        """
        try:
            self._send(json.dumps(request).encode() + b"\n")
            line = self._receive()
            while not line.startswith(b"{"):
                # Python printed it when it started, before the worker had the pipe for itself.
                print(line.decode(errors="replace"), file=sys.stderr)
                line = self._receive()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise _Died(self._end_of_process()) from error
        if "error" in answer:
            raise _error_of(answer)
        return answer

    def stop(self) -> None:
        """Ends the process: what it has not published is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Waits for the end, and enforces it at the deadline, a time of the monotonic clock."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # It may be in native code that lets no thread of Python run.
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)

    def _kill(self) -> None:
        """Kills the process, and what the function has started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of the pipes."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        while data:
            data = data[self._process.stdin.write(data) or 0 :]

    def _receive(self) -> bytes:
        """A line. Notices a process that has ended, also while one that it started holds the pipe."""
        assert self._process.stdout is not None
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            has_ended = self._process.poll() is not None
            if ready.poll(0 if has_ended else _SLICE_S * 1000):
                data = self._process.stdout.read(1 << 16)
                if not data:
                    raise ValueError("the pipe has ended")
                self._received += data
            elif has_ended:
                raise ValueError("the process has ended")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end_of_process(self) -> str:
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
            return "without an answer: its pipe is closed"
        if code >= 0:
            return f"with exit code {code}"
        hint = "; the system may have had no memory left" if -code == signal.SIGKILL else ""
        return f"by signal {-code}{hint}"


def _error_of(answer: dict[str, Any]) -> Error:
    kind = getattr(errors, answer["class"])
    text, trace = answer["error"], answer.get("traceback", "")
    error: Error = kind(f"{text}\n{trace}" if trace else text)
    if isinstance(error, FunctionError):
        error.traceback = trace
    return error


def _reduction(
    function: str | Callable[..., Any],
    source: FunctionSource,
    key: str | Sequence[str] | None,
    reduce: str | Callable[..., Any] | None,
    arguments: Mapping[str, Any] | None,
    parts: int | None,
) -> Reduction | None:
    if reduce is None:
        for name, value in {"key": key, "reduce_arguments": arguments, "parts": parts}.items():
            if value is not None:
                raise UsageError(f"map {source}: {name} is for jobs with a reduce function; name one with reduce")
        return None
    if key is None:
        raise UsageError(f"map {source}: a reduce function needs a key; name the columns with key")
    if isinstance(reduce, str) and ":" not in reduce and isinstance(function, str):
        # The file that was named, not the folder of a script.
        reduce = f"{function.rpartition(':')[0]}:{reduce}"
    elif isinstance(reduce, str) and ":" not in reduce:
        raise UsageError(f"map {source}: reduce is {reduce!r}; give the function, or its file too: SCRIPT.py:FUNCTION")
    reduce_of = FunctionSource.of(reduce)
    number = _PARTS if parts is None else _integer("parts", parts, 1)
    names = [key] if isinstance(key, str) else list(key)
    reduction = Reduction(reduce_of, _json_object(reduce_of, arguments), names, number)
    reduction.check()
    return reduction


def _json_object(source: FunctionSource, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        text = json.dumps(dict(arguments or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"map {source}: arguments hold something that JSON cannot: {error}") from error
    values: dict[str, Any] = json.loads(text)
    wrong = [name for name in values if not name.isidentifier()]
    if wrong:
        raise UsageError(f"map {source}: {wrong[0]!r} in arguments is no name of a parameter")
    return values


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _ignore(done: int, groups: int) -> None:
    pass
