"""Processes that fork or spawn while feeds and files are open."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import select
import subprocess
import threading
import traceback
import unittest
from collections.abc import Callable
from typing import Any

import millrace
import pyarrow.parquet
from support import DATASET, DEADLINE_S, HomeCase, digest, ids_of, python, rows, run


def read(feed: millrace.Feed, answers: Any) -> None:
    answers.put(sum(map(ids_of, feed), []))


def in_child(work: Callable[[], None], fork: Callable[[], int] = os.fork) -> None:
    """Runs work in a fork of this process; fails unless it succeeds in time."""
    receiver, sender = os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            os.write(sender, traceback.format_exc().encode())
        os._exit(status)
    os.close(sender)
    said, ended = b"", False
    while not ended:
        ready, _, _ = select.select([receiver], [], [], DEADLINE_S)
        if not ready:
            os.kill(child, 9)
            said += b"the child hangs"
        part = os.read(receiver, 1 << 16)
        said, ended = said + part, not part
    os.close(receiver)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise AssertionError(f"status {status}: {said.decode()}")


class ForkTest(HomeCase):
    def test_parent_and_child_read_on(self) -> None:
        expected = self.order()
        feed = self.feed()
        first = ids_of(next(feed))

        def rest() -> None:
            assert first + sum(map(ids_of, feed), []) == expected

        in_child(rest)
        in_child(lambda: in_child(rest))
        rest()

    def assert_refused(self, call: Callable[[], Any]) -> None:
        with self.assertRaisesRegex(millrace.UnavailableError, "spawn"):
            call()

    def test_a_fork_that_python_does_not_know_of_is_refused(self) -> None:
        expected = self.order()
        feed = self.feed()
        first = ids_of(next(feed))

        def refused() -> None:
            self.assert_refused(lambda: next(feed))
            in_child(lambda: self.assert_refused(self.feed))

        # With the lock of the interpreter, which another thread could hold otherwise.
        in_child(refused, fork=ctypes.PyDLL(None).fork)
        self.assertEqual(first + sum(map(ids_of, feed), []), expected)

    def test_forks_beside_a_reading_thread_do_not_hang(self) -> None:
        feed, stop = self.feed(epochs=None), threading.Event()
        read: list[int] = []

        def go_on() -> None:
            for batch in feed:
                read.extend(ids_of(batch))
                if stop.is_set():
                    return

        thread = threading.Thread(target=go_on)
        thread.start()
        other = self.feed(seed=3)
        expected = self.order(seed=3)[:128]
        for _ in range(20):
            in_child(lambda: self.assertEqual(ids_of(next(other)), expected))
        stop.set()
        thread.join(DEADLINE_S)
        self.assertFalse(thread.is_alive())
        epochs = len(read) // 1_000 + 1
        self.assertEqual(digest(read), digest(self.order(epochs=epochs)[: len(read)]))

    def test_millrace_is_refused_in_fork_hooks(self) -> None:
        code = """
import importlib, os
said = []

def hook():
    try:
        said.append(volume.list("/"))
    except Exception as error:
        said.append(type(error).__name__)
    millrace.close()

# Hooks after a fork run in the order of their registration.
os.register_at_fork(after_in_parent=hook, after_in_child=hook)
import millrace
importlib.reload(millrace)
volume = millrace.Volume("digits", home=os.environ["HOME_DIR"])
volume.list("/")
child = os.fork()
volume.list("/")
if child == 0:
    os._exit(0 if said == ["UnavailableError"] else 1)
assert os.waitpid(child, 0)[1] == 0
assert said == ["UnavailableError"], said
"""
        forking = python(self.home, code)
        errors = forking.communicate(timeout=DEADLINE_S)[1]
        self.assertEqual(forking.returncode, 0, errors)

    def test_the_child_of_a_killed_parent_does_not_block_writers(self) -> None:
        code = """
