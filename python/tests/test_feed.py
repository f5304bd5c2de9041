"""The order of the feed for any readers, resuming, and errors."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import threading
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import millrace
from support import DATASET, DEADLINE_S, ROWS, HomeCase, digest, error_of, ids_of, python, together


class OrderTest(HomeCase):
    def test_ids_of_any_number_of_ranks_are_those_of_the_command(self) -> None:
        expected = self.order()
        self.assertEqual(sorted(expected), list(range(ROWS)))
        for world in (1, 2, 3, 8, 200):
            feeds = [self.feed(rank=rank, world=world) for rank in range(world)]
            self.assertEqual(digest(together(feeds)), digest(expected), f"{world} ranks")

    def test_seed_batch_size_and_epochs_are_those_of_the_command(self) -> None:
        expected = self.order(batch_rows=48, epochs=3, seed=9)
        ids = together([self.feed(batch_rows=48, epochs=3, seed=9, rank=rank, world=2) for rank in range(2)])
        self.assertEqual(ids, expected)
        for epoch in range(3):
            self.assertEqual(sorted(ids[epoch * ROWS : (epoch + 1) * ROWS]), list(range(ROWS)))

    def test_iterations_go_on_with_the_next_epochs(self) -> None:
        expected = self.order(epochs=3)
        feed = self.feed()
        for epoch in range(3):
            self.assertEqual(feed.epoch, epoch)
            batches = len(feed)
            read = [ids_of(batch) for batch in feed]
            self.assertEqual(len(read), batches)
            self.assertEqual(sum(read, []), expected[epoch * ROWS : (epoch + 1) * ROWS])
            self.assertIsNone(next(feed, None))

    def test_endless_feed_has_full_batches_and_no_length(self) -> None:
        feed = self.feed(epochs=None)
        read = [ids_of(next(feed)) for _ in range(16)]
        self.assertEqual(sum(read, []), self.order(epochs=3)[: 16 * 128])
        with self.assertRaises(TypeError):
            len(feed)

    def test_rank_and_world_come_from_the_environment_when_asked_for(self) -> None:
        with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "3"}):
            ids = ids_of(next(self.feed(rank="env")))
        self.assertEqual(ids, ids_of(next(self.feed(rank=1, world=3))))
        with mock.patch.dict(os.environ), self.assertRaisesRegex(millrace.UsageError, "RANK"):
            os.environ.pop("RANK", None)
            self.feed(rank="env")

    def test_home_comes_from_the_environment(self) -> None:
        with mock.patch.dict(os.environ, {"MILLRACE_HOME": self.home}):
            self.assertEqual(millrace.Feed(DATASET).rows, ROWS)

    def test_a_live_volume_and_the_newest_snapshot_are_read(self) -> None:
        for dataset in ("digits:/train", "digits@latest:/train"):
            feed = millrace.Feed(dataset, columns=["id"], home=self.home)
            self.assertEqual(sorted(sum((ids_of(batch) for batch in feed), [])), list(range(ROWS)))
        self.assertEqual(feed.dataset, DATASET)

    def test_ranks_on_a_live_volume_are_warned(self) -> None:
        with self.assertWarnsRegex(UserWarning, "digits:/train is the live volume"):
            millrace.Feed("digits:/train", rank=0, world=2, home=self.home)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            millrace.Feed("digits:/train", home=self.home)
            millrace.Feed(DATASET, rank=0, world=2, home=self.home)


class ResumeTest(HomeCase):
    def test_every_boundary_resumes_with_any_number_of_ranks(self) -> None:
        expected = self.order(batch_rows=64)
        feed = self.feed(batch_rows=64)
        states = [feed.state_dict()]
        for _ in feed:
            states.append(feed.state_dict())
        for taken, state in enumerate(states[:-1]):
            self.assertLessEqual(len(json.dumps(state)), 128)
            self.assertEqual(state, self.feed(batch_rows=64).state_after(taken))
            world = taken % 5 + 1
            feeds = [self.feed(batch_rows=64, rank=rank, world=world) for rank in range(world)]
            for feed in feeds:
                feed.load_state_dict(json.loads(json.dumps(state)))
            self.assertEqual(together(feeds), expected[taken * 64 :], f"from batch {taken} with {world} ranks")

    def test_state_after_the_last_short_batch_loses_no_row(self) -> None:
        feed = self.feed(batch_rows=64)
        for _ in feed:
            pass
        more = self.feed(batch_rows=64, epochs=None)
        more.load_state_dict(feed.state_dict())
        rest = [ids_of(next(more)) for _ in range(20)]
        expected = self.order(batch_rows=64, epochs=3)
        self.assertEqual(sum(rest, []), expected[ROWS : ROWS + len(sum(rest, []))])

    def test_a_state_of_the_last_batch_leaves_nothing_of_its_iteration(self) -> None:
        expected = self.order(batch_rows=64, epochs=4)
        feed = self.feed(batch_rows=64, epochs=2)
        for _ in feed:
            state = feed.state_dict()
        self.assertLessEqual(len(json.dumps(state)), 128)
        again = self.feed(batch_rows=64, epochs=2)
        # torch.distributed.checkpoint loads into a state, and drops keys that it lacks.
        self.assertEqual(state.keys(), again.state_dict().keys())
        again.load_state_dict(json.loads(json.dumps(state)))
        again = pickle.loads(pickle.dumps(again))
        self.assertEqual((list(again), again.epoch), ([], 2))
        self.assertEqual(sum(map(ids_of, again), []), expected[2 * ROWS :])
        # Behind the loop the next iteration follows, and so it does where iterations are longer or have no end.
        behind = self.feed(batch_rows=64, epochs=2)
        behind.load_state_dict(feed.state_dict())
        self.assertEqual(ids_of(next(behind)), expected[2 * ROWS : 2 * ROWS + 48])
        for epochs in (None, 3):
            longer = self.feed(batch_rows=64, epochs=epochs)
            longer.load_state_dict(state)
            self.assertEqual(ids_of(next(longer))[:24], expected[2 * ROWS : 2 * ROWS + 24])

    def test_states_of_earlier_releases_still_resume(self) -> None:
        feed = self.feed(batch_rows=64)
        feed.load_state_dict({"plan": feed.plan, "rows": 192})
        self.assertEqual(sum(map(ids_of, feed), []), self.order(batch_rows=64)[192:])

    def test_prefetched_batches_are_not_consumed(self) -> None:
        feed = self.feed()
        next(feed)
        self.assertEqual(feed.state_dict()["rows"], 128)
        copy = pickle.loads(pickle.dumps(feed))
        self.assertEqual(ids_of(next(copy)), ids_of(next(feed)))

    def test_set_epoch_begins_an_epoch(self) -> None:
        feed = self.feed()
        feed.set_epoch(2)
        self.assertEqual(sum(map(ids_of, feed), []), self.order(epochs=3)[2 * ROWS :])

    def test_a_killed_reader_resumes_from_its_stored_state(self) -> None:
        code = """
