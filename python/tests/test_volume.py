"""Files of volumes, and the file system of fsspec."""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import unittest
from typing import Any
from unittest import mock

import fsspec
import millrace
import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.fs
from support import DEADLINE_S, ROWS, HomeCase, error_of, python, require, run


class VolumeTest(HomeCase):
    def setUp(self) -> None:
        self.volume = millrace.Volume("files", create=True, home=self.home)

    def test_files_are_written_read_and_listed(self) -> None:
        data = bytes(range(256)) * 20_000
        with self.volume.open("/a/large", "wb") as out:
            self.assertEqual(out.write(memoryview(data)), len(data))
        with self.volume.open("/a/text", "w") as out:
            print("grüße", file=out)
        self.assertEqual([(e.path, e.type, e.size) for e in self.volume.list("/a")],
                         [("/a/large", "file", len(data)), ("/a/text", "file", 8)])
        self.assertEqual(self.volume.info("/a").type, "directory")
        with self.volume.open("/a/large") as file:
            self.assertEqual(file.read(), data)
            file.seek(-10, os.SEEK_END)
            self.assertEqual((file.tell(), file.read(100)), (len(data) - 10, data[-10:]))
        self.assertEqual(self.volume.open("/a/text", "r").read(), "grüße\n")
        self.volume.remove("/a/text")
        with self.assertRaises(FileNotFoundError):
            self.volume.open("/a/text")

    def test_a_snapshot_keeps_old_content_and_is_read_only(self) -> None:
        with self.volume.open("/kept", "wb") as out:
            out.write(b"old")
        taken = self.volume.snapshot("before")
        with self.volume.open("/kept", "wb") as out:
            out.write(b"new")
        self.assertEqual(self.volume.open("/kept").read(), b"new")
        self.assertEqual(self.volume.open("/kept", snapshot="before").read(), b"old")
        frozen = pickle.loads(pickle.dumps(millrace.Volume("files@latest", home=self.home)))
        self.assertEqual((frozen.name, frozen.open("/kept").read()), ("files@before", b"old"))
        self.assertEqual(self.volume.snapshots(), [taken])
        listed = json.loads(run(self.home, "--json", "snapshot", "list", "files"))
        self.assertEqual([found["name"] for found in listed], ["before"])
        with self.assertRaisesRegex(millrace.UsageError, "^open .*@.* is a snapshot, which is read-only; write to the live"):
            frozen.open("/kept", "wb")

    def test_a_file_appears_when_it_is_closed_or_never(self) -> None:
        with self.volume.open("/whole", "wb") as out:
            out.write(b"old")
        for mode, data in (("wb", b"half"), ("w", "half")):
            with self.assertRaises(KeyError), self.volume.open("/whole", mode) as out:
                out.write(data)
                raise KeyError
            left = self.volume.open("/whole", mode)
            left.write(data)
            del left
            out = self.volume.open("/whole", mode)
            out.write(data)
            self.assertEqual(self.volume.open("/whole").read(), b"old")
            (out if mode == "wb" else out.buffer).discard()
        self.assertEqual(self.volume.open("/whole").read(), b"old")

    def test_arrays_of_any_shape_are_written(self) -> None:
        volume = millrace.Volume("files", create=True, home=self.home)
        with volume.open("/arrays", "wb") as out:
            for array in (numpy.zeros((0, 3)), numpy.arange(6, dtype=numpy.uint8).reshape(2, 3), numpy.float32(1.0), b""):
                self.assertEqual(out.write(array), memoryview(array).nbytes)
        with volume.open("/arrays") as file:
            self.assertEqual(file.read(), bytes(range(6)) + numpy.float32(1.0).tobytes())

    def test_a_failed_write_gives_the_file_up(self) -> None:
        out = self.volume.open("/part", "wb")
        out.write(bytes(2 << 20))
        with self.assertRaises(TypeError):
            out.write("text")
        out.write(bytes(1))

        class Refusing:
            def __init__(self, file: Any) -> None:
                self.file = file

            def append(self, data: bytes) -> None:
                raise millrace.NoSpaceError("no space")

            def discard(self) -> None:
                self.file.discard()

        out._file = Refusing(out._file)
        with self.assertRaises(millrace.NoSpaceError):
            out.write(bytes(2 << 20))
        out.close()
        self.assertNotIn("/part", [entry.path for entry in self.volume.list("/")])

    def test_a_killed_writer_leaves_nothing(self) -> None:
        code = """
import os, sys
import millrace
out = millrace.Volume("files", home=os.environ["HOME_DIR"]).open("/killed", "wb")
out.write(bytes(3 << 20))
print("written", flush=True)
sys.stdin.read()
"""
        writer = python(self.home, code, stdin=-1)
        self.assertEqual(writer.stdout.readline(), "written\n")
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=DEADLINE_S)
        self.assertNotIn("/killed", [entry.path for entry in self.volume.list("/")])
        millrace.close()
        run(self.home, "gc")
        run(self.home, "fsck")

    def test_errors_are_those_of_the_command(self) -> None:
        with self.assertRaises(millrace.NotFoundError) as caught:
            millrace.Volume("nothing", home=self.home)
        self.assertEqual(str(caught.exception), error_of(self.home, "ls", "nothing"))
        with self.assertRaises(millrace.ConflictError):
            self.volume.snapshot("twice")
            self.volume.snapshot("twice")
        with self.assertRaises(millrace.UsageError):
            self.volume.open("/x", "a")
        with self.assertRaisesRegex(millrace.Error, "is a directory"):
            millrace.Volume("digits", home=self.home).open("/train")


