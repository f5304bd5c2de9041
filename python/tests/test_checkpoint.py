"""Checkpoints of PyTorch in volumes."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import threading
import unittest
from typing import Any
from unittest import mock

import millrace
from millrace.volume import Writer
from support import DEADLINE_S, HomeCase, python, run, torch2_or_skip, torch_or_skip

# A rank of a job that stores a tensor of its own, one that all have, and a number.
RANK = """
import os, sys, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import millrace.torch
from datetime import timedelta

warnings.simplefilter("ignore")
rank, world, home = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["HOME_DIR"]
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=world,
                        timeout=timedelta(seconds=60))

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

mesh = init_device_mesh("cpu", (world,))

def state(step):
    rows = torch.arange(24, dtype=torch.float32).reshape(12, 2).chunk(world)[rank] + step
    sharded = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    return {"sharded": sharded, "shared": torch.full((3,), float(step)), "step": step}

def writer(path, **options):
    return millrace.torch.StorageWriter(path, home=home, **options)

def load(path):
    found = state(0)
    dcp.load(found, storage_reader=millrace.torch.StorageReader(path, home=home))
    return found

def check(path, step):
    found, expected = load(path), state(step)
    assert torch.equal(found["sharded"].to_local(), expected["sharded"].to_local()), found
    assert torch.equal(found["shared"], expected["shared"]) and found["step"] == step, found

"""


class FileTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch_or_skip()
        super().setUpClass()
        cls.volume = millrace.Volume("runs", create=True, home=cls.home)

    def save(self, obj: Any, path: str, **options: Any) -> None:
        import millrace.torch

        millrace.torch.save(obj, path, home=self.home, **options)

    def load(self, path: str, **options: Any) -> Any:
        import millrace.torch

        return millrace.torch.load(path, home=self.home, **options)

    def test_a_state_comes_back_live_and_at_a_snapshot(self) -> None:
        torch = self.torch
        model = torch.nn.Linear(3, 2)
        state = {"model": model.state_dict(), "feed": self.feed().state_dict(), "epoch": 3}
        self.save(state, "runs:/a/checkpoint.pt")
        self.volume.snapshot("kept")
        self.save({"epoch": 4}, "runs:/a/checkpoint.pt")
        self.assertEqual(self.load("runs:/a/checkpoint.pt"), {"epoch": 4})
        found = self.load("runs@kept:/a/checkpoint.pt", map_location="cpu")
        self.assertTrue(torch.equal(found["model"]["weight"], model.weight))
        self.assertEqual((found["epoch"], found["feed"]), (3, state["feed"]))
        self.save(state, "runs:/a/old.pt", _use_new_zipfile_serialization=False)
        self.assertEqual(self.load("runs:/a/old.pt")["epoch"], 3)

    def test_large_tensors_are_sent_in_parts(self) -> None:
        tensor = self.torch.arange(10_000_000, dtype=self.torch.float32)
        sizes = []
        append = Writer._send
        with mock.patch.object(Writer, "_send", lambda out: append(out)):
            volume = millrace.Volume("runs", home=self.home)
            with volume.open("/large.pt", "wb") as out:
                file = out._file
                out._file = mock.Mock(wraps=file)
                out._file.append = lambda part: (sizes.append(len(part)), file.append(part))
                self.torch.save(tensor, out)
        self.assertLessEqual(max(sizes), 16 << 20)
        self.assertGreater(sum(sizes), 40_000_000)
        self.assertTrue(self.torch.equal(self.load("runs:/large.pt"), tensor))

    def test_errors_name_the_path(self) -> None:
        for path in ("runs", "runs:x", ":/x", "/x", "runs/x.pt"):
            with self.assertRaisesRegex(millrace.UsageError, f"'{path}' names no file of a volume"):
                self.load(path)
        with self.assertRaisesRegex(millrace.NotFoundError, "/nothing.pt"):
            self.load("runs:/nothing.pt")
        with self.assertRaisesRegex(millrace.Error, "read-only"):
            self.volume.snapshot("frozen")
            self.save({}, "runs@frozen:/x.pt")
        with self.assertRaisesRegex(millrace.Error, "^save runs:/lambda.pt: "):
            self.save(lambda: 0, "runs:/lambda.pt")
        with self.assertRaises(millrace.NotFoundError):
            self.volume.info("/lambda.pt")
        with self.assertRaisesRegex(millrace.UsageError, "mmap"):
            self.load("runs:/x.pt", mmap=True)

    def test_code_is_loaded_only_when_it_is_asked_for(self) -> None:
        self.save({"path": unittest.TestCase}, "runs:/code.pt")
        with self.assertRaisesRegex(millrace.UsageError, "^load runs:/code.pt: .*weights_only=False"):
            self.load("runs:/code.pt")
        self.assertIs(self.load("runs:/code.pt", weights_only=False)["path"], unittest.TestCase)

    def test_damaged_files_are_refused(self) -> None:
        self.save(self.torch.arange(100_000), "runs:/whole.pt")
        data = self.volume.open("/whole.pt").read()
        for name, content in (("text", b"not a checkpoint"), ("half", data[: len(data) // 2]), ("empty", b"")):
            with self.volume.open(f"/{name}", "wb") as out:
                out.write(content)
            with self.assertRaisesRegex(millrace.CorruptError, f"^load runs:/{name}: "):
                self.load(f"runs:/{name}")

    def test_a_full_store_keeps_the_file_before(self) -> None:
        self.save({"epoch": 1}, "runs:/full.pt")

        def refuse(out: Any, data: Any) -> int:
            out.discard()
            raise millrace.NoSpaceError("no space is left")

        with mock.patch.object(Writer, "write", refuse), self.assertRaisesRegex(millrace.NoSpaceError, "no space"):
            self.save({"epoch": 2}, "runs:/full.pt")
        self.assertEqual(self.load("runs:/full.pt"), {"epoch": 1})

    def test_a_killed_save_keeps_the_file_before(self) -> None:
        self.save({"epoch": 1}, "runs:/killed.pt")
        code = """
