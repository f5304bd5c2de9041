"""Row groups that the processes of a machine share."""

from __future__ import annotations

import os
import subprocess
import unittest
from unittest import mock

import millrace
from millrace.feed import _shares
from support import DATASET, DEADLINE_S, ROWS, HomeCase, ids_of, python

# Prints its rows batch by batch; each line of the input lets it go on.
SCRIPT = f"""
import os, sys
import millrace

feed = millrace.Feed({DATASET!r}, columns=["id"], batch_rows=100, home=os.environ["HOME_DIR"])
for batch in feed:
    print(*[int(i) for i in batch["id"]], flush=True)
    if sys.stdin.readline() == "":
        break
"""


def files(home: str) -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names}


class SharedCacheTest(HomeCase):
    def rank(self, rank: int) -> subprocess.Popen[str]:
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with mock.patch.dict(os.environ, ranks):
            return python(self.home, SCRIPT, stdin=subprocess.PIPE)

    def test_a_rank_goes_on_after_the_other_was_killed(self) -> None:
        expected = [i for batch in self.feed(rank=1, world=2, batch_rows=100, share_cache=False) for i in ids_of(batch)]
        self.assertEqual(len(expected), ROWS // 2)
        millrace.close()
        before = files(self.home), set(os.listdir("/dev/shm"))
        killed, other = self.rank(0), self.rank(1)
        try:
            lines = [process.stdout.readline() for process in (killed, other)]
            self.assertTrue(all(lines), lines)
            killed.kill()
            killed.communicate(timeout=DEADLINE_S)
            rest, error = other.communicate("\n" * 20, timeout=DEADLINE_S)
            self.assertEqual(other.returncode, 0, error)
        finally:
            for process in (killed, other):
                process.kill()
                process.wait()
        self.assertEqual([int(i) for i in (lines[1] + rest).split()], expected)
        names = {name for name in set(os.listdir("/dev/shm")) - before[1] if "millrace" in name}
        self.assertEqual(names, set())
        self.assertEqual({name for name in files(self.home) - before[0] if "millrace-feed" in name}, set())

    def test_the_rows_are_those_without_sharing(self) -> None:
        read = [
            [ids_of(batch) for batch in self.feed(batch_rows=100, share_cache=share)] for share in (True, False, None)
        ]
        self.assertEqual(read[0], read[1])
        self.assertEqual(read[0], read[2])
        with self.assertRaisesRegex(millrace.UsageError, "share_cache is 1; it must be True, False or None"):
            self.feed(share_cache=1)

    def test_several_ranks_of_a_machine_share_by_default(self) -> None:
        for ranks, shares in (("2", True), ("1", False), ("", False), ("two", False)):
            with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": ranks}):
                self.assertEqual(_shares(None), shares, ranks)


if __name__ == "__main__":
    unittest.main()
