"""The scripts of examples/python with PyTorch 2, under `millrace train --script` and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import millrace
from support import PROGRAM, torch_or_skip

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "python"
# torchrun starts four processes one after the other, each of which imports PyTorch.
DEADLINE_S = 400


class ExamplesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.torch = torch_or_skip()
        if int(self.torch.__version__.split(".")[0]) < 2:
            self.skipTest("PyTorch 1: gloo may spin at the end of a process; torchrun does not restart killed processes")

    def run_in(self, home: str, *command: str, **variables: str) -> str:
        environment = {**os.environ, "MILLRACE_HOME": home, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        return done.stdout

    def test_ddp_goes_on_after_a_kill_under_millrace_train(self) -> None:
        train = [PROGRAM, "train", "--python", sys.executable, "--nproc-per-node", "2", "--dataset", "digits@v1:/train"]
        homes = self.check_ddp([*train, "--script", str(EXAMPLES / "ddp.py")])
        self.assertEqual([run["script"]["restarts"] for run in homes], [0, 1])

    def test_ddp_goes_on_after_a_kill_under_torchrun(self) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        self.check_ddp([sys.executable, *torchrun, str(EXAMPLES / "ddp.py")])

    def check_ddp(self, command: list[str]) -> list[Any]:
        """Compares the weights of an undisturbed run and of one that is killed; returns the runs that are recorded."""
        import millrace.torch

        states, runs = [], []
        for variables in ({}, {"DIE_AT": "25"}):
            with tempfile.TemporaryDirectory(prefix="millrace-example-") as home:
                self.run_in(home, sys.executable, str(EXAMPLES / "prepare.py"))
                printed = self.run_in(home, *command, **variables)
                self.assertIn("45 steps; each of 1437 rows counts 2 times", printed)
                states.append(millrace.torch.load("runs:/ddp/checkpoint.pt", home=home))
                millrace.close()
                if command[0] == PROGRAM:
                    runs += json.loads(self.run_in(home, PROGRAM, "--json", "runs", "list", "--volume", "models"))
        for name, tensor in states[0]["model"].items():
            self.assertTrue(self.torch.equal(tensor, states[1]["model"][name]), name)
        self.assertEqual(states[0]["feed"], states[1]["feed"])
        return runs


if __name__ == "__main__":
    unittest.main()
