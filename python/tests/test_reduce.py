"""Map jobs with a reduce function: each key once, through kills, and against a plain group-by."""

from __future__ import annotations

import collections
import datetime
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from millrace import map_sort
from millrace.map_keys import Keys
from millrace.map_record import Target
from millrace.map_sort import Sorter
from support import DATASET, DEADLINE_S, PROGRAM, ROWS, python, run
from test_map import GROUPS, MapCase

PARTS = 4
SCRIPT = '''
import pyarrow

def words(rows):
    ids = [i for i in rows["id"].to_pylist() for _ in range(i % 3)]
    return pyarrow.table({"word": [f"word {i * i % 37}" for i in ids], "id": ids})

def count(word, batches):
    ids = [i for batch in batches for i in batch["id"].to_pylist()]
    assert ids == sorted(ids), "the order of the input"
    return {"word": word, "count": len(ids), "ids": sum(ids)}
'''


def expected() -> dict[str, tuple[int, int]]:
    """The output of `count` for the dataset."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for i in range(ROWS):
        for _ in range(i % 3):
            found[f"word {i * i % 37}"].append(i)
    return {word: (len(ids), sum(ids)) for word, ids in found.items()}


class ReduceCase(MapCase):
    def reduce(self, script: str, **arguments: Any) -> millrace.Mapped:
        return self.map(f"{script}:words", **{"key": "word", "reduce": f"{script}:count", "parts": PARTS, **arguments})

    def table(self) -> pyarrow.Table:
        """All rows of the output, by part."""
        return pyarrow.concat_tables(table for _, table in sorted(self.output().items()))

    def siblings(self) -> list[str]:
        """The folders of unfinished runs."""
        parent, _, name = self.path.rpartition("/")
        try:
            return [e.path for e in self.volume.list(parent) if e.path.startswith(f"{parent}/_{name}.reduce-")]
        except millrace.NotFoundError:
            return []

    def check_counts(self) -> None:
        """Each key is there once, and no record or file of the run is left."""
        rows = self.table().to_pylist()
        self.assertEqual({row["word"]: (row["count"], row["ids"]) for row in rows}, expected())
        self.assertEqual(len(rows), len(expected()))
        target = Target(self.to, self.home)
        self.assertEqual(self.volume._native.keys(f"{target._prefix}/"), [])
        self.assertEqual(self.siblings(), [])
        self.assertIsNotNone(target.manifest()["completed"])


class ReduceTest(ReduceCase):
    def test_words_are_counted(self) -> None:
        script = self.script(SCRIPT)
        seen: list[tuple[int, int]] = []
        done = self.reduce(script, progress=lambda done, total: seen.append((done, total)))
        self.assertEqual((done.groups, done.computed, done.parts, done.reduced), (GROUPS, GROUPS, PARTS, PARTS))
        self.assertEqual((done.rows_read, done.rows, done.keys), (ROWS, len(expected()), len(expected())))
        self.assertEqual((seen[0], seen[-1]), ((0, GROUPS + PARTS), (GROUPS + PARTS, GROUPS + PARTS)))
        self.check_counts()
        # A complete job is not run again, also without the number of parts.
        again = self.reduce(script, parts=None)
        self.assertEqual((again.computed, again.reduced, again.keys, again.bytes), (0, 0, done.keys, done.bytes))
        self.volume.snapshot("reduced")
        feed = millrace.Feed(f"digits@reduced:{self.path}", columns=["count"], home=self.home)
        self.assertEqual(feed.rows, len(expected()))
        for text, arguments in [
            ("key was .* and is", {"key": "id"}),
            ("parts was 4 and is 5", {"parts": 5}),
            ("by another reduce function: its arguments changed", {"reduce_arguments": {"x": 1}}),
        ]:
            with self.assertRaisesRegex(millrace.ConflictError, text):
                self.reduce(script, **arguments)
        with self.assertRaisesRegex(millrace.ConflictError, "key was .* and is null.*reduce was"):
            self.map(f"{script}:words")

    def test_keys_of_all_kinds_are_one_each(self) -> None:
        script = self.script('''
import datetime
import pyarrow

NAN = float("nan")
VALUES = {
    "floats": [1.5, NAN, None, -0.0, 0.0, -NAN, float("-inf"), -2.5, 1.5, None],
    "texts": ["b", "", None, "\\u00e4", "a", "b", "\\U0001f600", "\\uffff", "", None],
    "bytes": [b"b", b"", None, b"\\xff", b"a", b"b", b"\\x00", b"\\x00\\x00", b"", None],
    "ints": [3, -1, None, 1 << 62, -(1 << 63), 3, 0, 1, -1, None],
    "truths": [True, False, None, True, False, True, True, True, False, None],
    "days": [datetime.date(2024, 2, d) if d else None for d in (3, 1, 0, 29, 28, 3, 2, 7, 1, 0)],
}

def one(rows, kind):
    if rows["id"][0].as_py() >= 300:
        return None
    values = pyarrow.array(VALUES[kind])
    if kind == "texts":
        values = values.dictionary_encode()
    return pyarrow.table({"key": values, "row": list(range(10))})

def keys(key, batches):
    rows = [row for batch in batches for row in batch["row"].to_pylist()]
    return pyarrow.table({"key": [repr(key)], "rows": [rows]})
''')
        code: dict[str, Any] = {}
        exec(Path(script).read_text(), code)
        for kind, values in code["VALUES"].items():
            self.to = f"digits:/out/kind-{kind}"
            self.path = self.to.partition(":")[2]
            done = self.map(f"{script}:one", key="key", reduce="keys", parts=3, arguments={"kind": kind})
            groups: dict[str, list[int]] = collections.defaultdict(list)
            for row, value in enumerate(values):
                groups[repr(value + 0.0) if isinstance(value, float) else repr(value)].append(row)
            found = {row["key"]: row["rows"] for row in self.table().to_pylist()}
            self.assertEqual(found, {key: rows * 4 for key, rows in groups.items()}, kind)
            self.assertEqual(done.keys, len(groups))

    def test_several_key_columns_are_a_tuple(self) -> None:
        script = self.script('''
def rows(rows):
    return {"a": rows["id"].to_numpy() % 3, "b": [str(i % 2) for i in rows["id"].to_pylist()], "n": [1] * rows.num_rows}

def count(key, batches):
    a, b = key
    return {"a": a, "b": b, "n": sum(batch.num_rows for batch in batches)}
''')
        self.map(f"{script}:rows", key=["a", "b"], reduce="count")
        found = {(row["a"], row["b"]): row["n"] for row in self.table().to_pylist()}
        plain = collections.Counter((i % 3, str(i % 2)) for i in range(ROWS))
        self.assertEqual(found, plain)

    def test_empty_outputs(self) -> None:
        script = self.script('''
def nothing(rows):
    return None

def rows(rows):
    return {"key": rows["id"].to_numpy() % 5}

def count(key, batches):
    return {"key": key}

def none(key, batches):
    return None
''')
        done = self.map(f"{script}:nothing", key="key", reduce="count")
        self.assertEqual((done.rows, done.keys, done.files, done.reduced), (0, 0, 0, 16))
        self.to += "-none"
        # A function may leave rows unread.
        done = self.map(f"{script}:rows", key="key", reduce="none")
        self.assertEqual((done.rows, done.keys, done.files), (0, 5, 0))
        self.to += "-less"
        self.path = self.to.partition(":")[2]
        # An empty folder may be there.
        self.volume._native.make_dirs(self.path)
        done = self.map(f"{script}:rows", key="key", reduce="count", parts=64)
        self.assertEqual(sorted(self.table()["key"].to_pylist()), list(range(5)))
        self.assertLessEqual(done.files, 5)

    def test_one_key_with_most_rows_takes_no_more_memory(self) -> None:
        script = self.script('''
import resource
import numpy
import pyarrow

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def skewed(rows):
    first = rows["id"][0].as_py()
    if first > 200:
        return
    for part in range(16):
        key = numpy.full(1 << 18, 7)
        key[:100] = numpy.arange(100)
        yield pyarrow.table({"key": key, "data": numpy.random.default_rng(part).integers(0, 1 << 62, (1 << 18))})

def count(key, batches):
    rows = 0
    for batch in batches:
        rows += batch.num_rows
    return {"key": key, "rows": rows, "peak": peak()}
''')
        with mock.patch.dict(os.environ, {"TMPDIR": self.scripts}):
            self.map(f"{script}:skewed", key="key", reduce="count", parts=2, processes=1)
        rows = {row["key"]: row for row in self.table().to_pylist()}
        groups = sum(1 for table in self.groups() if table["id"][0].as_py() <= 200)
        self.assertEqual(rows[7]["rows"], groups * 16 * ((1 << 18) - 99))
        self.assertEqual(rows[8]["rows"], groups * 16)
        # One part has 192 MiB, which are sorted, and the worker has mapped as much before.
        self.assertEqual(groups, 3)
        self.assertLess(rows[7]["peak"], 384 << 10, "KiB of the whole worker process")
        self.assertEqual([name for name in os.listdir(self.scripts) if name.startswith("millrace-sort")], [])

    def test_errors_name_part_key_and_function(self) -> None:
        script = self.script('''
import pyarrow
from millrace.errors import Error

def rows(rows):
    return {"key": rows["id"].to_numpy() % 7, "at": pyarrow.array([1] * rows.num_rows, pyarrow.timestamp("ns"))}

def fails(key, batches):
    if key == 4:
        raise ValueError("no four")
    return {"key": key}

def text(key, batches):
    return "text"

def mixed(key, batches):
    return {"key": key, "list": [1, 2]}

def schema(key, batches):
    return {"key": key if key < 3 else str(key)}

def dies(key, batches):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
''')
        for kind, name, text in [
            (millrace.FunctionError, "fails", r"^reduce .*\.py:fails: part \d of 2, key 4: ValueError: no four"),
            (millrace.UsageError, "text", r"^reduce .*\.py:text: part \d of 2, key \d: the function returned builtins.str"),
            (millrace.UsageError, "mixed", r"key \d: .*returned one value for 'key' and several for 'list'"),
            (millrace.ConflictError, "schema", r"^reduce .*\.py:schema: part \d of 2, key \d: .*column 'key' is \w+ and was \w+"),
            (millrace.FunctionError, "dies", r"^reduce .*:dies: part \d of 2: 3 worker processes ended at it, .*by signal 9"),
        ]:
            self.to = f"digits:/out/failing-{name}"
            self.path = self.to.partition(":")[2]
            with self.assertRaisesRegex(kind, text):
                self.map(f"{script}:rows", key="key", reduce=name, parts=2, processes=1)
            # Nothing is visible, and the input groups need not be computed again.
            with self.assertRaises(millrace.NotFoundError):
                self.volume.info(self.path)
            Path(script).write_text(Path(script).read_text() + f"\ndef {name}(key, batches):\n    return {{'key': key}}\n")
            with self.assertRaisesRegex(millrace.ConflictError, "9 of 9 input groups are done by another function"):
                self.map(f"{script}:rows", key="key", reduce=name, parts=2)
            done = self.map(f"{script}:rows", key="key", reduce=name, parts=2, allow_changed_function=True)
            self.assertEqual(done.computed, 0)
        self.to = "digits:/out/failing-key"
        for text, arguments in [
            ("input group 0 .*no key column 'nothing'; its columns are key, at", {"key": "nothing"}),
            (r"key column 'at' is timestamp\[ns\]; a key is an integer", {"key": "at"}),
        ]:
            with self.assertRaisesRegex(millrace.UsageError, text):
                self.map(f"{script}:rows", reduce="fails", processes=1, **arguments)
            for path in [sibling for sibling in self.volume.list("/out") if ".reduce-" in sibling.path]:
                millrace.map_record._remove_folder(self.volume, path.path)

    def test_wrong_arguments_leave_no_trace(self) -> None:
        script = self.script(SCRIPT)
        for text, arguments in [
            ("key is for jobs with a reduce function", {"reduce": None, "parts": None}),
            ("parts is for jobs with a reduce function", {"reduce": None, "key": None}),
            ("needs a key", {"key": None}),
            ("name 1 to 16 columns", {"key": []}),
            ("named twice", {"key": ["word", "word"]}),
            ("parts is 0", {"parts": 0}),
            ("4097 parts; at most 4096", {"parts": 4_097}),
            ("has no nothing", {"reduce": "nothing"}),
        ]:
            with self.assertRaisesRegex(millrace.Error, text):
                self.reduce(script, **arguments)
        self.assertEqual(self.volume._native.keys(f"{Target(self.to, self.home)._prefix}/"), [])
        with self.assertRaisesRegex(millrace.ConflictError, "the folder holds files"):
            self.reduce(script, to="digits:/train")

    def test_a_folder_that_was_filled_meanwhile_is_kept(self) -> None:
        script = self.script(SCRIPT)
        plain = Target.install

        def fill(target: Target, manifest: dict[str, Any]) -> None:
            with self.volume.open(f"{self.path}/mine", "w") as file:
                file.write("x")
            plain(target, manifest)

        with mock.patch.object(Target, "install", fill):
            with self.assertRaisesRegex(millrace.ConflictError, "something else that came while the job ran; its output is in"):
                self.reduce(script)
        self.volume.remove(f"{self.path}/mine")
        done = self.reduce(script)
        self.assertEqual((done.computed, done.reduced), (0, 0))
        self.check_counts()

    def test_a_run_whose_folder_was_removed_begins_again(self) -> None:
        script = self.script(SCRIPT + "\ndef failing(word, batches):\n    raise ValueError\n")
        with self.assertRaises(millrace.FunctionError):
            self.reduce(script, reduce="failing")
        (folder,) = self.siblings()
        millrace.map_record._remove_folder(self.volume, folder)
        self.assertEqual(self.reduce(script).computed, GROUPS)
        self.check_counts()


class SortTest(unittest.TestCase):
    def test_the_sort_is_that_of_python(self) -> None:
        for seed in range(40):
            random_ = random.Random(seed)
            values: list[tuple[Any, list[Any]]] = random_.choice([
                [(pyarrow.int8(), [0, 1, 5, -3, None]), (pyarrow.binary(), [b"", b"a", b"ab", None])],
                [(pyarrow.float32(), [float("nan"), -0.0, 0.0, 1.5, -2.0, float("inf"), None])],
                [(pyarrow.large_string(), ["", "a", "\uffff", "\U0001f600", None]), (pyarrow.bool_(), [True, False])],
                [(pyarrow.uint64(), [*range(50), (1 << 64) - 1])],
            ])
            rows = random_.randrange(1, 400)
            columns = {
                str(n): pyarrow.array([random_.choice(kind) for _ in range(rows)], type_)
                for n, (type_, kind) in enumerate(values)
            }
            table = pyarrow.table({**columns, "row": list(range(rows))})
            names = [str(n) for n in range(len(values))]
            keys = Keys(names, table.schema)
            sorter = Sorter(keys, memory_bytes=random_.choice([1, 200, 1 << 20]), batch_bytes=random_.choice([1, 100, 1 << 20]),
                            fan_in=random_.randrange(2, 5))
            first = 0
            while first < rows:
                size = random_.randrange(1, 40)
                for batch in table.slice(first, size).combine_chunks().to_batches():
                    sorter.add(batch)
                first += size
            found = [row for batch in sorter.sorted() for row in batch.to_pylist()]
            sorter.close()
            plain = sorted(table.to_pylist(), key=lambda row: [order(row[name]) for name in names])
            self.assertEqual(str(found), str(plain), seed)

    def test_parts_of_keys_never_change(self) -> None:
        """Files on disk depend on them."""
        table = pyarrow.record_batch({
            "i": pyarrow.array([0, -1, 1 << 40, None], pyarrow.int64()),
            "f": [0.0, -0.0, math.nan, None],
            "s": ["", "a", "millrace", None],
        })
        found = [Keys(names, table.schema).parts(table, 1000).tolist() for names in (["i"], ["f"], ["s"], ["i", "s"])]
        self.assertEqual(found, PINNED)
        self.assertEqual(found[1][0], found[1][1])
        small = pyarrow.record_batch({"i": pyarrow.array([0, -1], pyarrow.int8())})
        self.assertEqual(Keys(["i"], small.schema).parts(small, 1000).tolist(), found[0][:2])

    def test_parts_have_like_sizes(self) -> None:
        for column in (numpy.arange(10_000), [f"user {i}" for i in range(10_000)], numpy.arange(10_000) / 8):
            batch = pyarrow.record_batch({"key": column})
            sizes = numpy.bincount(Keys(["key"], batch.schema).parts(batch, 16), minlength=16)
            self.assertLess(sizes.max() / sizes.min(), 1.35)

    def test_a_full_disk_is_named(self) -> None:
        batch = pyarrow.record_batch({"key": list(range(1000))})
        sorter = Sorter(Keys(["key"], batch.schema), memory_bytes=1)
        with mock.patch.object(map_sort.os, "pwrite", side_effect=OSError(28, "No space left on device")):
            with self.assertRaisesRegex(millrace.errors.NoSpaceError, "temporary file in .*: No space left.*set TMPDIR"):
                sorter.add(batch)
        sorter.close()


# Of the columns i, f, s, and of i and s.
PINNED = [[55, 767, 996, 534], [55, 55, 422, 534], [792, 423, 497, 534], [290, 546, 370, 658]]


def order(value: Any) -> tuple[Any, ...]:
    """The order of keys: null is the last, NaN the one before."""
    if value is None:
        return (2,)
    if isinstance(value, float) and math.isnan(value):
        return (1,)
    return (0, value.encode() if isinstance(value, str) else value)


# Kills the process at chosen moments, once at each: the file of the moment says that it has happened.
KILLING = SCRIPT + '''
import os
import random
import signal
import millrace.map_record
import millrace.map_sort

FOLDER, SEED = @FOLDER, @SEED

def once(moment):
    if random.Random(f"{SEED} {moment}").random() < (0.03 if "ed-" in moment else 0.2):
        try:
            os.close(os.open(os.path.join(FOLDER, moment), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

def around(owner, name):
    plain = getattr(owner, name)
    def wrapped(self, group, *arguments):
        once(f"before-{name}-{self.noun}-{group}")
        done = plain(self, group, *arguments)
        once(f"after-{name}-{self.noun}-{group}")
        return done
    setattr(owner, name, wrapped)

around(millrace.map_record.Groups, "agree_on_schema")
around(millrace.map_record.Groups, "finish")
# Parts of a few hundred rows are sorted in files.
millrace.map_sort.Sorter.__init__.__kwdefaults__["memory_bytes"] = 1_000

def killed(word, batches):
    once(f"called-{word}")
    yield count(word, batches)
    once(f"counted-{word}")
'''


class KillTest(ReduceCase):
    def setUp(self) -> None:
        super().setUp()
        self.moments = tempfile.mkdtemp(prefix="millrace-moments-")
        self.addCleanup(shutil.rmtree, self.moments)

    def driver(self, script: str, before: str = "") -> subprocess.Popen[str]:
        """A driver in a process of its own, which prints a line for each group and part."""
        return python(self.home, f"""
