"""Map jobs: a function over input groups, exactly once, through kills of workers and drivers."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import millrace
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from millrace.map_record import Job, Target
from support import DATASET, DEADLINE_S, PROGRAM, ROWS, HomeCase, python, run

GROUPS = 9
SCRIPT = '''
import pyarrow
import pyarrow.compute

def double(rows, factor=2):
    return pyarrow.table({"id": rows["id"], "score": pyarrow.compute.multiply(rows["score"], factor), "tokens": rows["tokens"]})

def split(rows, words=("a", "b")):
    for start in range(0, rows.num_rows, 64):
        yield rows.slice(start, 64)
        yield None

def even(rows):
    kept = rows.filter(pyarrow.compute.less(rows["id"], 300))
    return kept if kept.num_rows else None

def arrays(rows):
    return {"id": rows["id"], "pixels": rows["pixels"] / 2}
'''


def serial(table: pyarrow.Table) -> pyarrow.Table:
    """The output of `double` for a group."""
    score = pyarrow.compute.multiply(table["score"], 2)
    return pyarrow.table({"id": table["id"], "score": score, "tokens": table["tokens"]})


class MapCase(HomeCase):
    """Tests with a folder for scripts."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.volume = millrace.Volume("digits", home=cls.home)
        cls.scripts = tempfile.mkdtemp(prefix="millrace-scripts-")
        cls.addClassCleanup(shutil.rmtree, cls.scripts)

    def setUp(self) -> None:
        self.to = f"digits:/out/{self._testMethodName}"
        self.path = self.to.partition(":")[2]

    def script(self, code: str = SCRIPT, name: str = "script") -> str:
        file = Path(self.scripts, f"{self._testMethodName}_{name}.py")
        file.write_text(code)
        return str(file)

    def map(self, function: Any, source: str = DATASET, **arguments: Any) -> millrace.Mapped:
        return millrace.map(function, source, **{"to": self.to, "home": self.home, "processes": 2, **arguments})

    def groups(self) -> list[pyarrow.Table]:
        """The row groups of the dataset, read by pyarrow."""
        found = []
        for entry in self.volume.list("/train", snapshot="v1"):
            with self.volume.open(entry.path, snapshot="v1") as source:
                file = pyarrow.parquet.ParquetFile(source)
                found += [file.read_row_group(number) for number in range(file.num_row_groups)]
        return found

    def output(self) -> dict[int, pyarrow.Table]:
        """The output by group."""
        found = {}
        for entry in self.volume.list(self.path):
            name = entry.path.rpartition("/")[2]
            if name != "_map.json":
                with self.volume.open(entry.path) as file:
                    found[int(name.removeprefix("part-").removesuffix(".parquet"))] = pyarrow.parquet.read_table(file)
        return found

    def check(self, expected: Callable[[pyarrow.Table], pyarrow.Table] = serial) -> None:
        """The output is that of a serial loop, and no record of the job is left but the manifest."""
        self.assertEqual(self.output(), {number: expected(table) for number, table in enumerate(self.groups())})
        target = Target(self.to, self.home)
        self.assertEqual(self.volume._native.keys(f"{target._prefix}/"), [])
        self.assertIsNotNone(target.manifest()["completed"])

    def wait_for_end(self, pid: int) -> None:
        """Waits until a process that is no child has ended."""
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            self.assertTrue(select.select([file], [], [], DEADLINE_S)[0], f"process {pid} lives on without its driver")
        finally:
            os.close(file)

    def pipe(self, name: str) -> tuple[str, int]:
        """A named pipe, and its two ends as one file."""
        path = os.path.join(self.scripts, f"{self._testMethodName}-{name}")
        os.mkfifo(path)
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.addCleanup(os.close, file)
        return path, file

    def receive(self, file: int) -> str:
        self.assertTrue(select.select([file], [], [], DEADLINE_S)[0], "a worker said nothing")
        return os.read(file, 4096).decode()


