"""A home with a dataset for the tests, the program, and rows in the order of its feed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

import millrace

PROGRAM = os.environ.get("TEST_PROGRAM", "millrace")
DATASET = "digits@v1:/train"
ROWS = 1_000
# No test waits longer for another process.
DEADLINE_S = 120


def skip(name: str, reason: str) -> None:
    """Skips a test for this reason, or fails if MILLRACE_REQUIRE asks for what it needs.

    A skip is also a line of the file that MILLRACE_SKIPPED names.
    """
    if {name, "all"} & {part.strip() for part in os.environ.get("MILLRACE_REQUIRE", "").split(",")}:
        raise AssertionError(f"{reason}, and MILLRACE_REQUIRE asks for {name}")
    if file := os.environ.get("MILLRACE_SKIPPED"):
        with open(file, "a", encoding="utf-8") as out:
            out.write(f"skipped: {name}: {reason}\n")
    raise unittest.SkipTest(reason)


def require(module: str) -> None:
    """Skips a test without this module, or fails if MILLRACE_REQUIRE asks for it."""
    if importlib.util.find_spec(module) is None:
        skip(module, f"{module} is not installed")


def torch_or_skip() -> Any:
    """PyTorch; without it the test is skipped, or fails if MILLRACE_REQUIRE asks for it."""
    require("torch")
    import warnings

    with warnings.catch_warnings():
        # A PyTorch of the system may be older than this NumPy, which it then does without.
        warnings.simplefilter("ignore")
        stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            import torch

            torch.arange(1)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(null)
    return torch


def torch2_or_skip(minor: int, reason: str) -> Any:
    """PyTorch 2 of this minor version or newer; MILLRACE_REQUIRE asks for it as ``torch2``."""
    torch = torch_or_skip()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, minor):
        skip("torch2", f"PyTorch {torch.__version__}: {reason}")
    return torch


def rows(first: int, count: int) -> pyarrow.Table:
    """Rows whose columns follow from their id."""
    ids = numpy.arange(first, first + count, dtype=numpy.int64)
    pixels = (ids[:, None] * 4 + numpy.arange(4)).astype(numpy.float32)
    return pyarrow.table(
        {
            "id": ids,
            "pixels": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(pixels.reshape(-1)), 4),
            "label": (ids % 10).astype(numpy.uint8),
            "even": ids % 2 == 0,
            "at": pyarrow.array(ids * 1_000, pyarrow.timestamp("us")),
            "day": pyarrow.array((ids % 20_000).astype(numpy.int32), pyarrow.date32()),
            "name": pyarrow.array([None if i % 7 == 0 else f"row {i}" for i in ids], pyarrow.string()),
            "tokens": pyarrow.array([list(range(i % 5)) for i in ids], pyarrow.list_(pyarrow.int32())),
            "kind": pyarrow.array([f"kind {i % 3}" for i in ids]).dictionary_encode(),
            "score": pyarrow.array([None if i == 500 else i / 2 for i in ids], pyarrow.float64()),
        }
    )


TENSORS = ["id", "pixels", "label", "even"]


def run(home: str, *arguments: str) -> str:
    """Runs the program."""
    done = subprocess.run([PROGRAM, "--home", home, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise AssertionError(f"millrace {arguments}: {done.stderr}")
    return done.stdout


def error_of(home: str, *arguments: str) -> str:
    """What the program says of an error."""
    done = subprocess.run([PROGRAM, "--home", home, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().removeprefix("millrace: ")


class HomeCase(unittest.TestCase):
    """Tests on one home with the dataset ``digits@v1:/train`` of 1,000 rows in five files."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.home = tempfile.mkdtemp(prefix="millrace-test-")
        cls.addClassCleanup(shutil.rmtree, cls.home)
        cls.addClassCleanup(millrace.close)
        volume = millrace.Volume("digits", create=True, home=cls.home)
        first = 0
        for file, sizes in enumerate([[120, 80], [1, 199], [200], [50, 50, 100], [200]]):
            with volume.open(f"/train/{file}.parquet", "wb") as out:
                with pyarrow.parquet.ParquetWriter(out, rows(0, 1).schema) as writer:
                    for size in sizes:
                        writer.write_table(rows(first, size))
                        first += size
        assert first == ROWS
        volume.snapshot("v1")

    def feed(self, **arguments: Any) -> millrace.Feed:
        return millrace.Feed(DATASET, home=self.home, **{"columns": ["id"], **arguments})

    def order(self, batch_rows: int = 128, epochs: int = 1, seed: int = 0) -> list[int]:
        """The ids of whole epochs in the order of ``millrace feed``."""
        batches = -(-ROWS * epochs // batch_rows)
        printed = run(
            self.home, "--json", "feed", DATASET, "--batches", str(batches), "--batch-rows", str(batch_rows),
            "--seed", str(seed),
        )
        ids = [json.loads(line)["id"] for line in printed.splitlines() if line.startswith("{")]
        assert len(ids) == batches * batch_rows
        return ids[: ROWS * epochs]


def digest(ids: Iterable[int]) -> str:
    """SHA-256 of ordered row ids."""
    return hashlib.sha256(b"".join(int(i).to_bytes(8, "little") for i in ids)).hexdigest()


def ids_of(batch: Any) -> list[int]:
    return [int(i) for i in batch["id"]]


def together(feeds: Sequence[Iterable[Any]]) -> list[int]:
    """The ids that the readers of one feed get, batch by batch in the order of the ranks."""
    ids: list[int] = []
    for batches in zip(*feeds, strict=True):
        for batch in batches:
            ids += ids_of(batch)
    return ids


def python(home: str, code: str, arguments: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """A process that runs code beside this module, with ``HOME_DIR`` as the home."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HOME_DIR": home, "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