import os, sys, millrace
{before}
done = millrace.map({script + ':words'!r}, {DATASET!r}, {self.to!r}, processes=2, home=os.environ["HOME_DIR"],
                    key="word", reduce="count", parts={PARTS}, progress=lambda done, total: print(done, flush=True))
print("computed", done.computed, done.reduced, flush=True)
""")

    def test_killed_workers_leave_each_key_once(self) -> None:
        kills = 0
        for seed in range(2):
            self.to = f"digits:/out/workers-{seed}"
            self.path = self.to.partition(":")[2]
            folder = tempfile.mkdtemp(dir=self.moments)
            script = self.script(KILLING.replace("@FOLDER", repr(folder)).replace("@SEED", str(seed)), f"killing{seed}")
            while True:
                try:
                    self.reduce(script, reduce="killed", processes=3)
                    break
                except millrace.FunctionError as error:
                    self.assertRegex(str(error), "3 worker processes ended at it, the last one by signal 9")
            kills += len(os.listdir(folder))
            self.check_counts()
        self.assertGreater(kills, 8)
        run(self.home, "fsck")

    def test_drivers_killed_at_each_step_are_resumed(self) -> None:
        script = self.script(SCRIPT)
        # What is after one step is before the next one.
        for owner, name, moment in [
            ("Job", "complete", "before"),
            ("Target", "install", "before"),
            ("map_record", "_remove_folder", "before"),
            ("Target", "forget_others", "before"),
            ("Target", "forget_others", "after"),
        ]:
            self.to = f"digits:/out/step{name.replace('_', '-')}-{moment}"
            self.path = self.to.partition(":")[2]
            driver = self.driver(script, f"""
