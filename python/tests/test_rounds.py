"""Processes of earlier rounds of a training script, whose launcher was lost: they change no file any more."""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import millrace
from support import DEADLINE_S, HomeCase, error_of, python, run, torch2_or_skip

FIRST, SECOND, THIRD = ("1" * 64, "2" * 64, "3" * 64)

# Opens the volume, and runs a line of code for each line that it reads.
PROCESS = """
import os, sys, millrace
volume = millrace.Volume("runs", home=os.environ["HOME_DIR"])
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except BaseException as error:
        # PyTorch has an error class of its own.
        print(type(error).__name__, str(error).replace(chr(10), ' '), flush=True)
"""


class RoundsTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.volume = millrace.Volume("runs", create=True, home=cls.home)

    def process(self, run: str, number: int, job: str | None = None, launch: int = 1) -> subprocess.Popen[str]:
        """A process of a round, which has opened the volume: of a job of its own unless one is named."""
        values = {
            "MILLRACE_JOB": "j", "MILLRACE_RUN": run, "MILLRACE_ROUND": str(number), "MILLRACE_RUN_VOLUME": "models",
            "MILLRACE_LAUNCH": f"{job or run[:32]}:{launch}",
        }
        with mock.patch.dict(os.environ, values):
            process = python(self.home, PROCESS, stdin=subprocess.PIPE)
        self.addCleanup(process.communicate, timeout=DEADLINE_S)
        self.assertEqual(process.stdout.readline(), "ready\n")
        return process

    def tell(self, process: subprocess.Popen[str], code: str) -> str:
        process.stdin.write(code + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def write(self, process: subprocess.Popen[str], path: str, text: str) -> str:
        return self.tell(process, f"out = volume.open({path!r}, 'w'); out.write({text!r}); out.close()")

    def read(self, path: str) -> str:
        return self.volume.open(path, "r").read()

    def test_a_process_of_an_earlier_round_changes_nothing_once_a_later_one_has_opened_the_volume(self) -> None:
        earlier = self.process(FIRST, 1)
        self.assertEqual(self.write(earlier, "/checkpoint", "first"), "done")
        self.assertEqual(self.tell(earlier, "late = volume.open('/late', 'w'); late.write('late')"), "done")
        later = [self.process(FIRST, 2), self.process(FIRST, 2)]
        # It has opened its file before.
        for code in (
            "late.close()",
            "volume.remove('/checkpoint')",
            "out = millrace.Volume('runs', home=os.environ['HOME_DIR']).open('/checkpoint', 'w'); out.close()",
        ):
            told = self.tell(earlier, code)
            self.assertRegex(told, "^ConflictError (write|remove) runs:/.*round 2 of job j has begun.* round 1 of run 1{12}")
        self.assertEqual(self.read("/checkpoint"), "first")
        with self.assertRaises(millrace.NotFoundError):
            self.volume.info("/late")
        self.assertEqual(self.tell(earlier, "volume.open('/checkpoint').read()"), "done")
        for number, process in enumerate(later):
            self.assertEqual(self.write(process, "/checkpoint", f"later {number}"), "done")
        self.assertEqual(self.read("/checkpoint"), "later 1")
        # Processes of no round, and of other runs, are not concerned.
        with self.volume.open("/checkpoint", "w") as out:
            out.write("by hand")
        self.assertEqual(self.write(self.process(SECOND, 1), "/other", "other"), "done")
        self.assertEqual(self.write(later[0], "/checkpoint", "later"), "done")

    def test_each_earlier_run_of_a_job_is_over_when_a_later_one_begins(self) -> None:
        volume, job = "old", "a" * 32
        millrace.Volume(volume, create=True, home=self.home)
        open_old = f"volume = millrace.Volume({volume!r}, home=os.environ['HOME_DIR'])"
        first, second = self.process(FIRST, 7, job, 1), self.process(SECOND, 1, job, 2)
        self.assertEqual(self.tell(first, open_old), "done")
        self.assertEqual(self.write(first, "/checkpoint", "first"), "done")
        self.assertEqual(self.tell(second, open_old), "done")
        over = "^ConflictError .*a later run of job j has begun"
        self.assertRegex(self.write(first, "/checkpoint", "again"), over)
        # Runs 3 and 4 had no process that opened the volume.
        fifth = self.process(THIRD, 1, job, 5)
        self.assertEqual(self.tell(fifth, open_old), "done")
        for earlier in (first, second):
            self.assertRegex(self.write(earlier, "/checkpoint", "again"), over)
        self.assertEqual(self.write(fifth, "/checkpoint", "fifth"), "done")
        native = millrace.Volume(volume, home=self.home)._native
        self.assertEqual(native.keys("script-round/"), [(f"script-round/{job}", b"5 1 " + THIRD.encode())])

    def test_a_run_of_a_copied_home_is_told_what_to_do(self) -> None:
        self.process(FIRST, 1, "c" * 32, 4)
        copy = self.process(SECOND, 1, "c" * 32, 4)
        told = self.write(copy, "/copied", "copy")
        self.assertRegex(told, "^ConflictError .*number of another run.* remove the file trainer/j.launches")

    def test_a_model_is_published_by_no_process_whose_round_ends_meanwhile(self) -> None:
        millrace.Volume("models", create=True, home=self.home)
        key, value = f"script-round/{'b' * 32}", "1 1 " + FIRST
        native = millrace.Volume("models", home=self.home)._native
        native.publish([], put=[(key, value.encode())], delete=[], expect=[(key, None)], absent=[])
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        graph = str(Path(folder.name) / "m.onnx")
        run(self.home, "model", "init", "mlp", "--inputs", "2", "--classes", "2", graph)
        arguments = ("model", "import", graph, "--name", "m", "--volume", "models", "--expect-key")
        told = error_of(self.home, *arguments, f"{key}=1 2 {FIRST}")
        self.assertIn(f"cannot publish model m to models: key {key} has another value", told)
        run(self.home, *arguments, f"{key}={value}")

    def test_the_volume_of_the_run_is_closed_before_a_later_round_opens_it(self) -> None:
        millrace.Volume("models", create=True, home=self.home)
        earlier = self.process("4" * 64, 1)
        self.process("4" * 64, 2)
        told = self.tell(earlier, "out = millrace.Volume('models', home=os.environ['HOME_DIR']).open('/x', 'w'); out.close()")
        self.assertRegex(told, "^ConflictError write models:/x: round 2 of job j has begun")

    def test_a_checkpoint_of_torch_distributed_appears_as_a_whole_or_not_at_all(self) -> None:
        torch2_or_skip(4, "torch.distributed.checkpoint needs 2.4")
        save = (
            "import torch, millrace.torch, torch.distributed.checkpoint as dcp; dcp.save({{'x': torch.ones(3)}}, "
            "storage_writer=millrace.torch.StorageWriter('runs:/dcp/{}', home=os.environ['HOME_DIR']))"
        )
        earlier = self.process(THIRD, 1)
        self.assertEqual(self.tell(earlier, save.format(1)), "done")
        self.process(THIRD, 2)
        self.assertNotEqual(self.tell(earlier, save.format(2)), "done")
        from millrace.torch import checkpoints

        self.assertEqual(checkpoints("runs:/dcp", home=self.home), ["runs:/dcp/1"])


if __name__ == "__main__":
    unittest.main()
