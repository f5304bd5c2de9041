"""The rank of a process, from the variables of launchers."""

from __future__ import annotations

import os
import unittest
from unittest import mock

import millrace
from millrace.ranks import ranks
from support import DATASET, DEADLINE_S, HomeCase, ids_of, python, torch_or_skip

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "3"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "12"}
ALL = {**TORCHRUN, **OPEN_MPI, **PMI, **SLURM}


class RanksTest(unittest.TestCase):
    def test_each_launcher_gives_the_rank(self) -> None:
        for found in (TORCHRUN, OPEN_MPI, PMI, SLURM, ALL):
            self.assertEqual(ranks(found), (1, 3), found)
        self.assertIsNone(ranks({}))
        # A batch script is no task.
        self.assertIsNone(ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "12"}))

    def test_a_launcher_inside_of_another_one_decides(self) -> None:
        # torchrun with three processes in one task of two of Slurm; mpirun in a task of Slurm.
        outer = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        self.assertEqual(ranks({**TORCHRUN, **outer}), (1, 3))
        self.assertEqual(ranks({**OPEN_MPI, **outer}), (1, 3))
        other = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
        self.assertEqual(ranks({**TORCHRUN, **other, "TORCHELASTIC_RUN_ID": "1"}), (1, 3))

    def test_a_launcher_inside_of_a_script_decides(self) -> None:
        script = {"MILLRACE_ROUND": "1", "MILLRACE_RUN": "ab", "TORCHELASTIC_RUN_ID": "ab"}
        alone = {**script, "RANK": "0", "WORLD_SIZE": "1"}
        self.assertEqual(ranks({**script, **TORCHRUN}), (1, 3))
        self.assertEqual(ranks(alone), (0, 1))
        # The launcher of the script removes these variables: each of three processes read the whole dataset.
        self.assertEqual(ranks({**alone, **OPEN_MPI}), (1, 3))
        self.assertEqual(ranks({**alone, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}), (2, 3))
        with self.assertRaisesRegex(millrace.UsageError, "RANK .* 1 of 3, OMPI_COMM_WORLD_RANK .* 1 of 3; pass rank and world"):
            ranks({**script, **TORCHRUN, **OPEN_MPI})
        # torchrun inside of a script has a run of its own.
        self.assertEqual(ranks({**script, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}), (1, 3))

    def test_contradictions_and_half_of_a_pair_are_errors(self) -> None:
        wrong = [
            ({"RANK": "1"}, "WORLD_SIZE"),
            ({"WORLD_SIZE": "3"}, "RANK"),
            ({"RANK": "one", "WORLD_SIZE": "3"}, "RANK is 'one'"),
            ({"RANK": "²", "WORLD_SIZE": "3"}, "RANK"),
            ({"RANK": "-1", "WORLD_SIZE": "3"}, "RANK is '-1'"),
            ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK is 3 and WORLD_SIZE is 3"),
            ({"RANK": "0", "WORLD_SIZE": "9" * 99}, "WORLD_SIZE"),
            ({**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "1 of 3, OMPI_COMM_WORLD_RANK .* 2 of 3"),
            ({**OPEN_MPI, **PMI, "PMI_SIZE": "4"}, "PMI_SIZE say 1 of 4"),
            ({**TORCHRUN, **SLURM, "SLURM_PROCID": "2"}, "SLURM_PROCID"),
            ({"PMIX_RANK": "0"}, "PMIX_RANK"),
        ]
        for found, text in wrong:
            with self.assertRaisesRegex(millrace.UsageError, text):
                ranks(found)


class FeedTest(HomeCase):
    def test_a_feed_without_a_rank_takes_that_of_the_environment(self) -> None:
        third = ids_of(next(self.feed(rank=1, world=3)))
        whole = ids_of(next(self.feed(rank=0, world=1)))
        self.assertNotEqual(third, whole)
        with mock.patch.dict(os.environ, OPEN_MPI):
            self.assertEqual(ids_of(next(self.feed())), third)
            self.assertEqual(ids_of(next(self.feed(rank="env"))), third)
            # Arguments come first.
            self.assertEqual(ids_of(next(self.feed(rank=0, world=1))), whole)
            self.assertEqual(ids_of(next(self.feed(rank=0))), whole)
        self.assertEqual(ids_of(next(self.feed())), whole)

    def test_processes_without_a_launcher_take_the_rank_of_torch_distributed(self) -> None:
        torch_or_skip()
        # As processes of torch.multiprocessing.spawn do it.
        script = f"""
import os, sys
from support import torch_or_skip
torch_or_skip()
import millrace
import torch.distributed

rank, file = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
feed = millrace.Feed({DATASET!r}, columns=["id"], home=os.environ["HOME_DIR"])
print(*[int(i) for batch in feed for i in batch["id"]])
os.environ.update(RANK="0", WORLD_SIZE="1")
try:
    millrace.Feed({DATASET!r}, home=os.environ["HOME_DIR"])
except millrace.UsageError as error:
    print(error)
torch.distributed.barrier()
"""
        file = os.path.join(self.home, "process_group")
        processes = [python(self.home, script, arguments=(str(rank), file)) for rank in range(2)]
        printed = [process.communicate(timeout=DEADLINE_S) for process in processes]
        parts = []
        for rank, (out, error) in enumerate(printed):
            lines = out.splitlines()
            self.assertEqual(len(lines), 2, error)
            parts.append([int(i) for i in lines[0].split()])
            self.assertIn(f"0 of 1, torch.distributed says {rank} of 2; pass rank and world", lines[1])
        self.assertEqual([len(part) for part in parts], [500, 500])
        self.assertEqual(sorted(parts[0] + parts[1]), list(range(1_000)))


if __name__ == "__main__":
    unittest.main()