class MapTest(MapCase):
    def test_the_output_is_that_of_a_serial_loop(self) -> None:
        seen: list[tuple[int, int]] = []
        done = self.map(f"{self.script()}:double", progress=lambda done, groups: seen.append((done, groups)))
        self.assertEqual((done.source, done.to, done.groups, done.computed), (DATASET, self.to, GROUPS, GROUPS))
        self.assertEqual((done.rows_read, done.rows, done.files), (ROWS, ROWS, GROUPS))
        self.assertEqual((seen[0], seen[-1]), ((0, GROUPS), (GROUPS, GROUPS)))
        self.check()
        self.volume.snapshot("mapped")
        feed = millrace.Feed(f"digits@mapped:{self.path}", columns=["id"], home=self.home)
        self.assertEqual(sorted(i for batch in feed for i in batch["id"].tolist()), list(range(ROWS)))
        # A complete job is not run again, with any number of processes.
        again = self.map(f"{self.script()}:double", processes=1)
        self.assertEqual((again.computed, again.rows, again.bytes), (0, ROWS, done.bytes))

    def test_functions_of_modules_and_parameters(self) -> None:
        with mock.patch.object(sys, "path", [self.scripts, *sys.path]):
            Path(self.scripts, "mapped_module.py").write_text(SCRIPT)
            import mapped_module

            self.map(mapped_module.double, arguments={"factor": 2})
            self.check()
            with self.assertRaisesRegex(millrace.ConflictError, "by another function: its arguments changed"):
                self.map("mapped_module:double", arguments={"factor": 3})
            self.assertEqual(self.map("mapped_module:double", arguments={"factor": 2}).computed, 0)

    def test_iterators_arrays_and_selected_rows(self) -> None:
        self.map(f"{self.script()}:split", columns=["id", "tokens", "kind"], processes=1)
        for number, table in enumerate(self.groups()):
            found = self.output()[number]
            self.assertEqual(found["id"], table["id"])
            self.assertEqual(found["kind"].cast(pyarrow.string()), table["kind"].cast(pyarrow.string()))
            self.assertEqual(found["tokens"].to_pylist(), table["tokens"].to_pylist())
        self.to, self.path = f"{self.to}/arrays", f"{self.path}/arrays"
        chosen = {"where": "label < 7", "splits": {"a": 0.5, "b": 0.5}, "split": "b", "split_by": "id"}
        done = self.map(f"{self.script()}:arrays", format="numpy", columns=["pixels", "id"], **chosen)
        expected = sorted(i for batch in self.feed(**chosen) for i in batch["id"].tolist())
        rows = pyarrow.concat_tables(self.output().values())
        self.assertEqual(sorted(rows["id"].to_pylist()), expected)
        self.assertEqual((done.rows_read, done.rows), (len(expected), len(expected)))
        for row in rows.slice(0, 5).to_pylist():
            self.assertEqual(row["pixels"], [(row["id"] * 4 + i) / 2 for i in range(4)])

    def test_groups_without_output_have_no_file(self) -> None:
        done = self.map(f"{self.script()}:even", columns=["id"])
        self.assertEqual((done.groups, done.files, done.rows_read, done.rows), (GROUPS, 4, ROWS, 300))
        self.assertEqual(sorted(self.output()), [0, 1, 2, 3])
        self.assertEqual(sorted(i for t in self.output().values() for i in t["id"].to_pylist()), list(range(300)))
        self.to += "/none"
        script = self.script("def nothing(rows): pass")
        self.assertEqual(self.map(f"{script}:nothing").files, 0)
        self.assertEqual(self.map(f"{script}:nothing").computed, 0)

    def test_large_outputs_are_streamed(self) -> None:
        script = self.script('''
import resource
import numpy
import pyarrow

def large(rows):
    first = None
    if rows["id"][0].as_py() != 0:
        return
    for part in range(64):
        data = numpy.random.default_rng(part).integers(0, 1 << 62, 1 << 19)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first = first or peak
        yield pyarrow.table({"data": data, "peak": numpy.full(len(data), peak - first)})
''')
        done = self.map(f"{script}:large", processes=1)
        self.assertEqual((done.files, done.rows), (1, 64 << 19))
        with self.volume.open(f"{self.path}/part-00000000.parquet") as file:
            written = pyarrow.parquet.ParquetFile(file)
            self.assertGreater(written.num_row_groups, 16)
            peak = written.read_row_group(written.num_row_groups - 1, ["peak"])["peak"][-1].as_py()
        self.assertLess(peak, 192 << 10, "KiB beyond the first of 64 tables of 8 MiB")

    def test_an_exception_names_the_group_and_stops_the_job(self) -> None:
        script = self.script('''
def careful(rows):
    if rows["id"][0].as_py() == 201:
        helper(rows)
    return rows.select(["id"])

def helper(rows):
    print("a message of the function")
    raise ValueError(f"row 201 is wrong\\nsecond line")
''')
        with self.assertRaises(millrace.FunctionError) as caught:
            self.map(f"{script}:careful")
        text = str(caught.exception)
        self.assertRegex(text.partition("\n")[0], r"^map .*_script.py:careful: input group 3 \(/train/1.parquet, row group 1\): "
                                                  r"ValueError: row 201 is wrong$")
        self.assertIn("in helper", caught.exception.traceback)
        self.assertNotIn("map_worker", caught.exception.traceback)
        self.assertTrue(set(self.output()) < set(range(GROUPS)) - {3})
        # With the mistake mended, the groups that are done have to be kept on purpose.
        done = set(self.output())
        Path(script).write_text("def careful(rows):\n    return rows.select(['id'])\n")
        with self.assertRaisesRegex(millrace.ConflictError, f"{len(done)} of 9 input groups are done by another function: its "
                                                            "file changed; .*--allow-changed-function"):
            self.map(f"{script}:careful")
        self.assertEqual(self.map(f"{script}:careful", allow_changed_function=True).computed, GROUPS - len(done))
        self.check(lambda table: table.select(["id"]))
        manifest = Target(self.to, self.home).manifest()
        self.assertEqual(len(manifest["earlier_functions"]), 1)

    def test_a_function_without_a_group_may_change(self) -> None:
        script = self.script("def f(rows):\n    raise KeyError('x')\n")
        with self.assertRaisesRegex(millrace.FunctionError, "KeyError: 'x'"):
            self.map(f"{script}:f")
        Path(script).write_text("def f(rows):\n    return rows.select(['id'])\n")
        self.assertEqual(self.map(f"{script}:f").computed, GROUPS)

    def test_columns_that_differ_between_groups_are_refused(self) -> None:
        script = self.script('''
import pyarrow

def f(rows):
    first = rows["id"][0].as_py()
    return pyarrow.table({"id": rows["id"], "x": pyarrow.array([None if first == 400 else 1.5] * rows.num_rows)})

def within(rows):
    yield rows.select(["id"])
    yield rows.select(["label"])

def twice(rows):
    return pyarrow.Table.from_arrays([rows["id"], rows["id"]], ["id", "id"])

def text(rows):
    yield "text"

def union(rows):
    return pyarrow.table({"u": pyarrow.UnionArray.from_sparse(pyarrow.array([0], pyarrow.int8()), [pyarrow.array([1])])})
''')
        with self.assertRaisesRegex(millrace.ConflictError, r"input group 4 \(/train/2.parquet, row group 0\): its output has "
                                    "other columns than that of input group 0: column 'x' is null and was double"):
            self.map(f"{script}:f", processes=1)
        for kind, name, text in [
            (millrace.ConflictError, "within", "different columns: column 'id' is missing"),
            (millrace.UsageError, "twice", "two columns 'id'"),
            (millrace.UsageError, "text", "input group 0 .*returned builtins.str; return a pyarrow.Table"),
            (millrace.UsageError, "union", "Parquet has no form for"),
        ]:
            self.to = f"digits:/out/refused-{name}"
            with self.assertRaisesRegex(kind, text):
                self.map(f"{script}:{name}", processes=1)

    def test_another_job_in_the_folder_is_refused(self) -> None:
        script = self.script()
        self.map(f"{script}:double")
        snapshot = millrace.Volume("digits", home=self.home).snapshot("later")
        for text, source, arguments in [
            ("source was digits@v1:/train and is digits@later:/train", f"digits@{snapshot.name}:/train", {}),
            ("columns was null", DATASET, {"columns": ["id", "score", "tokens"]}),
            ("plan was", DATASET, {"where": "label = 3"}),
            ("format was arrow and is numpy", DATASET, {"format": "numpy", "columns": ["id"]}),
            ("its name changed", DATASET, {"function": f"{script}:split"}),
        ]:
            function = arguments.pop("function", f"{script}:double")
            with self.assertRaisesRegex(millrace.ConflictError, f"^map to {self.to}: .*{text}"):
                self.map(function, source, **arguments)
        self.check()
        with self.assertRaisesRegex(millrace.ConflictError, "holds files, and none of them is of a map job"):
            self.map(f"{script}:double", to="digits:/train")

    def test_wrong_arguments_leave_no_trace(self) -> None:
        script = self.script()
        broken = self.script("def f(:\n", "broken")
        failing = self.script("import nothing_here\n", "failing")

        def local(rows: Any) -> None: ...

        for kind, text, function, arguments in [
            (millrace.UsageError, "take a snapshot", f"{script}:double", {"source": "digits:/train"}),
            (millrace.NotFoundError, "snapshot", f"{script}:double", {"source": "digits@no:/train"}),
            (millrace.NotFoundError, "has no nothing; its functions are arrays, double, even, split", f"{script}:nothing", {}),
            (millrace.NotFoundError, "no.py cannot be read: No such file", "no.py:f", {}),
            (millrace.NotFoundError, "no Python module 'nothing_here'", "nothing_here:f", {}),
            (millrace.UsageError, "write SCRIPT.py:FUNCTION", script, {}),
            (millrace.FunctionError, "cannot be loaded: SyntaxError", f"{broken}:f", {}),
            (millrace.FunctionError, "cannot be loaded: ModuleNotFoundError: No module named 'nothing_here'", f"{failing}:f", {}),
            (millrace.UsageError, "at the top of a .py file", local, {}),
            (millrace.UsageError, "at the top of a .py file", lambda rows: rows, {}),
            (millrace.UsageError, "arguments hold something that JSON cannot", f"{script}:double", {"arguments": {"x": {1}}}),
            (millrace.UsageError, "'a b' in arguments", f"{script}:double", {"arguments": {"a b": 1}}),
            (millrace.UsageError, "processes is 0", f"{script}:double", {"processes": 0}),
            (millrace.UsageError, "a snapshot is read-only", f"{script}:double", {"to": "digits@v1:/x"}),
            (millrace.UsageError, "below the root", f"{script}:double", {"to": "digits:/"}),
            (millrace.UsageError, "begin with '.' or '_'", f"{script}:double", {"to": "digits:/_out"}),
            (millrace.NotFoundError, "nowhere", f"{script}:double", {"to": "nowhere:/x"}),
            (millrace.NotFoundError, 'column "x"', f"{script}:double", {"columns": ["x"]}),
        ]:
            with self.assertRaisesRegex(kind, text):
                self.map(function, **arguments)
        self.assertEqual(self.volume._native.keys(f"{Target(self.to, self.home)._prefix}/"), [])
        with self.assertRaises(millrace.NotFoundError):
            self.volume.info(self.path)

    def test_a_folder_that_was_removed_begins_again(self) -> None:
        script = self.script()
        target, feed = Target(self.to, self.home), self.feed()
        identity = {"source": DATASET, "plan": feed.plan, "groups": GROUPS, "columns": None, "format": "arrow",
                    "function": {"name": "f"}}
        old = Job.begin(target, identity, False)
        self.assertTrue(old.groups.finish(0, millrace.map_record.GroupRecord(1, 0, 0, None), None))
        self.assertFalse(old.groups.finish(0, millrace.map_record.GroupRecord(2, 0, 0, None), None))
        self.volume.remove(f"{self.path}/_map.json")
        self.map(f"{script}:double")
        self.check()
        for late in (lambda: old.groups.finish(1, millrace.map_record.GroupRecord(1, 0, 0, None), None),
                     lambda: old.groups.is_done(1), lambda: old.groups.agree_on_schema(1, b""), lambda: old.complete(GROUPS)):
            with self.assertRaisesRegex(millrace.ConflictError, "removed or moved while the job ran, or holds another job"):
                late()
        self.check()

    def test_an_unfinished_folder_that_was_moved_is_refused(self) -> None:
        script = self.script("def f(rows):\n    if rows['id'][0].as_py() >= 800: raise ValueError\n    return rows\n")
        with self.assertRaises(millrace.FunctionError):
            self.map(f"{script}:f", processes=1)
        self.volume._native.rename(self.path, f"{self.path}-moved")
        with self.assertRaisesRegex(millrace.ConflictError, "moved or copied from digits:/out/.* before its job was complete"):
            self.map(f"{script}:f", to=f"{self.to}-moved")