from millrace import map_record
from millrace.map_record import Job, Target
plain = {owner}.{name}
def stop(*arguments):
    if {name == "forget_others"} and arguments[1] is not None:
        return plain(*arguments)
    {"plain(*arguments)" if moment == "after" else "None"}
    print("here", flush=True)
    sys.stdin.read()
{owner}.{name} = stop
""")
            line = driver.stdout.readline()
            while line and line != "here\n":
                line = driver.stdout.readline()
            driver.send_signal(signal.SIGKILL)
            errors = driver.communicate(timeout=DEADLINE_S)[1]
            self.assertEqual(line, "here\n", errors)
            done = self.reduce(script)
            self.assertEqual((done.computed, done.reduced), (0, 0))
            self.check_counts()

    def test_killed_drivers_leave_each_key_once(self) -> None:
        random_ = random.Random(11)
        script = self.script(SCRIPT)
        ended = kills = 0
        while not ended:
            driver = self.driver(script)
            told = [driver.stdout.readline() for _ in range(random_.randrange(0, 6))]
            if not (told and told[-1].startswith("computed")):
                driver.send_signal(signal.SIGKILL)
                kills += 1
            _, errors = driver.communicate(timeout=DEADLINE_S)
            ended = driver.returncode == 0
            self.assertIn(driver.returncode, (0, -signal.SIGKILL), errors)
        self.assertGreater(kills, 1)
        self.check_counts()

    def test_two_drivers_at_once_share_groups_and_parts(self) -> None:
        script = self.script(SCRIPT)
        drivers = [self.driver(script) for _ in range(2)]
        told = [driver.communicate(timeout=DEADLINE_S) for driver in drivers]
        self.assertEqual([driver.returncode for driver in drivers], [0, 0], told)
        computed = [[int(n) for n in out.split()[-2:]] for out, _ in told]
        self.assertEqual([sum(pair) for pair in zip(*computed)], [GROUPS, PARTS])
        self.check_counts()


class CommandTest(ReduceCase):
    def test_the_command_counts_words(self) -> None:
        script = self.script(SCRIPT + '''
def scaled(word, batches, factor):
    row = count(word, batches)
    return {**row, "count": row["count"] * factor}
''')
        command = [PROGRAM, "--home", self.home, "--json", "feed", "map", DATASET, f"{script}:words", "--to", self.to,
                   "--key", "word", "--reduce", "scaled", "--reduce-argument", "factor=1", "--processes", "2"]
        environment = {**os.environ, "MILLRACE_PYTHON": sys.executable}

        def call(*more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*command, *more], capture_output=True, text=True, timeout=DEADLINE_S, env=environment)

        done = call("--parts", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual((found["groups"], found["computed"], found["parts"], found["reduced"]), (GROUPS, GROUPS, 3, 3))
        self.assertEqual((found["keys"], found["rows"]), (len(expected()), len(expected())))
        self.check_counts()
        again = call()
        self.assertEqual(json.loads(again.stdout)["reduced"], 0)
        other = call("--parts", "5")
        self.assertEqual((other.returncode, other.stdout), (4, ""))
        self.assertIn("parts was 3 and is 5", other.stderr)
        command[-2:] = ["--reduce-argument", "factor=2"]
        self.assertIn("--reduce-argument has \"factor\" twice", call().stderr)


if __name__ == "__main__":
    unittest.main()
