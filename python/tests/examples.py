"""Runs the scripts of examples/python in a home of their own, and checks what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import millrace
from support import PROGRAM

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "python"
# Several processes import a framework, round after round. On two busy cores that took up to three minutes a round.
DEADLINE_S = 600
# How long processes that were killed may still be listed.
END_S = 10


class ExampleCase(unittest.TestCase):
    def setUp(self) -> None:
        self.home = tempfile.mkdtemp(prefix="millrace-example-")
        self.addCleanup(shutil.rmtree, self.home, ignore_errors=True)
        self.addCleanup(millrace.close)
        self.run_in(sys.executable, str(EXAMPLES / "prepare.py"))

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            **os.environ,
            "MILLRACE_HOME": self.home,
            "OMP_NUM_THREADS": "1",
            # Frameworks ask their servers for newer versions and models.
            "HF_HUB_OFFLINE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **variables,
        }

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own, which ends with the test."""
        process = subprocess.Popen(
            command,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            # The launcher of Millrace ends its processes by itself; mpirun and torchrun are in one group with theirs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def output(self, process: subprocess.Popen[str], code: int | None = 0) -> str:
        """Waits for the end; ``code=None`` wants any other exit code than 0."""
        printed, errors = process.communicate(timeout=DEADLINE_S)
        text = f"exit code {process.returncode}\n{printed[-2000:]}\n{errors[-6000:]}"
        if code is None:
            self.assertNotEqual(process.returncode, 0, text)
        else:
            self.assertEqual(process.returncode, code, text)
        return printed

    def run_in(self, *command: str, code: int | None = 0, **variables: str) -> str:
        return self.output(self.start(*command, **variables), code)

    def train(self, script: str, *arguments: str, python: str = sys.executable, processes: int = 2) -> list[str]:
        """A command that trains. Some frameworks do not end at SIGTERM."""
        chosen = ["--python", python, "--script", str(EXAMPLES / script), "--dataset", "digits-python@v1:/train"]
        return [PROGRAM, "train", "--nproc-per-node", str(processes), "--grace", "10", *chosen, *arguments]

    def restarts(self) -> dict[str, int]:
        """Rounds that followed a failure, by the name of the run, of runs that have succeeded."""
        found = json.loads(self.run_in(PROGRAM, "--json", "runs", "list", "--volume", "models"))
        self.assertEqual({run["script"]["outcome"] for run in found}, {"succeeded"}, found)
        return {run["script"]["job"]: run["script"]["restarts"] for run in found}

    def check_goes_on(self, script: str, *arguments: str, end: str = "2 times", **options: Any) -> str:
        """Trains, while one process kills itself at step 25; the next round goes on from a checkpoint."""
        printed = self.run_in(*self.train(script, *arguments, **options), DIE_AT="25")
        self.assertEqual(self.restarts(), {Path(script).stem: 1})
        self.check_printed(printed, 45, end)
        # Steps after the last checkpoint may come twice, those before it come once.
        steps = [int(step) for step in re.findall(r"step (\d+): loss", printed)]
        self.assertLess(steps[0], 10, printed)
        self.assertEqual(steps.count(steps[0]), 1, printed)
        self.check_nothing_is_left()
        self.check_ends_again(self.run_in(*self.train(script, *arguments, **options)), end)
        return printed

    def check_ends_again(self, printed: str, end: str = "2 times") -> None:
        """Started again after its end, a script repeats no step that its last checkpoint has, and ends as before."""
        self.assertRegex(printed, rf"(?m)45 steps; each of 1437 rows counts {end}$")
        steps = [int(step) for step in re.findall(r"step (\d+): loss", printed)]
        self.assertEqual([step for step in steps if step <= 40], [], printed)
        self.check_nothing_is_left()

    def check_printed(self, printed: str, steps: int, end: str = "2 times") -> None:
        """Each row counts once per epoch, and the loss falls."""
        self.assertRegex(printed, rf"(?m){steps} steps; each of 1437 rows counts {end}$")
        losses = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)]
        self.assertGreater(len(losses), 2, printed)
        self.assertLess(max(losses)[1], 0.6 * min(losses)[1], losses)

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + END_S
        while left := list(processes_of(self.home)):
            self.assertLess(time.monotonic(), deadline, f"processes are left: {left}")
            time.sleep(0.05)


def processes_of(home: str) -> Iterator[str]:
    """Processes of a home, beside this one."""
    wanted = f"MILLRACE_HOME={home}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            # Processes end while this looks at them, and those of other users are closed.
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield f"{folder.name}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"


def ledger(volume: millrace.Volume, path: str) -> Any:
    """The counts in a checkpoint of NumPy."""
    import numpy

    with volume.open(path) as file:
        return numpy.load(file)["seen"]
