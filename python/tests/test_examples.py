"""The scripts of examples/python: each trains on two processes, one of which is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import millrace
from examples import EXAMPLES, ExampleCase, ledger
from support import require, skip, torch2_or_skip


class TorchTest(ExampleCase):
    def setUp(self) -> None:
        reason = "gloo may spin at the end of a process; torchrun does not restart killed processes"
        self.torch = torch2_or_skip(0, reason)
        super().setUp()

    def test_ddp_goes_on_after_a_kill_with_the_weights_of_an_undisturbed_run(self) -> None:
        self.check_goes_on("ddp.py")
        self.check_weights_are_those_of_an_undisturbed_run("ddp.py")

    def test_ddp_goes_on_after_a_kill_under_torchrun(self) -> None:
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLES / "ddp.py")]
        printed = self.run_in(*torchrun, DIE_AT="25", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.check_printed(printed, 45)
        self.check_nothing_is_left()
        self.check_ends_again(self.run_in(*torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))

    def check_weights_are_those_of_an_undisturbed_run(self, script: str) -> None:
        import millrace.torch

        killed = millrace.torch.load("runs:/ddp/checkpoint.pt", home=self.home)
        with tempfile.TemporaryDirectory(prefix="millrace-example-") as other:
            self.home, first = other, self.home
            self.run_in(sys.executable, str(EXAMPLES / "prepare.py"))
            self.run_in(*self.train(script))
            self.assertEqual(self.restarts(), {Path(script).stem: 0})
            whole = millrace.torch.load("runs:/ddp/checkpoint.pt", home=other)
            millrace.close()
            self.home = first
        for name, tensor in whole["model"].items():
            self.assertTrue(self.torch.equal(tensor, killed["model"][name]), name)
        self.assertEqual(whole["feed"], killed["feed"])

    def test_fsdp_goes_on_after_a_kill(self) -> None:
        import millrace.torch

        self.check_goes_on("fsdp.py")
        found = millrace.torch.checkpoints("runs:/fsdp", home=self.home)
        self.assertEqual([name.rpartition("-")[2] for name in found], ["10", "20", "30", "40", "45"])

    def test_lightning_goes_on_after_a_kill(self) -> None:
        require("lightning")
        self.check_goes_on("lightning_ddp.py")

    def test_trainer_of_hugging_face_goes_on_after_a_kill(self) -> None:
        require("transformers")
        require("accelerate")
        self.check_goes_on("hf_trainer.py")

    def test_a_replica_group_of_torchft_goes_on_without_the_one_that_was_killed(self) -> None:
        require("torchft")
        import millrace.torch

        epochs = 8
        variables = {"TORCHFT_LIGHTHOUSE": self.lighthouse(), "EPOCHS": str(epochs), "REPLICA_GROUPS": "2"}
        groups = []
        for name, die_at in (("survivor", "0"), ("killed", "25")):
            command = self.train("replica_groups.py", "--name", name, processes=1)
            groups.append(self.start(*command, **variables, DIE_AT=die_at))
        survivor, killed = (self.output(group) for group in groups)
        # The survivor has taken every step in the process with which it began.
        self.assertEqual(self.restarts(), {"survivor": 0, "killed": 1})
        steps = -(-1437 * epochs // 64)
        self.check_printed(survivor, steps, f"{epochs} times")
        self.assertRegex(killed, rf"(?m){steps} steps; each of 1437 rows counts {epochs} times$")
        self.assertRegex(survivor, r"group [01] of 2")
        stored = millrace.torch.load("runs:/replica-groups/checkpoint.pt", home=self.home)
        self.assertEqual(sorted(stored["seen"].unique().tolist()), [0, epochs])
        self.check_nothing_is_left()

    def lighthouse(self) -> str:
        """Starts a server of torchft on a free port, which ends with the test; returns its address."""
        receiver, sender = os.pipe()
        code = f"""
import os, sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
os.write({sender}, server.address().encode() + b"\\n")
sys.stdin.read()
"""
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[sender], **quiet)
        self.addCleanup(server.communicate)
        os.close(sender)
        with os.fdopen(receiver) as answer:
            return answer.readline().strip()


class JaxTest(ExampleCase):
    def setUp(self) -> None:
        require("jax")
        super().setUp()

    def test_jax_goes_on_after_a_kill(self) -> None:
        self.check_goes_on("jax_spmd.py", end="2 to 3 times")
        self.assertEqual(ledger(millrace.Volume("runs", home=self.home), "/jax/checkpoint.npz").sum(), 45 * 64)


class TensorFlowTest(ExampleCase):
    def setUp(self) -> None:
        require("tensorflow")
        super().setUp()

    def test_multi_worker_mirrored_strategy_goes_on_after_a_kill(self) -> None:
        self.check_goes_on("tf_mirrored.py", "--framework", "tensorflow")


class MxnetTest(ExampleCase):
    def setUp(self) -> None:
        self.python = os.environ.get("MXNET_PYTHON", "")
        if not self.python:
            skip("mxnet", "MXNET_PYTHON names no interpreter with MXNet")
        super().setUp()

    def test_parameter_server_of_mxnet_goes_on_after_a_kill(self) -> None:
        self.check_goes_on("mxnet_kvstore.py", "--framework", "mxnet", "--servers", "1", python=self.python)


class MpiTest(ExampleCase):
    def setUp(self) -> None:
        if shutil.which("mpirun") is None:
            skip("mpi", "mpirun is not installed")
        require("mpi4py")
        super().setUp()

    def test_mpirun_ends_after_a_kill_and_goes_on_when_started_again(self) -> None:
        script = [sys.executable, str(EXAMPLES / "mpi_allreduce.py")]
        # Open MPI asks for these where the machine has fewer processors, or the user is root.
        allowed = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        first = self.run_in("mpirun", "-n", "2", *script, code=None, DIE_AT="25", **allowed)
        self.check_nothing_is_left()
        # With another number of processes, the rows are the same.
        printed = self.run_in("mpirun", "-n", "3", *script, **allowed)
        self.assertNotIn("step 11: loss", printed)
        self.check_printed(first + printed, 45)
        self.check_nothing_is_left()
        self.check_ends_again(self.run_in("mpirun", "-n", "2", *script, **allowed))
