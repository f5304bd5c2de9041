"""Row groups that the processes of a machine share."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import unittest
from typing import Any

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from support import DEADLINE_S, ids_of, python
from test_fork import in_child

DATASET = "large@v1:/train"
FILES = 4
# A row has 1 KiB, so that a row group is large enough to be shared.
GROUP_ROWS = 512
ROWS = FILES * 2 * GROUP_ROWS
COLUMNS = ["id", "values"]

# Prints its rows batch by batch, and what it has mapped and bound; each line of the input lets it go on.
SCRIPT = f"""
import os, sys
import millrace
from test_shared_cache import DATASET, COLUMNS, bound, mapped

rank, world, shares = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "shares"
feed = millrace.Feed(
    DATASET, columns=COLUMNS, batch_rows=256, rank=rank, world=world, share_cache=shares, home=os.environ["HOME_DIR"]
)
for batch in feed:
    assert (batch["values"][:, 0] == batch["id"]).all()
    print(*[int(i) for i in batch["id"]], flush=True)
    if sys.stdin.readline() == "":
        break
print("mapped", mapped(), "bound", len(bound()), flush=True)
sys.stdin.readline()
"""


def mapped() -> int:
    """The shared row groups that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memfd:millrace-feed" in line for line in maps)


def bound(pid: int | str = "self") -> set[str]:
    """The addresses that a process has bound for shared row groups."""
    sockets = {}
    with open("/proc/net/unix", encoding="utf-8") as table:
        for line in table:
            *_, inode, name = line.split() if "@millrace-feed-" in line else ("", "")
            sockets[f"socket:[{inode}]"] = name
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:
            # The descriptor of this listing.
            continue
    return {name for socket, name in sockets.items() if name and socket in found}


def make_home(home: str, first: int) -> None:
    """A home with a dataset whose files have the same sizes for every first id."""
    volume = millrace.Volume("large", create=True, home=home)
    for file in range(FILES):
        ids = first + numpy.arange(file * 2 * GROUP_ROWS, (file + 1) * 2 * GROUP_ROWS, dtype=numpy.int64)
        values = numpy.zeros((len(ids), 256), dtype=numpy.float32)
        values[:, 0] = ids
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), 256)
        with volume.open(f"/train/{file}.parquet", "wb") as out:
            pyarrow.parquet.write_table(
                pyarrow.table({"id": ids, "values": lists}), out, row_group_size=GROUP_ROWS, compression="none",
                use_dictionary=False, write_statistics=False,
            )
    volume.snapshot("v1")