import json, os, sys
import millrace
from support import DATASET, ids_of
feed = millrace.Feed(DATASET, batch_rows=16, columns=["id"], home=os.environ["HOME_DIR"])
if os.environ.get("STATE"):
    feed.load_state_dict(json.loads(os.environ["STATE"]))
for batch in feed:
    print(json.dumps([feed.state_dict(), ids_of(batch)]), flush=True)
"""
        temporary = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, temporary)
        ids: list[int] = []
        state = ""
        for kills, batches in enumerate([1, 7, 20, 3, None]):
            with mock.patch.dict(os.environ, {"STATE": state, "TMPDIR": temporary}):
                reader = python(self.home, code)
            for count, line in enumerate(reader.stdout, 1):
                stored, read = json.loads(line)
                state, ids = json.dumps(stored), ids + read
                if count == batches:
                    shared = re.findall(r"/dev/shm/\S+", Path(f"/proc/{reader.pid}/maps").read_text())
                    self.assertEqual(shared, [], "the reader leaves nothing in shared memory")
                    reader.kill()
                    break
            errors = reader.communicate(timeout=DEADLINE_S)[1]
            self.assertEqual(reader.returncode, 0 if batches is None else -signal.SIGKILL, errors)
        self.assertEqual(ids, self.order(batch_rows=16))
        self.assertEqual(os.listdir(temporary), [], "readers leave no temporary files")

    @unittest.skipUnless(
        "kills" in os.environ.get("MILLRACE_REQUIRE", "").split(","), "MILLRACE_REQUIRE=kills runs a hundred kills"
    )
    def test_a_hundred_kills_with_changing_worlds_lose_and_repeat_no_row(self) -> None:
        rows, epochs, kills = 64, 8, 100
        options = {"batch_rows": rows, "epochs": epochs}
        expected = [ids_of(batch) for batch in self.feed(**options)]
        choice = random.Random(7)
        ends = sorted(choice.sample(range(1, len(expected)), kills))
        state, trained, step = self.feed(**options).state_dict(), [], 0
        for end in [*ends, len(expected)]:
            world = choice.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
            killed = choice.randrange(world)

            def reader(rank: int, world: int = world, state: Any = state) -> millrace.Feed:
                feed = self.feed(rank=rank, world=world, **options)
                feed.load_state_dict(json.loads(json.dumps(state)))
                return feed

            receive, send = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    feed = reader(killed)
                    for batch in feed:
                        os.write(send, json.dumps([ids_of(batch), feed.state_dict()]).encode() + b"\n")
                    signal.pause()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            os.close(send)
            others = {rank: reader(rank) for rank in range(world) if rank != killed}
            with os.fdopen(receive) as lines:
                for step in range(step, end):
                    read, state = json.loads(lines.readline())
                    parts = [read if rank == killed else ids_of(next(others[rank])) for rank in range(world)]
                    trained += sum(parts, [])
                    for feed in others.values():
                        self.assertEqual(feed.state_dict(), state)
                step = end
                os.kill(child, signal.SIGKILL)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), -signal.SIGKILL)
        self.assertEqual(digest(trained), digest(sum(expected, [])))
        for epoch in range(epochs):
            self.assertEqual(sorted(trained[epoch * ROWS : (epoch + 1) * ROWS]), list(range(ROWS)))

    def test_ctrl_c_ends_a_reader(self) -> None:
        code = """