# Kills the process at chosen moments, once at each: the file of the moment says that it has happened.
KILLING = SCRIPT + '''
import os
import random
import signal
import millrace.map_output
import millrace.map_record

FOLDER, SEED = @FOLDER, @SEED

def once(moment):
    if random.Random(f"{SEED} {moment}").random() < 0.25:
        try:
            os.close(os.open(os.path.join(FOLDER, moment), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

def around(owner, name):
    plain = getattr(owner, name)
    def wrapped(self, group, *arguments):
        once(f"before-{name}-{group}")
        done = plain(self, group, *arguments)
        once(f"after-{name}-{group}")
        return done
    setattr(owner, name, wrapped)

around(millrace.map_record.Groups, "agree_on_schema")
around(millrace.map_record.Groups, "finish")

def killed(rows):
    once(f"called-{rows['id'][0]}")
    table = double(rows)
    yield table.slice(0, 10)
    once(f"half-{rows['id'][0]}")
    yield table.slice(10)
'''


class KillTest(MapCase):
    def setUp(self) -> None:
        super().setUp()
        self.moments = tempfile.mkdtemp(prefix="millrace-moments-")
        self.addCleanup(shutil.rmtree, self.moments)

    def driver(self, function: str, processes: int = 2, before: str = "") -> subprocess.Popen[str]:
        """A driver in a process of its own, which prints a line for each group."""
        return python(self.home, f"""
import os, sys, millrace
{before}
done = millrace.map({function!r}, {DATASET!r}, {self.to!r}, processes={processes}, home=os.environ["HOME_DIR"],
                    progress=lambda done, groups: print(done, flush=True))
print("computed", done.computed, flush=True)
""")

    def test_killed_workers_leave_each_output_once(self) -> None:
        kills = 0
        for seed in range(4):
            self.to = f"digits:/out/workers-{seed}"
            self.path = self.to.partition(":")[2]
            folder = tempfile.mkdtemp(dir=self.moments)
            script = self.script(KILLING.replace("@FOLDER", repr(folder)).replace("@SEED", str(seed)), f"killing{seed}")
            while True:
                try:
                    self.map(f"{script}:killed", processes=3)
                    break
                except millrace.FunctionError as error:
                    # Some groups meet more kills than a job takes for chance.
                    self.assertRegex(str(error), r"input group \d \(.*\): 3 worker processes ended at it, the last one by signal 9")
            kills += len(os.listdir(folder))
            self.check()
        self.assertGreater(kills, 12)
        run(self.home, "fsck")

    def test_killed_drivers_leave_each_output_once(self) -> None:
        random_ = random.Random(7)
        script = self.script(SCRIPT + '''
import os
def noted(rows):
    with open(os.path.join(%r, str(os.getpid())), "w"):
        pass
    return double(rows)
''' % self.moments)
        ended = kills = 0
        while not ended:
            driver = self.driver(f"{script}:noted")
            lines = random_.randrange(0, 4)
            told = [driver.stdout.readline() for _ in range(lines)]
            if not (told and told[-1].startswith("computed")):
                driver.send_signal(signal.SIGKILL)
                kills += 1
            out, errors = driver.communicate(timeout=DEADLINE_S)
            ended = driver.returncode == 0
            self.assertIn(driver.returncode, (0, -signal.SIGKILL), errors)
        self.assertGreater(kills, 2)
        self.check()
        for pid in os.listdir(self.moments):
            self.wait_for_end(int(pid))
        run(self.home, "fsck")

    def test_drivers_killed_at_each_step_are_resumed(self) -> None:
        script = self.script()
        for step, moments in {"begin": ("before", "after"), "complete": ("before", "between", "after")}.items():
            for moment in moments:
                self.to = f"digits:/out/step-{step}-{moment}"
                self.path = self.to.partition(":")[2]
                owner, name = ("Target", "forget_others") if moment == "between" else ("Job", step)
                call = "plain(*arguments)" if moment == "after" else "None"
                decorated = "classmethod(stop)" if name == "begin" else "stop"
                driver = self.driver(f"{script}:double", before=f"""
from millrace.map_record import Job, Target
plain = {owner}.{name}{".__func__" if name == "begin" else ""}
def stop(*arguments):
    if {moment == "between"} and arguments[1] is not None:
        return plain(*arguments)
    {call}
    print("here", flush=True)
    sys.stdin.read()
{owner}.{name} = {decorated}
""")
                line = driver.stdout.readline()
                while line and line != "here\n":
                    line = driver.stdout.readline()
                driver.send_signal(signal.SIGKILL)
                errors = driver.communicate(timeout=DEADLINE_S)[1]
                self.assertEqual(line, "here\n", errors)
                done = self.map(f"{script}:double")
                self.assertEqual(done.computed, GROUPS if step == "begin" else 0)
                self.check()

    def test_two_drivers_at_once_share_the_groups(self) -> None:
        script = self.script()
        for round_ in range(3):
            self.to = f"digits:/out/two-{round_}"
            self.path = self.to.partition(":")[2]
            drivers = [self.driver(f"{script}:double", processes=2) for _ in range(2)]
            told = [driver.communicate(timeout=DEADLINE_S) for driver in drivers]
            self.assertEqual([driver.returncode for driver in drivers], [0, 0], told)
            computed = [int(out.split()[-1]) for out, _ in told]
            self.assertEqual(sum(computed), GROUPS)
            self.check()

    def test_another_function_of_a_second_driver_stops_the_first(self) -> None:
        (here, told), (gate, opened) = self.pipe("here"), self.pipe("gate")
        script = self.script(f"""
def f(rows):
    if rows["id"][0].as_py() == 800:
        with open({here!r}, "w") as out:
            out.write("here")
        open({gate!r}).readline()
    return rows.select(["id"])
""")
        first = self.driver(f"{script}:f", processes=1)
        # The worker waits in the last group.
        self.assertEqual(self.receive(told), "here")
        Path(script).write_text("def f(rows):\n    return rows.select(['id'])\n")
        with self.assertRaisesRegex(millrace.ConflictError, "8 of 9 input groups"):
            self.map(f"{script}:f")
        self.assertEqual(self.map(f"{script}:f", allow_changed_function=True).computed, 1)
        os.write(opened, b"go on\n")
        out, errors = first.communicate(timeout=DEADLINE_S)
        # The job was completed beside it, with all groups.
        self.assertEqual((first.returncode, out.split()[-1]), (0, "8"), errors)
        self.check(lambda table: table.select(["id"]))


