"""The scripts of examples/python. `make test-frameworks` runs them; they need torchrun of PyTorch 2."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import millrace
from support import torch_or_skip

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "python"
# torchrun starts four processes one after the other, each of which imports PyTorch.
DEADLINE_S = 400


class ExamplesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.torch = torch_or_skip()
        if int(self.torch.__version__.split(".")[0]) < 2:
            self.skipTest("PyTorch 1 does not restart processes that were killed by a signal")

    def run_in(self, home: str, *command: str, **variables: str) -> str:
        environment = {**os.environ, "MILLRACE_HOME": home, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        return done.stdout

    def test_ddp_goes_on_after_a_kill_with_the_weights_of_an_undisturbed_run(self) -> None:
        import millrace.torch

        states = []
        for variables in ({}, {"DIE_AT": "25"}):
            with tempfile.TemporaryDirectory(prefix="millrace-example-") as home:
                self.run_in(home, str(EXAMPLES / "prepare.py"))
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
                printed = self.run_in(home, *torchrun, str(EXAMPLES / "ddp.py"), **variables)
                self.assertIn("45 steps; each of 1437 rows counts 2 times", printed)
                states.append(millrace.torch.load("runs:/ddp/checkpoint.pt", home=home))
                millrace.close()
        for name, tensor in states[0]["model"].items():
            self.assertTrue(self.torch.equal(tensor, states[1]["model"][name]), name)
        self.assertEqual(states[0]["feed"], states[1]["feed"])


if __name__ == "__main__":
    unittest.main()