import os, signal
import millrace
from support import DATASET
# A test run in the background of a shell ignores the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
for batch in millrace.Feed(DATASET, columns=["id"], epochs=None, home=os.environ["HOME_DIR"]):
    print("read", flush=True)
"""
        reader = python(self.home, code)
        self.assertEqual(reader.stdout.readline(), "read\n")
        reader.send_signal(signal.SIGINT)
        errors = reader.communicate(timeout=DEADLINE_S)[1]
        self.assertIn("KeyboardInterrupt", errors)


class ErrorTest(HomeCase):
    def assert_error(self, kind: type[Exception], *words: str, **arguments: object) -> str:
        dataset = str(arguments.pop("dataset", DATASET))
        with self.assertRaises(kind) as caught:
            millrace.Feed(dataset, home=self.home, **arguments)  # type: ignore[arg-type]
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertIsInstance(caught.exception, millrace.Error)
        return str(caught.exception)

    def test_errors_are_those_of_the_command(self) -> None:
        for dataset, kind in [
            ("digits@v9:/train", millrace.NotFoundError),
            ("nothing@v1:/train", millrace.NotFoundError),
            ("digits@v1:/nothing", millrace.NotFoundError),
            ("digits@v1:train", millrace.UsageError),
        ]:
            text = self.assert_error(kind, dataset=dataset)
            self.assertIn(text, error_of(self.home, "feed", dataset))
        text = self.assert_error(millrace.UsageError, batch_rows=0)
        self.assertEqual(text, error_of(self.home, "feed", DATASET, "--batch-rows", "0"))

    def test_arguments_are_checked(self) -> None:
        self.assert_error(millrace.NotFoundError, "pixel", "pixels", columns=["pixel"])
        self.assert_error(millrace.UsageError, "list of names", columns="pixels")
        self.assert_error(millrace.UsageError, "rank 2 of 2", rank=2, world=2)
        self.assert_error(millrace.UsageError, "rank is -1", rank=-1, world=2)
        self.assert_error(millrace.UsageError, "batch_rows is -1", batch_rows=-1)
        self.assert_error(millrace.UsageError, "seed is 1.5; it must be a whole number, 0 to", seed=1.5)
        self.assert_error(millrace.UsageError, "batch_rows is '12'; it must be a whole number, 1 to 4194304", batch_rows="12")
        with self.assertRaisesRegex(millrace.UsageError, "dataset is None"):
            millrace.Feed(None, home=self.home)  # type: ignore[arg-type]
        self.assert_error(millrace.UsageError, "a millrace.Image for each column", images=["pixels"])
        self.assert_error(millrace.UsageError, "epochs is 0", epochs=0)
        self.assert_error(millrace.UsageError, "jax", format="jax")

    def test_a_second_thread_does_not_get_the_batch_of_the_first(self) -> None:
        feed, expected = self.feed(), self.order()
        here, go_on, found = threading.Event(), threading.Event(), []
        convert = feed._convert

        def waiting(batch: Any) -> Any:
            here.set()
            self.assertTrue(go_on.wait(DEADLINE_S))
            return convert(batch)

        feed._convert = waiting
        first = threading.Thread(target=lambda: found.extend(ids_of(next(feed))))
        first.start()
        self.assertTrue(here.wait(DEADLINE_S))
        with self.assertRaisesRegex(millrace.UsageError, f"read {DATASET}: another thread takes a batch of this feed"):
            next(feed)
        child = os.fork()
        if child == 0:
            # The thread is not here.
            feed._convert = convert
            os._exit(0 if ids_of(next(feed)) == expected[:128] else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        go_on.set()
        first.join()
        self.assertEqual(found + sum(map(ids_of, feed), []), expected)

    def test_a_state_of_another_plan_is_refused_by_name(self) -> None:
        state = self.feed(seed=1).state_dict()
        feed = self.feed(seed=2)
        with self.assertRaises(millrace.UsageError) as caught:
            feed.load_state_dict(state)
        for word in (state["order"], feed.state_dict()["order"], DATASET, "seed"):
            self.assertIn(word, str(caught.exception))
        order = feed.state_dict()["order"]
        bad_states: list[dict[str, object]] = [
            {}, {"plan": feed.plan}, {"plan": feed.plan, "rows": -1}, {"plan": "x", "rows": 0}, {"plan": "0" * 64, "rows": 0},
            {"order": order}, {"order": order, "rows": -1}, {"order": "x", "rows": 0}, {"order": order, "rows": 1 << 62},
        ]
        for bad in [*bad_states, None]:
            with self.assertRaises(millrace.UsageError):
                feed.load_state_dict(bad)  # type: ignore[arg-type]
        self.assertEqual(feed.state_dict()["rows"], 0)


if __name__ == "__main__":
    unittest.main()
