"""Map jobs with functions, environments and modules that do what they should not."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

import millrace
from millrace import map_output, map_worker, mapping
from support import DATASET, DEADLINE_S, PROGRAM, require
from test_map import GROUPS, MapCase


class FunctionFileTest(MapCase):
    def test_a_decorated_function_is_that_of_its_own_file(self) -> None:
        Path(self.scripts, "mapped_decorator.py").write_text(
            "import functools\n\ndef decorated(f):\n    @functools.wraps(f)\n    def g(*a, **k):\n        return f(*a, **k)\n    return g\n"
        )
        file = Path(self.scripts, "mapped_decorated.py")
        code = "from mapped_decorator import decorated\n\n@decorated\ndef f(rows):\n    return rows.select(['id'])\n"
        file.write_text(code)
        with mock.patch.object(sys, "path", [self.scripts, *sys.path]):
            import mapped_decorated

            self.map(mapped_decorated.f)
            self.check(lambda table: table.select(["id"]))
            file.write_text(code.replace("['id']", "['label']"))
            with self.assertRaisesRegex(millrace.ConflictError, "9 of 9 .* by another function: its file changed"):
                self.map(mapped_decorated.f)

    def test_a_script_that_maps_when_it_is_loaded_is_refused(self) -> None:
        script = self.script(f"""
import os
import millrace

def f(rows):
    return rows.select(["id"])

guarded = "GUARDED" in os.environ
if not guarded or __name__ == "__main__":
    millrace.map(f, {DATASET!r}, {self.to!r}, home=os.environ["HOME_DIR"], processes=1)
""")
        environment = {**os.environ, "HOME_DIR": self.home}
        command = [sys.executable, script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, 'UsageError: map <function f at .*put the call under if __name__ == "__main__":\n$')
        with self.assertRaises(millrace.NotFoundError):
            self.volume.info(self.path)
        environment["GUARDED"] = "1"
        subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S)
        self.check(lambda table: table.select(["id"]))

    def test_another_module_of_the_same_name_is_refused(self) -> None:
        code = "import sys\nsys.path.insert(0, %r)\n\ndef f(rows):\n    return rows\n"
        other = Path(self.scripts, "other")
        other.mkdir(exist_ok=True)
        Path(other, "mapped_twice.py").write_text("def f(rows):\n    raise ValueError\n")
        package = Path(self.scripts, "mapped_package")
        package.mkdir(exist_ok=True)
        Path(package, "__init__.py").write_text(f"__path__.insert(0, {str(other)!r})\n")
        Path(package, "mapped_twice.py").write_text(code % str(other))
        with mock.patch.object(sys, "path", [self.scripts, *sys.path]):
            import importlib.util

            spec = importlib.util.spec_from_file_location("mapped_package.mapped_twice", package / "mapped_twice.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            with self.assertRaisesRegex(millrace.ConflictError, "imports .*/other/mapped_twice.py by this name; rename"):
                self.map(module.f)
        with self.assertRaises(millrace.NotFoundError):
            self.volume.info(self.path)

    def test_a_package_that_fails_is_named(self) -> None:
        package = Path(self.scripts, "mapped_failing")
        package.mkdir(exist_ok=True)
        Path(package, "__init__.py").write_text("raise RuntimeError('no')\n")
        with mock.patch.object(sys, "path", [self.scripts, *sys.path]):
            with self.assertRaisesRegex(millrace.NotFoundError, "'mapped_failing.x' cannot be found: RuntimeError: no"):
                self.map("mapped_failing.x:f")


class ReturnedTest(MapCase):
    def test_a_text_is_no_column(self) -> None:
        script = self.script('''
def rows_as_dictionaries(rows):
    return [{"text": "hello"}, {"text": "you"}]

def data(rows):
    return {"data": b"hello"}

def keys(rows):
    return {"keys": {"a": 1}}
''')
        for name, kind in [("rows_as_dictionaries", "str"), ("data", "bytes"), ("keys", "dict")]:
            self.to = f"digits:/out/column-{name}"
            with self.assertRaisesRegex(millrace.UsageError, rf"input group 0 .*column '\w+' as one {kind}; .*a value for each row"):
                self.map(f"{script}:{name}", processes=1)

    def test_a_table_for_each_row_takes_no_more_memory(self) -> None:
        script = self.script("""