import os, sys
import millrace
volume = millrace.Volume("digits", home=os.environ["HOME_DIR"])
out = volume.open("/written", "wb")
volume.snapshot("before")
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
        parent = python(self.home, code, stdin=subprocess.PIPE)
        self.assertEqual(parent.stdout.readline(), "child\n")
        parent.kill()
        parent.wait(DEADLINE_S)
        # The child lives until its input ends.
        run(self.home, "snapshot", "create", "digits@after")
        parent.communicate()

    def test_a_child_inherits_no_open_metadata(self) -> None:
        # Objects have no locks, so a thread that still reads one does no harm.
        home = os.path.realpath(self.home)

        def inherited() -> list[str]:
            links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
            return [name for name in links if name.startswith(home) and "/objects/" not in name]

        for seed in range(50):
            # The first batch leaves row groups of the next ones being read.
            next(self.feed(seed=seed, batch_rows=8, epochs=None))
            in_child(lambda: self.assertEqual(inherited(), []))

    def test_a_child_is_refused_while_its_parent_writes_a_file(self) -> None:
        volume = millrace.Volume("digits", home=self.home)
        out = volume.open("/written", "wb")
        out.write(b"parent")

        def refused() -> None:
            self.assert_refused(out.close)
            self.assert_refused(lambda: volume.list("/"))

        in_child(refused)
        out.close()
        self.assertEqual(volume.open("/written").read(), b"parent")
        in_child(lambda: self.assertEqual(volume.open("/written").read(), b"parent"))

    def test_a_file_that_is_written_is_lost_by_close(self) -> None:
        out = millrace.Volume("digits", home=self.home).open("/lost", "wb")
        millrace.close()
        with self.assertRaisesRegex(millrace.ConflictError, "open it again"):
            out.write(bytes(2 << 20))

    def test_a_file_that_is_read_is_open_in_both_processes(self) -> None:
        volume = millrace.Volume("digits@v1", home=self.home)
        whole = volume.open("/train/0.parquet").read()
        file = volume.open("/train/0.parquet")
        file.seek(100)
        in_child(lambda: self.assertEqual(file.read(), whole[100:]))
        self.assertEqual(file.read(), whole[100:])

    def test_processes_of_multiprocessing_get_the_feed(self) -> None:
        expected = self.order()
        feed = self.feed()
        first = ids_of(next(feed))
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            answers = context.Queue()
            processes = [context.Process(target=read, args=(feed, answers)) for _ in range(2)]
            for process in processes:
                process.start()
            for _ in processes:
                self.assertEqual(first + answers.get(timeout=DEADLINE_S), expected, method)
            for process in processes:
                process.join(DEADLINE_S)
                self.assertEqual(process.exitcode, 0)
        self.assertEqual(first + sum(map(ids_of, feed), []), expected)

    def test_a_feed_is_used_again_after_close(self) -> None:
        expected = self.order()
        feed = self.feed()
        first = ids_of(next(feed))
        millrace.close()
        self.assertEqual(first + sum(map(ids_of, feed), []), expected)

    def test_a_dataset_that_changed_is_not_mixed_with_the_old_one(self) -> None:
        volume = millrace.Volume("digits", home=self.home)
        with volume.open("/copy/0.parquet", "wb") as out:
            out.write(millrace.Volume("digits@v1", home=self.home).open("/train/0.parquet").read())
        feed = millrace.Feed("digits:/copy", columns=["id"], batch_rows=8, home=self.home)
        next(feed)
        with volume.open("/copy/1.parquet", "wb") as out:
            out.write(volume.open("/train/1.parquet").read())
        millrace.close()
        with self.assertRaisesRegex(millrace.UsageError, feed.plan):
            next(feed)

    def test_a_dataset_with_other_files_of_the_same_sizes_is_not_mixed_with_the_old_one(self) -> None:
        def write(offset: int) -> None:
            with millrace.Volume("twins", create=True, home=self.home).open("/0.parquet", "wb") as out:
                pyarrow.parquet.write_table(rows(offset, 64).select(["id"]), out, compression="none", use_dictionary=False)

        def opened() -> list[millrace.Feed]:
            return [millrace.Feed(f"twins{at}:/", columns=["id"], batch_rows=8, home=self.home) for at in ("", "@v1")]

        write(0)
        millrace.Volume("twins", home=self.home).snapshot("v1")
        feeds = opened()
        before = [ids_of(next(feed)) for feed in feeds]
        copies = [pickle.dumps(feed) for feed in feeds]
        millrace.close()
        run(self.home, "volume", "delete", "twins", "--yes")
        write(1000)
        millrace.Volume("twins", home=self.home).snapshot("v1")
        for feed, copy, ids, again in zip(feeds, copies, before, opened()):
            for read in (lambda: next(feed), lambda: pickle.loads(copy)):
                with self.assertRaisesRegex(millrace.ConflictError, "twins.* was replaced since the feed was opened"):
                    read()
            # The plans are the same.
            self.assertEqual(again.plan, feed.plan)
            self.assertEqual(ids_of(next(again)), [at + 1000 for at in ids])


if __name__ == "__main__":
    unittest.main()