class SharedCacheTest(unittest.TestCase):
    def setUp(self) -> None:
        self.parent = tempfile.mkdtemp(prefix="millrace-test-")
        self.addCleanup(shutil.rmtree, self.parent)
        self.addCleanup(millrace.close)
        self.home = os.path.join(self.parent, "home")
        make_home(self.home, 0)
        self.processes: list[subprocess.Popen[str]] = []
        self.addCleanup(self.end)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)

    def feed(self, **arguments: Any) -> millrace.Feed:
        return millrace.Feed(DATASET, home=self.home, **{"columns": COLUMNS, "batch_rows": 256, **arguments})

    def rank(self, rank: int, world: int, shares: bool = True) -> subprocess.Popen[str]:
        arguments = [str(rank), str(world), "shares" if shares else "alone"]
        process = python(self.home, SCRIPT, arguments, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process

    def read(self, process: subprocess.Popen[str]) -> tuple[list[int], int, int]:
        """The rows that are left of a process, its mappings and its bound addresses. It stays until its input ends."""
        ids: list[int] = []
        while True:
            line = process.stdout.readline()
            self.assertNotEqual(line, "", process.poll() is not None and process.stderr.read())
            if line.startswith("mapped"):
                _, mappings, _, addresses = line.split()
                return ids, int(mappings), int(addresses)
            ids += map(int, line.split())
            process.stdin.write("\n")
            process.stdin.flush()

    def test_four_processes_get_the_rows_that_they_get_without_sharing(self) -> None:
        shared, alone = ([self.rank(rank, 4, shares) for rank in range(4)] for shares in (True, False))
        rows = [self.read(process) for process in shared]
        expected = [self.read(process) for process in alone]
        self.assertEqual([ids for ids, _, _ in rows], [ids for ids, _, _ in expected])
        self.assertEqual(sorted(i for ids, _, _ in rows for i in ids), list(range(ROWS)))
        self.assertGreater(sum(mappings for _, mappings, _ in rows), 0)
        self.assertEqual([addresses for _, _, addresses in rows].count(1), 1)
        self.assertEqual({(mappings, addresses) for _, mappings, addresses in expected}, {(0, 0)})

    def test_a_killed_server_leaves_nothing_and_the_others_go_on(self) -> None:
        expected = [i for batch in self.feed(rank=1, world=2) for i in ids_of(batch)]
        millrace.close()

        def files(folder: str) -> set[str]:
            return {os.path.join(at, name) for at, _, names in os.walk(folder) for name in names}

        places = ["/dev/shm", tempfile.gettempdir(), self.home]
        server = self.rank(0, 2)
        self.assertTrue(server.stdout.readline())
        addresses = bound(server.pid)
        self.assertEqual(len(addresses), 1)
        other = self.rank(1, 2)
        first = other.stdout.readline()
        before = [files(place) for place in places]
        server.kill()
        server.communicate(timeout=DEADLINE_S)
        other.stdin.write("\n")
        other.stdin.flush()
        ids, _, _ = self.read(other)
        self.assertEqual([int(i) for i in first.split()] + ids, expected)
        for place, had in zip(places, before):
            new = {name for name in files(place) - had if "millrace-feed" in os.path.basename(name)}
            self.assertEqual(new, set(), place)
        other.kill()
        other.communicate(timeout=DEADLINE_S)
        with open("/proc/net/unix", encoding="utf-8") as table:
            self.assertFalse(addresses & set(table.read().split()))

    def test_another_home_at_the_same_path_gets_its_own_rows(self) -> None:
        first = self.rank(0, 1)
        ids, _, addresses = self.read(first)
        self.assertEqual((sorted(ids), addresses), (list(range(ROWS)), 1))
        plan = self.feed().plan
        millrace.close()
        # The process has every row group, and still serves.
        os.rename(self.home, self.home + "-moved")
        make_home(self.home, 1_000_000)
        self.assertEqual(self.feed().plan, plan, "the plan does not tell the homes apart")
        ids, _, _ = self.read(self.rank(0, 1))
        self.assertEqual(sorted(ids), list(range(1_000_000, 1_000_000 + ROWS)))
        # Homes that change places, as with a bind mount.
        millrace.close()
        os.rename(self.home, self.home + "-second")
        os.rename(self.home + "-moved", self.home)
        ids, _, _ = self.read(self.rank(0, 1))
        self.assertEqual(sorted(ids), list(range(ROWS)))
        self.assertIsNone(first.poll())

    def test_a_home_that_was_removed_and_made_again_gets_its_own_rows(self) -> None:
        first = self.rank(0, 1)
        self.read(first)
        millrace.close()
        shutil.rmtree(self.home)
        make_home(self.home, 2_000_000)
        ids, _, _ = self.read(self.rank(0, 1))
        self.assertEqual(sorted(ids), list(range(2_000_000, 2_000_000 + ROWS)))
        self.assertIsNone(first.poll())

    def assert_reads_after_fork(self, feed: millrace.Feed, read: list[int], expected: list[int]) -> None:
        """Forks while this process serves: both read on, and the child has no socket of the parent."""
        self.assertEqual(len(bound()), 1)

        def rest() -> None:
            self.assertEqual(read + sum(map(ids_of, feed), []), expected)

        def in_fork() -> None:
            self.assertEqual(bound(), set())
            rest()

        in_child(in_fork)
        rest()

    def test_a_serving_process_forks(self) -> None:
        expected = sum(map(ids_of, self.feed()), [])
        feed = self.feed(share_cache=True)
        self.assert_reads_after_fork(feed, ids_of(next(feed)), expected)
        # The address is served by a living process, or free.
        self.assertEqual(self.read(self.rank(0, 1))[0], expected)

    def test_a_serving_process_that_writes_a_file_forks(self) -> None:
        expected = sum(map(ids_of, self.feed()), [])
        feed = self.feed(share_cache=True)
        first = ids_of(next(feed))
        # The parent keeps everything open, and its child is refused.
        out = millrace.Volume("large", home=self.home).open("/written", "wb")
        out.write(b"parent")
        self.assertEqual(len(bound()), 1)
        in_child(lambda: self.assertEqual(bound(), set()))
        self.assertEqual(first + sum(map(ids_of, feed), []), expected)
        out.close()

    def test_a_child_that_python_does_not_know_of_outlives_its_serving_parent(self) -> None:
        expected = sum(map(ids_of, self.feed()), [])
        feed = self.feed(share_cache=True)
        next(feed)
        self.assertEqual(len(bound()), 1)
        go, end = os.pipe()
        # With the lock of the interpreter, which another thread could hold otherwise.
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            os.close(end)
            os.read(go, 1)
            os._exit(0)
        os.close(go)
        try:
            self.assertEqual(len(bound(child)), 1, "the child has the socket")
            millrace.close()
            # Nothing answers there any more, and nothing waits for an answer.
            self.assertEqual(self.read(self.rank(0, 1))[0], expected)
        finally:
            os.close(end)
            os.waitpid(child, 0)

    def test_live_volumes_are_not_shared(self) -> None:
        feed = millrace.Feed("large:/train", columns=COLUMNS, batch_rows=256, share_cache=True, home=self.home)
        self.assertEqual(sorted(sum(map(ids_of, feed), [])), list(range(ROWS)))
        self.assertEqual((bound(), mapped()), (set(), 0))

    def test_sharing_is_asked_for(self) -> None:
        for arguments in ({}, {"share_cache": False}):
            feed = self.feed(**arguments)
            next(feed)
            self.assertEqual((bound(), mapped()), (set(), 0))
        for value in (None, 1, "yes"):
            with self.assertRaisesRegex(millrace.UsageError, f"share_cache is {value!r}; it must be True or False"):
                self.feed(share_cache=value)


if __name__ == "__main__":
    unittest.main()
