"""The feed in PyTorch's loaders."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import unittest
import warnings
from typing import Any
from unittest import mock

import millrace
from support import DATASET, DEADLINE_S, ROWS, HomeCase, digest, require, together, torch_or_skip


def train(dataset: Any, turn: Any, other: Any, answers: Any) -> None:
    """Reads two epochs by turns with another process, and the state after three batches of a third."""
    from torch.utils.data import DataLoader

    loops = []
    for _ in range(2):
        turn.get(timeout=DEADLINE_S)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        loops.append([int(id) for batch in loader for id in batch["id"]])
        other.put(None)
    turn.get(timeout=DEADLINE_S)
    dataset.set_epoch(0)
    for _ in itertools.islice(DataLoader(dataset, batch_size=None, num_workers=2), 3):
        pass
    answers.put((loops, dataset.state_after(3)["rows"]))
    other.put(None)


class LoaderTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch_or_skip()
        super().setUpClass()

    def setUp(self) -> None:
        # More workers than processors are intended.
        warnings.filterwarnings("ignore", "This DataLoader will create")

    def loader(self, workers: int, dataset: Any = None, **arguments: Any) -> Any:
        from torch.utils.data import DataLoader

        names = ("multiprocessing_context", "persistent_workers", "generator", "worker_init_fn")
        loading = {name: arguments.pop(name) for name in names if name in arguments}
        return DataLoader(dataset or self.dataset(**arguments), batch_size=None, num_workers=workers, **loading)

    def dataset(self, **arguments: Any) -> Any:
        from millrace.torch import FeedDataset

        return FeedDataset(DATASET, columns=["id"], home=self.home, **arguments)

    def test_ids_of_any_workers_and_ranks_are_those_of_the_command(self) -> None:
        expected = digest(self.order())
        for world, workers in [*((1, n) for n in range(5)), (2, 0), (2, 3), (3, 2), (8, 1)]:
            loaders = [self.loader(workers, rank=rank, world=world) for rank in range(world)]
            self.assertEqual([len(loader) for loader in loaders], [8] * world)
            self.assertEqual(digest(together(loaders)), expected, f"{world} ranks, {workers} workers")

    def test_processes_that_train_on_one_dataset_have_positions_of_their_own(self) -> None:
        expected = [list(map(int, ids)) for ids in self.ids_of_loops(self.dataset(), 2)]
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            dataset = self.dataset()
            turns = [context.Queue() for _ in range(3)]
            processes = [
                context.Process(target=train, args=(dataset, turns[at], turns[at + 1 & 1], turns[2])) for at in range(2)
            ]
            for process in processes:
                process.start()
            # They read their epochs by turns.
            turns[0].put(None)
            answers = [turns[2].get(timeout=DEADLINE_S) for _ in processes]
            for process in processes:
                process.join(DEADLINE_S)
                self.assertEqual(process.exitcode, 0)
            for loops, place in answers:
                self.assertEqual(loops, expected, method)
                self.assertEqual(place, 3 * 128)
            self.assertEqual(self.ids_of_loops(dataset, 2), expected)

    def ids_of_loops(self, dataset: Any, loops: int) -> list[list[int]]:
        return [sum((list(map(int, batch["id"])) for batch in dataset), []) for _ in range(loops)]

    def test_lengths_of_loops_add_up_to_the_steps_of_their_epochs(self) -> None:
        dataset = self.dataset(batch_rows=128)
        lengths = []
        for epoch in range(4):
            dataset.set_epoch(epoch)
            lengths.append(len(dataset))
        self.assertEqual(lengths, [8, 9, 9, 9])
        self.assertEqual(lengths, [-(-(epoch + 1) * ROWS // 128) - epoch * ROWS // 128 for epoch in range(4)])
        dataset.set_epoch(0)
        loops = [[len(batch["id"]) for batch in dataset] for _ in range(4)]
        # Where a loop ends inside a global batch, the next one begins with the rest of it.
        full = [128] * 7
        self.assertEqual(loops, [[*full, 104], [24, *full, 80], [48, *full, 56], [72, *full, 32]])
        self.assertEqual([len(loop) for loop in loops], lengths)
        self.assertEqual(len(self.dataset(batch_rows=128, epochs=4)), -(-4 * ROWS // 128))

    def test_spawned_workers_get_the_same_ids(self) -> None:
        generator = self.torch.Generator()
        loader = self.loader(2, multiprocessing_context="spawn", generator=generator)
        ids = []
        for _ in range(2):
            generator.manual_seed(0)
            ids += together([loader])
        self.assertEqual(digest(ids), digest(self.order(epochs=2)))

    def test_loops_with_equal_seeds_share_no_worker(self) -> None:
        import multiprocessing

        import millrace.loading

        expected = self.order(epochs=2)
        generator = self.torch.Generator()
        dataset = self.dataset()
        # Worker 0 of each loop begins after all others have looked for the iteration that it begins.
        looked = multiprocessing.get_context("fork").Semaphore(0)
        wait, find, workers = millrace.loading.wait, dataset._progress.wait, 3
        has_looked: list[bool] = []

        def look() -> None:
            if not has_looked:
                has_looked.append(True)
                looked.release()

        def begin(worker: int) -> None:
            for _ in range(workers - 1 if worker == 0 else 0):
                self.assertTrue(looked.acquire(timeout=DEADLINE_S))

        dataset._progress.wait = lambda *arguments: (find(*arguments), look())[0]
        loader = self.loader(workers, dataset, generator=generator, worker_init_fn=begin)
        ids = []
        with mock.patch.object(millrace.loading, "wait", lambda *arguments: (look(), wait(*arguments))[1]):
            for _ in range(2):
                generator.manual_seed(0)
                ids += together([loader])
        self.assertEqual(ids, expected)
        # Two loops at once.
        for workers, persistent in ((8, False), (2, True)):
            dataset = self.dataset()
            loops = []
            for _ in range(2):
                loader = self.loader(workers, dataset, generator=generator.manual_seed(0), persistent_workers=persistent)
                loops.append(iter(loader))
                loops[-1] = itertools.chain([next(loops[-1])], loops[-1])
            self.assertEqual([together([loop]) for loop in loops], [expected[:ROWS], expected[ROWS:]], f"{workers} workers")

    def test_epochs_differ_with_and_without_persistent_workers(self) -> None:
        expected = self.order(epochs=3)
        for persistent in (False, True):
            dataset = self.dataset()
            loader = self.loader(2, dataset, persistent_workers=persistent)
            ids = []
            for epoch in range(3):
                dataset.set_epoch(epoch)
                ids += together([loader])
            self.assertEqual(digest(ids), digest(expected), f"persistent={persistent}")

    def test_a_counted_position_resumes_with_other_workers(self) -> None:
        expected = self.order()
        for taken, workers, before in [(0, 2, 3), (3, 0, 3), (5, 4, 3), (3, 2, 0), (4, 0, 1), (7, 1, 0)]:
            dataset = self.dataset()
            first = together([itertools.islice(self.loader(before, dataset), taken)])
            state = json.loads(json.dumps(dataset.state_after(taken)))
            resumed = self.dataset()
            resumed.load_state_dict(state)
            self.assertEqual(first + together([self.loader(workers, resumed)]), expected)

    def test_epochs_that_follow_a_resumed_one_are_neither_skipped_nor_repeated(self) -> None:
        expected = self.order(epochs=3)
        for taken, workers in [(0, 0), (3, 2), (8, 0), (8, 2)]:
            dataset = self.dataset()
            ids = together([itertools.islice(self.loader(workers, dataset), taken)])
            resumed = self.dataset()
            resumed.load_state_dict(dataset.state_after(taken))
            begun = resumed.feed.epoch
            for epoch in range(begun, 3):
                if epoch > begun:
                    resumed.set_epoch(epoch)
                ids += together([self.loader(workers, resumed)])
            self.assertEqual(ids, expected, f"{taken} batches, {workers} workers")

    def test_loops_without_set_epoch_read_the_epochs_that_follow(self) -> None:
        expected = self.order(epochs=2)
        for arguments in ({"workers": 0}, {"workers": 2}, {"workers": 2, "persistent_workers": True}):
            loader = self.loader(**arguments)
            self.assertEqual(together([loader]) + together([loader]), expected, arguments)

    def test_loops_after_a_state_of_the_last_batch_skip_no_epoch(self) -> None:
        order = self.order(epochs=3)
        expected = [[], order[ROWS : 2 * ROWS], order[2 * ROWS :]]
        for workers, persistent in ((0, False), (1, False), (1, True), (2, False), (2, True)):
            dataset = self.dataset()
            state = dataset.state_after(8)
            dataset.load_state_dict(state)
            loader = self.loader(workers, dataset, persistent_workers=persistent)
            self.assertEqual([together([loader]) for _ in range(3)], expected, f"{workers} workers, persistent={persistent}")
            # Persistent workers hear it as well.
            dataset.load_state_dict(state)
            self.assertEqual([together([loader]) for _ in range(2)], expected[:2], f"{workers} workers, persistent={persistent}")

    def test_the_state_of_a_worker_in_the_process_of_the_loop_is_for_one_loop(self) -> None:
        order = self.order(epochs=2)
        dataset = self.dataset()
        state = {"plan": dataset.feed.plan, "rows": 0, "taken": 2, "workers": 2}
        for persistent in (False, True):
            dataset.load_state_dict(state)
            loader = self.loader(2, dataset, persistent_workers=persistent)
            ids = [together([loader]) for _ in range(2)]
            self.assertEqual(ids, [order[4 * 128 : ROWS], order[ROWS:]], f"persistent={persistent}")
        dataset.load_state_dict({**state, "taken": (1 << 60), "rows": 128})
        self.assertEqual([together([loader]) for _ in range(2)], [[], order[ROWS:]])

    def test_set_epoch_reaches_persistent_workers(self) -> None:
        dataset = self.dataset()
        loader = self.loader(2, dataset, persistent_workers=True)
        ids = []
        for epoch in (2, 0, 1):
            dataset.set_epoch(epoch)
            ids += together([loader])
        order = self.order(epochs=3)
        self.assertEqual(ids, order[2 * ROWS :] + order[: 2 * ROWS])

    def test_a_loop_after_one_that_was_left_early_begins_the_next_epoch(self) -> None:
        expected = self.order(epochs=2)
        for arguments in ({"workers": 0}, {"workers": 1}, {"workers": 2}, {"workers": 2, "persistent_workers": True}):
            loader = self.loader(**arguments)
            next(iter(loader))
            self.assertEqual(together([loader]), expected[ROWS:], arguments)
        # With other workers, with a state, and without any batch.
        for before, after in ((0, 2), (2, 0)):
            dataset = self.dataset()
            next(iter(self.loader(before, dataset)))
            self.assertEqual(together([self.loader(after, dataset)]), expected[ROWS:], f"{before} and {after} workers")
        dataset = self.dataset()
        loader = self.loader(0, dataset)
        iter(loader)
        next(iter(loader))
        dataset.load_state_dict(dataset.state_dict())
        self.assertEqual(together([loader]) + together([loader]), expected[128:])
        # The state of the last batch has nothing left, and the loop after it begins the next epoch.
        state = dataset.feed.state_after(9)
        dataset.load_state_dict(state)
        self.assertEqual([len(together([loader])) for _ in range(2)], [0, ROWS])
        # An endless one has no next epoch, and how far workers have read it is not known.
        loader = self.loader(0, epochs=None)
        first = next(iter(loader))
        self.assertEqual(together([[first]]) + together([itertools.islice(loader, 1)]), expected[:256])
        loader = self.loader(2, epochs=None)
        next(iter(loader))
        with self.assertRaisesRegex(millrace.UsageError, "set_epoch"):
            next(iter(loader))

    def test_a_worker_waits_for_the_first_one_without_polling(self) -> None:
        import multiprocessing
        import threading
        import time

        from millrace.loading import Iteration, Progress

        progress = Progress()
        found: list[Any] = []
        # More workers than calls: one finds that another one has taken its call.
        waiting = [threading.Thread(target=lambda: found.append(progress.wait(7, "a test"))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        begun = multiprocessing.get_context("fork").Process(
            target=progress.begin, args=(progress.version, 7, Iteration(3, 9)), kwargs={"waiting": 2}
        )
        # Time of this process, which waits and does not work.
        before = time.process_time()
        threading.Event().wait(0.5)
        self.assertLess(time.process_time() - before, 0.1)
        begun.start()
        for thread in waiting:
            thread.join(DEADLINE_S)
        begun.join(DEADLINE_S)
        self.assertEqual(found, [Iteration(3, 9)] * 3)
        self.assertEqual(progress.wait(7, "a test"), Iteration(3, 9))
        # A pipe that no worker reads takes any number of calls.
        for _ in range(100):
            progress.begin(progress.version, 8, Iteration(0, 1), waiting=4_096)

    def test_a_loader_that_batches_again_is_refused(self) -> None:
        from torch.utils.data import DataLoader

        for workers in (0, 2):
            with self.assertRaisesRegex(millrace.UsageError, "batch_size=None"):
                next(iter(DataLoader(self.dataset(), num_workers=workers)))

    def test_the_state_while_workers_read_is_refused_and_counted(self) -> None:
        dataset = self.dataset()
        loader = self.loader(2, dataset)
        ids = together([itertools.islice(loader, 3)])
        with self.assertRaisesRegex(millrace.UsageError, "state_after"):
            dataset.state_dict()
        resumed = self.dataset()
        resumed.load_state_dict(dataset.state_after(3))
        self.assertEqual(ids + together([self.loader(0, resumed)]), self.order())
        dataset.set_epoch(1)
        self.assertEqual(dataset.state_dict()["rows"], ROWS)

    def test_two_loops_do_not_share_the_batches_of_one_dataset(self) -> None:
        loader = self.loader(0)
        first = iter(loader)
        next(first)
        next(iter(loader))
        with self.assertRaisesRegex(millrace.UsageError, "another loop"):
            next(first)

    def test_copies_keep_the_position_and_share_nothing(self) -> None:
        dataset = self.dataset()
        next(iter(self.loader(0, dataset)))
        copy = pickle.loads(pickle.dumps(dataset))
        self.assertEqual(copy.state_dict(), dataset.state_dict())
        dataset.set_epoch(3)
        self.assertEqual(copy.state_dict()["rows"], 128)
        self.assertEqual(together([self.loader(2, copy)]), self.order()[128:])

    def test_the_state_of_a_worker_needs_the_same_workers(self) -> None:
        dataset = self.dataset()
        dataset.load_state_dict({"plan": dataset.feed.plan, "rows": 0, "taken": 1, "workers": 2})
        with self.assertRaisesRegex(millrace.UsageError, "num_workers=2"):
            next(iter(self.loader(0, dataset)))
        with self.assertRaisesRegex(millrace.UsageError, "worker of a DataLoader"):
            dataset.feed.load_state_dict(dataset.state_dict())

    def test_states_that_workers_load_of_earlier_releases_resume(self) -> None:
        from torch.utils.data import get_worker_info

        order = self.order()
        plan, start = self.dataset().feed.plan, self.dataset().state_dict()

        def ids(*states: dict[str, Any]) -> list[int]:
            # As torchdata's loader does it.
            def load(worker: int) -> None:
                get_worker_info().dataset.load_state_dict(states[worker])

            loader = self.loader(len(states), worker_init_fn=load)
            return sorted(together([loader]))

        def taken(batches: int, workers: int, rows: int = 0) -> dict[str, Any]:
            return {"plan": plan, "rows": rows, "taken": batches, "workers": workers}

        # A worker that had taken none, or all, of its batches had no number of workers in its state.
        self.assertEqual(ids(taken(1, 2), start), sorted(order[128:]))
        self.assertEqual(ids(taken(2, 3), taken(2, 3), {**start, "rows": ROWS}), sorted(order[6 * 128 :]))
        with self.assertRaisesRegex(Exception, "states of one checkpoint"):
            ids(taken(1, 2), taken(1, 2, rows=128))

    def test_an_error_of_a_worker_reaches_the_loop(self) -> None:
        from millrace.torch import FeedDataset

        dataset = FeedDataset(DATASET, columns=["score"], home=self.home)
        with self.assertRaisesRegex(Exception, '"score" has a null'):
            list(self.loader(2, dataset))

    def test_a_stateful_loader_resumes_after_any_batch(self) -> None:
        require("torchdata")
        from torchdata.stateful_dataloader import StatefulDataLoader

        order = self.order(epochs=3)

        def loader(workers: int, persistent: bool) -> Any:
            return StatefulDataLoader(self.dataset(), batch_size=None, num_workers=workers, persistent_workers=persistent)

        cases = [(0, 0), (0, 1), (0, 7), (0, 8), (0, 9), (1, 0), (1, 1), (1, 10)]
        loaders = [(0, False, cases[3:]), (1, False, cases[3:]), (2, False, cases), (2, True, cases[-3:])]
        for workers, persistent, some in loaders:
            for epoch, taken in some:
                first = loader(workers, persistent)
                for _ in range(epoch):
                    list(first)
                ids = together([itertools.islice(first, taken)]) if taken else []
                if taken == 0:
                    iter(first)
                state = first.state_dict()
                del first
                resumed = loader(workers, persistent)
                resumed.load_state_dict(state)
                # The first epoch has 8 batches, the second one 9. A loop has ended once it has asked for one more.
                begun, has_ended = ROWS * epoch, taken == 9 + epoch
                places = [begun + len(ids), begun + ROWS, begun + 2 * ROWS][has_ended:]
                case = f"{workers} workers, persistent={persistent}, epoch {epoch}, {taken} batches"
                self.assertEqual(digest(ids), digest(order[begun : places[0]]), case)
                for start, end in itertools.pairwise(places):
                    self.assertEqual(digest(together([resumed])), digest(order[start:end]), case)


if __name__ == "__main__":
    unittest.main()
