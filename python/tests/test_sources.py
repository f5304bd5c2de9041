"""Feeds of JSON lines, CSV, tar shards and folders of files."""

from __future__ import annotations

import csv
import io
import json
import pickle
import tarfile
import unittest

import numpy

import millrace
from support import HomeCase

ROWS = 500


def lines() -> bytes:
    rows = [{"id": i, "label": i % 10, "x": [i, i / 2], "name": None if i % 7 == 0 else f"row {i}"} for i in range(ROWS)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "label", "note"])
    writer.writerows([i, i % 10, f'says "{i}",\nin two lines'] for i in range(ROWS))
    return text.getvalue().encode()


def shard(ids: range) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for i in ids:
            members = {"jpg": bytes([i % 256]) * 700, "cls": str(i % 10).encode(), "json": json.dumps({"id": i}).encode()}
            for extension, content in members.items():
                info = tarfile.TarInfo(f"images/{i:05}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


class SourcesTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        volume = millrace.Volume("sources", create=True, home=cls.home)
        files = {"lines/a.jsonl": lines(), "tables/a.csv": table()}
        files |= {"shards/0.tar": shard(range(200)), "shards/1.tar": shard(range(200, ROWS))}
        files |= {f"photos/{('cat', 'dog', 'axolotl')[i % 3]}/{i:03}.jpg": b"photo %d" % i for i in range(60)}
        for path, content in files.items():
            with volume.open(f"/{path}", "wb") as out:
                out.write(content)
        volume.snapshot("v1")

    def read(self, path: str, **arguments: object) -> millrace.Feed:
        return millrace.Feed(path, home=self.home, **{"batch_rows": 32, "seed": 5, **arguments})

    def test_json_lines_and_csv_are_arrays(self) -> None:
        for path, columns in [("sources@v1:/lines", ["id", "label", "x"]), ("sources@v1:/tables", ["id", "label", "note"])]:
            batches = list(self.read(path, columns=columns))
            ids = numpy.concatenate([batch["id"] for batch in batches])
            self.assertEqual(ids.dtype, numpy.int64)
            self.assertEqual(sorted(ids.tolist()), list(range(ROWS)))
            self.assertNotEqual(ids.tolist(), sorted(ids.tolist()))
            for batch in batches:
                numpy.testing.assert_array_equal(batch["label"], batch["id"] % 10)
                if "x" in batch:
                    numpy.testing.assert_array_equal(numpy.stack(batch["x"])[:, 1], batch["id"] / 2)
                else:
                    notes = [f'says "{i}",\nin two lines' for i in batch["id"]]
                    self.assertEqual(list(batch["note"]), notes)

    def test_ranks_share_the_rows_and_a_position_is_kept(self) -> None:
        whole = [batch["id"].tolist() for batch in self.read("sources@v1:/lines", columns=["id"])]
        ranks = [self.read("sources@v1:/lines", columns=["id"], rank=rank, world=3) for rank in range(3)]
        parts = [sum((batch["id"].tolist() for batch in batches), []) for batches in zip(*ranks, strict=True)]
        self.assertEqual(parts, whole)
        feed = self.read("sources@v1:/lines", columns=["id"])
        for _ in range(5):
            next(feed)
        resumed = pickle.loads(pickle.dumps(feed))
        self.assertEqual([batch["id"].tolist() for batch in resumed], whole[5:])

    def test_tar_members_are_columns(self) -> None:
        seen = []
        for batch in self.read("sources@v1:/shards", columns=["__key__", "jpg", "cls"]):
            for key, image, label in zip(batch["__key__"], batch["jpg"], batch["cls"].tolist(), strict=True):
                number = int(key.removeprefix("images/"))
                self.assertEqual((bytes(image), label), (bytes([number % 256]) * 700, number % 10))
                seen.append(number)
        self.assertEqual(sorted(seen), list(range(ROWS)))
        arrow = next(self.read("sources@v1:/shards", columns=["json", "__key__"], format="arrow"))
        keys = [f"images/{value['id']:05}" for value in arrow.column("json").to_pylist()]
        self.assertEqual(arrow.column("__key__").to_pylist(), keys)

    def test_folders_have_the_labels_of_torchvision(self) -> None:
        feed = self.read("folder:sources@v1:/photos", batch_rows=7)
        self.assertEqual(feed.schema, {"path": "Utf8", "data": "Binary", "label": "Int64", "class": "Utf8"})
        self.assertEqual(feed.dataset, "folder:sources@v1:/photos")
        labels = {"axolotl": 0, "cat": 1, "dog": 2}
        seen = []
        for batch in feed:
            for path, data, label, name in zip(*(batch[key] for key in ("path", "data", "label", "class")), strict=True):
                number = int(path.rsplit("/", 1)[1].removesuffix(".jpg"))
                self.assertEqual((bytes(data), int(label), path.split("/")[0]), (b"photo %d" % number, labels[name], name))
                seen.append(number)
        self.assertEqual(sorted(seen), list(range(60)))

    def test_what_cannot_be_read_says_why(self) -> None:
        with self.assertRaises(millrace.NotFoundError) as caught:
            self.read("sources@v1:/photos")
        self.assertIn("folder:VOLUME@SNAPSHOT:/PATH", str(caught.exception))
        with self.assertRaises(millrace.Error) as caught:
            self.read("sources@v1:/")
        self.assertIn("of one format", str(caught.exception))
        with self.assertRaises(millrace.UsageError) as caught:
            self.read("zip:sources@v1:/photos")
        self.assertIn('format "zip" is unknown', str(caught.exception))


if __name__ == "__main__":
    unittest.main()