import resource
import pyarrow

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def small(rows):
    if rows["id"][0].as_py() != 0:
        return
    first = peak()
    for row in range(20_000):
        kind = pyarrow.array([f"kind {row % 300}"]).dictionary_encode()
        yield pyarrow.table({"row": [row], "kind": kind, "peak": [peak() - first]})
""")
        done = self.map(f"{script}:small", processes=1)
        self.assertEqual((done.files, done.rows), (1, 20_000))
        found = self.output()[0]
        self.assertEqual(found["row"].to_pylist(), list(range(20_000)))
        self.assertEqual(found["kind"].to_pylist(), [f"kind {row % 300}" for row in range(20_000)])
        self.assertLess(found["peak"][-1].as_py(), 48 << 10, "KiB beyond the first table")

    def test_a_named_index_of_a_data_frame_is_a_column(self) -> None:
        require("pandas")
        import pandas

        frame = pandas.DataFrame({"user": ["a", "b", "a"], "x": [1, 2, 3]})
        for returned, expected in [
            (frame, {"user": ["a", "b", "a"], "x": [1, 2, 3]}),
            (frame[frame.x > 1], {"user": ["b", "a"], "x": [2, 3]}),
            (frame.groupby("user").sum(), {"user": ["a", "b"], "x": [4, 2]}),
            (frame.set_index(["user", "x"]), {"user": ["a", "b", "a"], "x": [1, 2, 3]}),
            (frame.set_index("user", drop=False), {"user": ["a", "b", "a"], "x": [1, 2, 3]}),
        ]:
            self.assertEqual([table.to_pydict() for table in map_output.tables(returned)], [expected])
        with self.assertRaisesRegex(millrace.UsageError, "returned pandas.*Series; return a"):
            list(map_output.tables(frame.x))

    def test_texts_of_exceptions_are_bounded(self) -> None:
        script = self.script('''
def long(rows):
    raise ValueError("x" * 10_000_000 + "end")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def mute(rows):
    raise Mute
''')
        with self.assertRaisesRegex(millrace.FunctionError, r"ValueError: xx.* \[\d+ characters left out\] xx.*end") as caught:
            self.map(f"{script}:long", processes=1)
        self.assertLess(len(str(caught.exception)), 110_000)
        self.assertIn("in long", caught.exception.traceback)
        with self.assertRaisesRegex(millrace.FunctionError, r"input group \d .*Mute: its text cannot be had \(RuntimeError\)"):
            self.map(f"{script}:mute", processes=1)


class EnvironmentTest(MapCase):
    def test_ranks_of_the_environment_are_not_asked_for(self) -> None:
        for number, ranks in enumerate(({"RANK": "5", "WORLD_SIZE": "2"}, {"PMIX_RANK": "1"})):
            self.to = f"digits:/out/ranks-{number}"
            self.path = self.to.partition(":")[2]
            with mock.patch.dict(os.environ, ranks):
                self.map(f"{self.script()}:double")
            self.check()

    def test_a_format_in_front_of_the_snapshot(self) -> None:
        self.map(f"{self.script()}:double", f"parquet:{DATASET}")
        self.check()
        with self.assertRaisesRegex(millrace.UsageError, "take a snapshot"):
            self.map(f"{self.script()}:double", "parquet:digits:/train", to=f"{self.to}-live")

    def test_a_worker_that_cannot_be_started_is_an_error(self) -> None:
        with mock.patch.object(sys, "executable", os.path.join(self.scripts, "no-python")):
            with self.assertRaisesRegex(millrace.UnavailableError, "a worker process cannot be started: .*no-python: No such file"):
                self.map(f"{self.script()}:double")

    def test_a_request_that_is_not_yet_taken_ends_with_the_driver(self) -> None:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        ended = mock.Mock(side_effect=SystemExit)
        with mock.patch.multiple(os, killpg=ended, _exit=ended), self.assertRaises(SystemExit):
            map_worker._read(["{}\n"], lines, threading.Event())
        self.assertEqual((lines.get(), lines.get()), ("{}\n", None))

    def test_workers_that_let_no_thread_run_end_with_the_driver(self) -> None:
        path, told = self.pipe("told")
        script = self.script(f"""
