"""Tokens packed into sequences: against a packer token by token, for any world, resume and format."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import unittest
from collections import Counter
from typing import Any

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from support import HomeCase, run, torch_or_skip

EOS, PAD = 1_000_001, 1_000_002
# Documents of a row group; nulls and empty lists among them, and one longer than several sequences.
GROUPS = [
    [[*range(1_000 * group + 40 * row, 1_000 * group + 40 * row + (row * 7) % 23)] for row in range(20)]
    for group in range(5)
]
GROUPS[1][4], GROUPS[2][0], GROUPS[3] = None, list(range(50_000, 50_400)), [[], None]
DOCUMENTS = [document for group in GROUPS for document in group if document]


def add(digest: Any, batch: dict[str, numpy.ndarray]) -> None:
    """Adds sequence by sequence, however they are divided into batches."""
    for sequence in zip(batch["ids"], batch["segment_ids"], batch["position_ids"]):
        for values in sequence:
            digest.update(values.tobytes())


class TokensTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        volume = millrace.Volume("web", create=True, home=cls.home)
        schema = pyarrow.schema([("ids", pyarrow.list_(pyarrow.int64())), ("small", pyarrow.list_(pyarrow.uint16()))])
        with volume.open("/train/0.parquet", "wb") as out:
            with pyarrow.parquet.ParquetWriter(out, schema) as writer:
                for group in GROUPS:
                    small = [None if document is None else document[:30] for document in group]
                    writer.write_table(pyarrow.table({"ids": group, "small": small}, schema=schema))
        volume.snapshot("v1")

    def feed(self, length: int = 32, column: str = "ids", **arguments: Any) -> millrace.Feed:
        options = {name: arguments.pop(name) for name in ("bos", "eos", "pad", "labels") if name in arguments}
        tokens = millrace.Tokens(column, length, **options)
        return millrace.Feed("web@v1:/train", tokens=tokens, home=self.home, **{"batch_rows": 6, **arguments})

    def digest(self, feeds: list[millrace.Feed]) -> str:
        """Of the sequences in the order of the slots."""
        digest = hashlib.sha256()
        # The last batch need not have rows for all ranks.
        for parts in itertools.zip_longest(*feeds):
            for part in filter(None, parts):
                add(digest, part)
        return digest.hexdigest()

    def test_every_token_comes_once_and_only_last_sequences_are_padded(self) -> None:
        for length in (1, 9, 32, 1_000):
            feed = self.feed(length, eos=EOS, pad=PAD, labels="next")
            seen, labels, rows = Counter(), Counter(), 0
            for batch in feed:
                rows += len(batch["ids"])
                self.assertEqual(batch["ids"].shape, (len(batch["ids"]), length))
                self.assertEqual((batch["ids"].dtype, batch["labels"].dtype), (numpy.int64, numpy.int64))
                self.assertTrue(((batch["segment_ids"] == 0) == (batch["ids"] == PAD)).all())
                seen.update(batch["ids"].ravel().tolist())
                labels.update(batch["labels"].ravel().tolist())
                self.check_segments(batch)
            tokens = Counter(token for document in DOCUMENTS for token in document)
            full = sum(len(document) + 1 for document in DOCUMENTS)
            padding = seen.pop(PAD, 0)
            self.assertEqual(rows, feed.rows)
            self.assertEqual(full + padding, rows * length)
            self.assertLess(padding, length * len(GROUPS))
            self.assertEqual(seen.pop(EOS), len(DOCUMENTS))
            self.assertEqual(seen, tokens)
            firsts = [document[0] for document in DOCUMENTS]
            self.assertEqual(labels.pop(-100), padding + len(DOCUMENTS))
            self.assertEqual(labels.pop(EOS), len(DOCUMENTS))
            self.assertEqual(labels, tokens - Counter(firsts))

    def check_segments(self, batch: dict[str, numpy.ndarray]) -> None:
        for ids, segments, positions, labels in zip(*(batch[name] for name in ("ids", "segment_ids", "position_ids", "labels"))):
            for at in range(1, len(ids)):
                if segments[at] != 0 and segments[at] == segments[at - 1]:
                    self.assertEqual(positions[at], positions[at - 1] + 1)
                    self.assertEqual(labels[at - 1], ids[at])
                elif segments[at] != 0:
                    self.assertEqual((segments[at], positions[at]), (segments[at - 1] + 1, 0))

    def test_any_world_thread_and_resume_reads_the_same_sequences(self) -> None:
        whole = self.digest([self.feed(epochs=2)])
        for world in (2, 3, 5, 8, 16):
            feeds = [self.feed(epochs=2, rank=rank, world=world) for rank in range(world)]
            self.assertEqual(self.digest(feeds), whole, world)
        # A run that stops after each batch, with another world afterwards.
        feed, digest, taken = self.feed(epochs=2), hashlib.sha256(), 0
        while True:
            state = feed.state_dict()
            self.assertLessEqual(len(json.dumps(state)), 128)
            feeds = [self.feed(epochs=2, rank=rank, world=1 + taken % 4) for rank in range(1 + taken % 4)]
            for part in feeds:
                part.load_state_dict(state)
                batch = next(part, None)
                if batch is None:
                    break
                add(digest, batch)
            else:
                feed, taken = feeds[0], taken + 1
                continue
            break
        self.assertEqual(digest.hexdigest(), whole)
        self.assertEqual(self.digest([pickle.loads(pickle.dumps(self.feed(epochs=2)))]), whole)

    def test_each_epoch_packs_other_documents_together(self) -> None:
        packed = [{tuple(row) for batch in feed for row in batch["ids"].tolist()} for feed in [self.feed()] for _ in range(2)]
        self.assertNotEqual(packed[0], packed[1])

    def test_small_integers_become_32_bits_in_every_format(self) -> None:
        batch = next(self.feed(column="small", labels="same", format="arrow"))
        self.assertEqual(batch.schema.names, ["small", "segment_ids", "position_ids", "labels"])
        self.assertEqual(str(batch.schema.field("small").type), "fixed_size_list<item: int32 not null>[32]")
        torch = torch_or_skip()
        tensors = next(self.feed(column="small", labels="same", format="torch"))
        self.assertEqual(tensors["small"].shape, (6, 32))
        self.assertEqual((tensors["small"].dtype, tensors["labels"].dtype), (torch.int32, torch.int64))
        first = tensors["position_ids"] == 0
        self.assertTrue(bool((tensors["labels"][~first] == tensors["small"][~first]).all()))

    def test_a_loader_with_workers_reads_the_same_sequences(self) -> None:
        torch = torch_or_skip()
        from millrace.torch import FeedDataset

        tokens = millrace.Tokens("ids", 32)
        dataset = FeedDataset("web@v1:/train", tokens=tokens, batch_rows=6, home=self.home)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        found = [batch["ids"].tolist() for batch in loader]
        self.assertEqual(found, [batch["ids"].tolist() for batch in self.feed()])

    def test_a_mixture_mixes_sequences(self) -> None:
        volume = millrace.Volume("books", create=True, home=self.home)
        with volume.open("/train/0.parquet", "wb") as out:
            table = pyarrow.table({"ids": [[7] * 640], "small": [[7]]})
            pyarrow.parquet.write_table(table, out)
        volume.snapshot("v1")
        mixture = millrace.Mixture({"web@v1:/train": 1, "books@v1:/train": 1})
        batch = next(millrace.Feed(mixture, tokens=millrace.Tokens("ids", 32), batch_rows=8, home=self.home))
        self.assertEqual(int((batch["ids"] == 7).all(axis=1).sum()), 4)

    def test_the_command_reads_the_same_sequences_and_shows_the_padding(self) -> None:
        flags = ["web@v1:/train", "--tokens", "ids", "--length", "32", "--batch-rows", "6"]
        plan = json.loads(run(self.home, "--json", "feed", "plan", *flags))
        feed = self.feed()
        tokens = sum(map(len, DOCUMENTS))
        padding = feed.rows * 32 - tokens
        expected = {"column": "ids", "length": 32, "documents": len(DOCUMENTS), "tokens": tokens, "padding": padding}
        self.assertEqual((plan["rows"], plan["packing"]), (feed.rows, expected))
        lines = run(self.home, "--json", "feed", *flags, "--epoch", "0").splitlines()
        printed = [json.loads(line)["ids"] for line in lines if line.startswith("{")]
        self.assertEqual(printed, [row for batch in feed for row in batch["ids"].tolist()])
        verified = json.loads(run(self.home, "--json", "feed", "verify", *flags, "--readers", "3"))
        self.assertEqual(verified["rows"], feed.rows)

    def test_errors_name_the_column_and_the_option(self) -> None:
        for arguments, part in [
            ({"length": 0}, "length is 0"),
            ({"length": 2.5}, "length is 2.5"),
            ({"eos": -1}, "eos is -1"),
            ({"bos": 1 << 63}, "bos is 9223372036854775808"),
            ({"labels": "shifted"}, "labels is 'shifted'"),
            ({"column": "small", "eos": 1 << 31}, "eos is 2147483648; tokens of List(UInt16"),
            ({"column": "text"}, '"text" is not in the dataset'),
            ({"columns": ["ids"]}, "leave columns and images out"),
            ({"pad": True}, "pad is True"),
        ]:
            with self.assertRaisesRegex(millrace.Error, part.replace("(", r"\(")):
                self.feed(**arguments)
        with self.assertRaisesRegex(millrace.UsageError, "pass a millrace.Tokens"):
            millrace.Feed("web@v1:/train", tokens="ids", home=self.home)  # type: ignore[arg-type]
        state = self.feed().state_dict()
        with self.assertRaisesRegex(millrace.UsageError, "order"):
            self.feed(64).load_state_dict(state)


if __name__ == "__main__":
    unittest.main()