import os, sys, torch, millrace.torch

class Stop:
    def __reduce__(self):
        return (Stop, ())
    def __getstate__(self):
        return {}

write = millrace.volume.Writer.write
def stop(out, data):
    done = write(out, data)
    if out.tell() > 30_000_000:
        print("half", flush=True)
        sys.stdin.read()
    return done
millrace.volume.Writer.write = stop
tensors = {str(i): torch.zeros(5_000_000) for i in range(3)}
millrace.torch.save(tensors, "runs:/killed.pt", home=os.environ["HOME_DIR"])
"""
        process = python(self.home, code, stdin=-1)
        self.assertEqual(process.stdout.readline(), "half\n")
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
        self.assertEqual(self.load("runs:/killed.pt"), {"epoch": 1})


class DistributedTest(HomeCase):
    """``torch.distributed.checkpoint`` with ranks in processes of their own."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch2_or_skip(4, "it has no torch.distributed.checkpoint of version 2.4")
        super().setUpClass()
        cls.volume = millrace.Volume("runs", create=True, home=cls.home)
        cls.meetings = tempfile.mkdtemp(prefix="millrace-meeting-")
        cls.addClassCleanup(shutil.rmtree, cls.meetings)

    def start(self, code: str, world: int = 2) -> list[Any]:
        self.meeting = getattr(self, "meeting", 0) + 1
        millrace.close()
        ranks = []
        for rank in range(world):
            values = {"RANK": str(rank), "WORLD_SIZE": str(world), "MEETING": f"{self.meetings}/{self.id()}{self.meeting}"}
            with mock.patch.dict(os.environ, values):
                ranks.append(python(self.home, RANK + code, stdin=-1))
        return ranks

    def finish(self, ranks: list[Any]) -> None:
        results = [(rank.communicate(timeout=DEADLINE_S), rank.returncode) for rank in ranks]
        self.assertEqual([code for _, code in results], [0] * len(ranks), "\n".join(text[1] for text, _ in results))

    def checkpoints(self, path: str) -> list[str]:
        import millrace.torch

        return millrace.torch.checkpoints(path, home=self.home)

    def data(self, folder: str) -> list[str]:
        return [entry.path for entry in self.volume.list(folder)]

    def test_ranks_save_and_other_ranks_load(self) -> None:
        self.finish(self.start("""
for step in (9, 10, 100):
    dcp.save(state(step), storage_writer=writer(f"runs:/job/step-{step}"))
check("runs:/job/step-100", 100)
"""))
        self.assertEqual(self.checkpoints("runs:/job"), [f"runs:/job/step-{step}" for step in (9, 10, 100)])
        self.assertEqual(self.checkpoints("runs:/nothing"), [])
        self.volume.snapshot("kept")
        self.finish(self.start("""
check("runs:/job/step-9", 9)
check("runs@kept:/job/step-10", 10)
dcp.save(state(3), checkpoint_id="runs:/other/3", storage_writer=writer("runs:/unused"))
found = state(0)
dcp.load(found, checkpoint_id="runs:/other/3", storage_reader=millrace.torch.StorageReader("runs:/unused", home=home))
assert found["step"] == 3
""", world=3))
        self.assertEqual(self.checkpoints("runs@kept:/other"), [])
        import millrace.torch

        # A save over it that was killed.
        with millrace.Volume("runs", home=self.home).open("/job/step-100/.metadata.tmp", "wb") as out:
            out.write(b"begun")
        millrace.torch.remove_checkpoint("runs:/job/step-100", home=self.home)
        self.assertEqual(self.checkpoints("runs:/job"), ["runs:/job/step-9", "runs:/job/step-10"])
        with self.assertRaisesRegex(millrace.UsageError, "holds more than one: step-"):
            millrace.torch.remove_checkpoint("runs:/job", home=self.home)
        with self.assertRaises(millrace.NotFoundError):
            millrace.torch.remove_checkpoint("runs:/job/step-100", home=self.home)

    def test_asynchronous_saves(self) -> None:
        self.finish(self.start("""
kept = state(5)
done = dcp.async_save(kept, storage_writer=writer("runs:/async/5", thread_count=2))
kept["shared"].zero_()
done.result(60)
check("runs:/async/5", 5)
"""))

    def test_a_save_replaces_another_as_a_whole(self) -> None:
        self.finish(self.start("""
dcp.save(state(1), storage_writer=writer("runs:/same"))
dcp.save(state(2), storage_writer=writer("runs:/same"))
check("runs:/same", 2)
try:
    dcp.save(state(3), storage_writer=writer("runs:/same", overwrite=False))
except dcp.api.CheckpointException as error:
    assert "a checkpoint is there already" in str(error), error
else:
    raise AssertionError("it was replaced")
check("runs:/same", 2)
"""))
        self.assertEqual(len(self.data("/same")), 3, "two files of data, and the metadata")

    def test_a_killed_save_is_no_checkpoint_and_damages_none(self) -> None:
        self.finish(self.start('dcp.save(state(1), storage_writer=writer("runs:/kill/1"))'))
        for folder, killed_in in (("runs:/kill/1", "finish"), ("runs:/kill/2", "write_data")):
            ranks = self.start(f"""
class Dying(millrace.torch.StorageWriter):
    def {killed_in}(self, *arguments, **options):
        if "{killed_in}" == "write_data" and rank == 0:
            super().write_data(*arguments)
        print("here", flush=True)
        sys.stdin.read()

dcp.save(state(7), storage_writer=Dying("{folder}", home=home))
""")
            told = ranks[0].stdout.readline()
            if told != "here\n":
                self.finish(ranks)
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
            for rank in ranks:
                rank.communicate(timeout=DEADLINE_S)
            self.assertGreater(len(self.data(folder.partition(":")[2])), 0)
            self.assertEqual(self.checkpoints("runs:/kill"), ["runs:/kill/1"])
        self.finish(self.start("""
check("runs:/kill/1", 1)
try:
    load("runs:/kill/2")
except dcp.api.CheckpointException as error:
    assert "load runs:/kill/2: no whole checkpoint is there" in str(error), error
else:
    raise AssertionError("it was loaded")
dcp.save(state(2), storage_writer=writer("runs:/kill/2"))
check("runs:/kill/2", 2)
"""))
        self.assertEqual(len(self.data("/kill/2")), 3, "two files of data, and the metadata")
        run(self.home, "fsck")

    def test_a_save_with_a_failed_thread_is_no_checkpoint(self) -> None:
        import torch.distributed.checkpoint as dcp

        import millrace.checkpoint
        import millrace.torch

        create, failed = millrace.checkpoint._Files.create_stream, threading.Event()

        def fail_in_thread(files: Any, path: Any, mode: str) -> Any:
            if mode == "wb" and threading.current_thread() is not threading.main_thread():
                failed.set()
                raise millrace.NoSpaceError("no space is left")
            self.assertTrue(failed.wait(DEADLINE_S))
            return create(files, path, mode)

        writer = millrace.torch.StorageWriter("runs:/threads/1", home=self.home, thread_count=2)
        state = {"a": self.torch.zeros(1000), "b": self.torch.zeros(1000)}
        with mock.patch.object(millrace.checkpoint._Files, "create_stream", fail_in_thread):
            with mock.patch.object(threading, "excepthook", lambda error: None):
                with self.assertRaisesRegex(BaseException, "a thread has failed to write its part"):
                    dcp.save(state, storage_writer=writer)
        self.assertEqual(self.checkpoints("runs:/threads"), [])
        dcp.save(state, storage_writer=writer)
        self.assertEqual(self.checkpoints("runs:/threads"), ["runs:/threads/1"])

    def test_ranks_that_do_not_meet_are_refused(self) -> None:
        import torch.distributed.checkpoint as dcp

        import millrace.torch

        writer = millrace.torch.StorageWriter("runs:/alone", home=self.home)
        with self.assertRaisesRegex(Exception, "use_collectives=False is not supported"):
            dcp.save({"step": 1}, storage_writer=writer, use_collectives=False)
        self.assertEqual(pickle.loads(pickle.dumps(writer.fs)).exists("runs:/alone"), False)


class OlderTorchTest(unittest.TestCase):
    def test_the_storage_says_which_version_it_needs(self) -> None:
        torch = torch_or_skip()
        import millrace.torch

        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4):
            self.assertTrue(millrace.torch.StorageWriter)
            return
        with self.assertRaisesRegex(millrace.UnavailableError, "needs PyTorch 2.4 or newer, this one is "):
            millrace.torch.StorageWriter
        with self.assertRaises(AttributeError):
            millrace.torch.nothing


if __name__ == "__main__":
    unittest.main()