import os
import re
import subprocess

def stuck(rows):
    if rows["id"][0].as_py() == 0:
        return rows
    child = subprocess.Popen(["sleep", "1000"])
    with open({path!r}, "a") as out:
        print(os.getpid(), child.pid, file=out, flush=True)
    # Native code that holds the lock of the interpreter.
    re.match("(a|aa)+$", "a" * 100 + "b")
""")
        pids: list[int] = []

        def interrupted(done: int, groups: int) -> None:
            if done:
                pids.extend(int(pid) for _ in range(2) for pid in self.receive(told).split())
                raise KeyboardInterrupt

        with mock.patch.object(mapping, "_PATIENCE_S", 0.5), self.assertRaises(KeyboardInterrupt):
            self.map(f"{script}:stuck", processes=2, progress=interrupted)
        self.assertEqual(len(set(pids)), 4)
        for pid in pids:
            self.wait_for_end(pid)
        self.assertEqual(set(self.output()), {0})


class CommandTest(MapCase):
    def command(
        self, function: str, *others: str, home: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, "--home", home or self.home, "--json", "feed", "map", DATASET, function, "--to", self.to, *others]
        environment = {**os.environ, "MILLRACE_PYTHON": sys.executable, **environment}
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)

    def test_what_packages_print_is_no_event(self) -> None:
        package = Path(self.scripts, "mapped_loud")
        package.mkdir(exist_ok=True)
        Path(package, "__init__.py").write_text("print('loud')\n")
        Path(package, "inner.py").write_text("def f(rows):\n    return rows.select(['id'])\n")
        path = os.pathsep.join(filter(None, [self.scripts, os.environ.get("PYTHONPATH")]))
        done = self.command("mapped_loud.inner:f", PYTHONPATH=path)
        self.assertEqual((done.returncode, json.loads(done.stdout)["computed"]), (0, GROUPS), done.stderr)
        self.assertIn("loud", done.stderr)

    def test_a_name_that_is_given_twice_is_refused(self) -> None:
        for option, values in (("--argument", ["factor=1", "factor=2"]), ("--splits", ["a=0.5", "a=0.3"])):
            done = self.command(f"{self.script()}:double", option, values[0], option, values[1])
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f'{option} has "{values[0].partition("=")[0]}" twice; give it once', done.stderr)

    def test_a_home_whose_name_is_no_text(self) -> None:
        home = os.path.join(self.scripts, os.fsdecode(b"home-\xff"))
        os.symlink(self.home, home)
        done = self.command(f"{self.script()}:double", home=home)
        self.assertEqual((done.returncode, json.loads(done.stdout)["computed"]), (0, GROUPS), done.stderr)
        self.check()

    def test_what_python_prints_at_its_start_is_no_event(self) -> None:
        Path(self.scripts, "sitecustomize.py").write_text("print('loud')\n")
        self.addCleanup(Path(self.scripts, "sitecustomize.py").unlink)
        path = os.pathsep.join(filter(None, [self.scripts, os.environ.get("PYTHONPATH")]))
        done = self.command(f"{self.script()}:double", PYTHONPATH=path)
        self.assertEqual((done.returncode, json.loads(done.stdout)["computed"]), (0, GROUPS), done.stderr)
        self.assertIn("loud", done.stderr)

    def test_errors_that_are_no_text_of_unicode_reach_the_user(self) -> None:
        done = self.command(f"{self.script('def f(rows): raise ValueError(chr(0xdcff) + chr(228))')}:f")
        self.assertEqual(done.returncode, 1)
        self.assertIn("ValueError: ?\u00e4", done.stderr)

    def test_a_function_that_kills_the_driver_leaves_no_worker(self) -> None:
        path, told = self.pipe("told")
        script = self.script(f"""
import os
import signal
import subprocess
import time

def f(rows):
    child = subprocess.Popen(["sleep", "1000"])
    with open({path!r}, "w") as out:
        print(os.getpid(), child.pid, file=out, flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
""")
        done = self.command(f"{script}:f")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, "ended with signal: 9 .*before the job was complete")
        for pid in self.receive(told).split():
            self.wait_for_end(int(pid))


if __name__ == "__main__":
    unittest.main()