class CommandTest(MapCase):
    def command(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, "--home", self.home, "--json", "feed", "map", *arguments]
        environment = {**os.environ, "MILLRACE_PYTHON": sys.executable}
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, **options)

    def test_the_command_maps_and_resumes(self) -> None:
        script = self.script(SCRIPT + '''
def scaled(rows, factor, label):
    assert isinstance(factor, int) and label == "a b", (factor, label)
    print("a message of the function")
    return double(rows, factor)
''')
        arguments = [DATASET, f"{script}:scaled", "--to", self.to, "--processes", "2", "--argument", "factor=2",
                     "--argument", "label=a b"]
        done = self.command(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual((found["groups"], found["computed"], found["rows"]), (GROUPS, GROUPS, ROWS))
        self.assertIn("a message of the function", done.stderr)
        self.check()
        self.assertEqual(json.loads(self.command(*arguments).stdout)["computed"], 0)
        other = self.command(*arguments[:-1], "label=b")
        self.assertEqual((other.returncode, other.stdout), (4, ""))
        self.assertIn("its arguments changed", other.stderr)
        chosen = self.command(DATASET, f"{script}:split", "--to", f"{self.to}-chosen", "--where", "label < 7", "--splits",
                              "z=0.5,a=0.5", "--split", "a", "--split-by", "id", "--columns", "id")
        selected = self.feed(where="label < 7", splits={"z": 0.5, "a": 0.5}, split="a", split_by="id")
        self.assertEqual(json.loads(chosen.stdout)["rows"], selected.rows)

    def test_errors_have_the_exit_codes_of_the_program(self) -> None:
        script = self.script(SCRIPT + "\ndef failing(rows):\n    raise ValueError('wrong')\n")
        plain = Path(self.scripts, "python-without-packages")
        plain.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        plain.chmod(0o755)
        cases: list[tuple[int, str, list[str]]] = [
            (1, r"map .*: input group \d \(/train/\d.parquet, row group \d\): ValueError: wrong\n$", [f"{script}:failing"]),
            (2, "take a snapshot", [f"{script}:double", "digits:/train"]),
            (3, "has no nothing", [f"{script}:nothing"]),
            (5, "no-python cannot be started: No such file .*--python or MILLRACE_PYTHON", ["x:f", "--python", "no-python"]),
            (5, "has no package millrace and pyarrow; install it there", ["x:f", "--python", str(plain)]),
            (5, "false ended with exit status: 1", ["x:f", "--python", "false"]),
            (5, "true runs no Python code; name another", ["x:f", "--python", "true"]),
        ]
        for code, text, (function, *others) in cases:
            source = [others.pop(0)] if others and others[0].startswith("digits") else [DATASET]
            done = self.command(*source, function, "--to", self.to, *others)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertRegex(done.stderr, text)
            self.assertNotIn("KeyboardInterrupt", done.stderr)
            self.assertEqual(done.stdout, "")
        self.assertRegex(self.command(DATASET, f"{script}:failing", "--to", self.to).stderr,
                         r"line \d+, in failing\n")

    def test_a_stop_after_the_error_prints_nothing(self) -> None:
        # The command stops the driver as soon as it has read the error.
        request = {"function": "x", "source": DATASET, "to": self.to, "splits": [], "home": self.home}
        driver = subprocess.Popen([sys.executable, "-m", "millrace", "map"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        assert driver.stdin and driver.stdout and driver.stderr
        with driver.stdin, driver.stdout, driver.stderr:
            print(json.dumps(request), file=driver.stdin, flush=True)
            self.assertIn("write SCRIPT.py:FUNCTION", json.loads(driver.stdout.readline())["error"])
            driver.stdin.close()
            driver.send_signal(signal.SIGTERM)
            self.assertEqual((driver.stderr.read(), driver.wait(DEADLINE_S)), ("", 1))

    def test_signals_leave_a_job_that_goes_on(self) -> None:
        gate, told = self.pipe("gate")
        for number, name in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
            self.to = f"digits:/out/signal-{number}"
            self.path = self.to.partition(":")[2]
            script = self.script(f"""
import os
def waiting(rows):
    if rows["id"][0].as_py() >= 400 and not os.path.exists({gate + str(number)!r}):
        with open({gate!r}, "w") as out:
            print(os.getpid(), os.getppid(), file=out, flush=True)
            import signal
            signal.pause()
    return rows.select(["id"])
""", f"waiting{number}")
            command = [PROGRAM, "--home", self.home, "feed", "map", DATASET, f"{script}:waiting", "--to", self.to,
                       "--processes", "1", "--python", sys.executable]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            pids = [int(pid) for pid in self.receive(told).split()]
            process.send_signal(name)
            errors = process.communicate(timeout=DEADLINE_S)[1]
            for pid in pids:
                self.wait_for_end(pid)
            if name == signal.SIGKILL:
                self.assertEqual(process.returncode, -signal.SIGKILL)
            else:
                self.assertEqual(process.returncode, 1, errors)
                self.assertIn("feed map was interrupted; run it again to continue", errors)
            done = set(self.output())
            self.assertEqual(done, set(range(4)))
            Path(gate + str(number)).touch()
            found = self.command(DATASET, f"{script}:waiting", "--to", self.to)
            self.assertEqual(json.loads(found.stdout)["computed"], GROUPS - len(done))
            self.check(lambda table: table.select(["id"]))


if __name__ == "__main__":
    unittest.main()