class FsspecTest(HomeCase):
    def setUp(self) -> None:
        millrace.Volume("files", create=True, home=self.home)
        self.fs = fsspec.filesystem("millrace", home=self.home)

    def test_the_protocol_is_registered(self) -> None:
        self.assertEqual(type(self.fs).__module__, "millrace.fsspec")
        url = "millrace://digits@v1/train/0.parquet"
        with fsspec.open(url, home=self.home) as file:
            self.assertEqual(file.read(4), b"PAR1")

    def test_paths_are_listed_found_and_removed(self) -> None:
        self.assertEqual(self.fs.ls("millrace://digits@v1/", detail=False), ["digits@v1/train"])
        self.assertEqual(len(self.fs.find("digits@v1")), 5)
        self.assertEqual(self.fs.glob("digits@v1/train/[01].*"), ["digits@v1/train/0.parquet", "digits@v1/train/1.parquet"])
        self.assertTrue(self.fs.isdir("digits@v1/train") and not self.fs.exists("digits@v1/nothing"))
        with self.fs.open("files/a/b", "w") as out:
            out.write("text")
        self.assertEqual(self.fs.cat("files/a/b"), b"text")
        self.fs.mv_file("files/a/b", "files/a/c")
        self.fs.mv("files/a/c", "files/a/d")
        self.fs.cp("files/a/d", "files/a/e")
        self.assertEqual(self.fs.ls("files/a", detail=False), ["files/a/d", "files/a/e"])
        self.assertEqual(self.fs.read_block("files/a/e", 1, 2), b"ex")
        self.assertEqual(self.fs.cat_file("files/a/e", start=-2), b"xt")
        self.assertFalse(self.fs.isdir("files/a/e/below") or self.fs.isdir(""))
        self.fs.rm("files/a", recursive=True)
        self.assertFalse(self.fs.exists("files/a"))

    def test_files_that_would_never_appear_are_refused(self) -> None:
        with self.assertRaisesRegex(millrace.UsageError, "no colon behind the volume; write millrace://digits@v1/train"):
            self.fs.open("digits@v1:/train/0.parquet")
        with self.assertRaisesRegex(millrace.UsageError, "fsspec.open"):
            self.fs.open("files/x.gz", "wb", compression="gzip")
        with fsspec.open("millrace://files/x.gz", "wb", compression="gzip", home=self.home) as out:
            out.write(b"packed")
        with fsspec.open("millrace://files/x.gz", "rb", compression="gzip", home=self.home) as file:
            self.assertEqual(file.read(), b"packed")

    def test_a_transaction_makes_files_visible_at_its_end(self) -> None:
        with self.fs.transaction:
            with self.fs.open("files/late", "wb") as out:
                out.write(b"late")
            self.assertFalse(self.fs.exists("files/late"))
            left = self.fs.open("files/left", "wb")
            left.write(b"left open")
        self.assertEqual(self.fs.cat("files/late"), b"late")
        self.assertEqual(self.fs.cat("files/left"), b"left open")

    def test_pyarrow_reads_and_writes_datasets(self) -> None:
        fs = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(self.fs))
        read = pyarrow.dataset.dataset("digits@v1/train", filesystem=fs).to_table(columns=["id"])
        self.assertEqual(sorted(read["id"].to_pylist()), list(range(ROWS)))
        pyarrow.dataset.write_dataset(read, "files/copy", filesystem=fs, format="parquet")
        feed = millrace.Feed("files:/copy", home=self.home)
        self.assertEqual(feed.rows, ROWS)

    def test_pandas_reads_and_writes_by_url(self) -> None:
        require("pandas")
        import pandas

        options = {"home": self.home}
        read = pandas.read_parquet("millrace://digits@v1/train/1.parquet", storage_options=options)
        read[["id"]].to_csv("millrace://files/ids.csv", storage_options=options, index=False)
        again = pandas.read_csv("millrace://files/ids.csv", storage_options=options)
        self.assertEqual(again["id"].tolist(), read["id"].tolist())

    def test_duckdb_reads_a_registered_file_system(self) -> None:
        require("duckdb")
        import duckdb

        with duckdb.connect() as connection:
            connection.register_filesystem(self.fs)
            query = "SELECT count(*), sum(id) FROM read_parquet('millrace://digits@v1/train/*.parquet')"
            self.assertEqual(connection.execute(query).fetchone(), (ROWS, ROWS * (ROWS - 1) // 2))
            connection.execute("COPY (SELECT 7 AS id) TO 'millrace://files/duck.csv'")
        self.assertEqual(self.fs.cat("files/duck.csv").split(), [b"id", b"7"])

    def test_polars_reads_and_writes_open_files(self) -> None:
        require("polars")
        import polars

        with self.fs.open("digits@v1/train/1.parquet") as file:
            read = polars.read_parquet(file, columns=["id"])
        with self.fs.open("files/polars.parquet", "wb") as file:
            read.write_parquet(file)
        with self.fs.open("files/polars.parquet") as file:
            again = polars.read_parquet(file)
        self.assertEqual(again["id"].to_list(), list(range(200, 400)))

    def test_hugging_face_datasets_read_by_url(self) -> None:
        require("datasets")
        with tempfile.TemporaryDirectory(prefix="millrace-datasets-") as cache:
            code = """
import os
from datasets import load_dataset
read = load_dataset("parquet", data_files="millrace://digits@v1/train/1.parquet", split="train", columns=["id"],
                    storage_options={"home": os.environ["HOME_DIR"]}, streaming=True)
print(sum(row["id"] for row in read))
"""
            with mock.patch.dict(os.environ, {"HF_HOME": cache, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}):
                process = python(self.home, code)
                printed, errors = process.communicate(timeout=DEADLINE_S)
        self.assertEqual((process.returncode, printed.strip()), (0, str(sum(range(200, 400)))), errors)


if __name__ == "__main__":
    unittest.main()
