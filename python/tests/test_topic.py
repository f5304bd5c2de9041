"""A bounded topic as a feed: its end, ranks, resuming while records arrive, and errors."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

import millrace
from support import DEADLINE_S, HomeCase, PROGRAM, run, together


class TopicTest(HomeCase):
    """Tests on one topic of 600 records, to which tests add others."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        broker = subprocess.Popen(
            [PROGRAM, "--home", cls.home, "--json", "broker", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )

        def stop() -> None:
            broker.terminate()
            broker.wait(DEADLINE_S)
            assert broker.stdout is not None
            broker.stdout.close()

        cls.addClassCleanup(stop)
        assert broker.stdout is not None
        broker.stdout.readline()
        cls.produce("clicks", range(600))

    @classmethod
    def produce(cls, topic: str, ids: range) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "records.jsonl")
            file.write_text("".join(json.dumps({"id": i, "pixels": [i, i / 2]}) + "\n" for i in ids))
            run(cls.home, "produce", topic, os.fspath(file))

    def topic(self, dataset: str = "topic:clicks", **arguments: Any) -> millrace.Feed:
        return millrace.Feed(dataset, home=self.home, **{"columns": ["id"], **arguments})

    def test_a_topic_is_read_to_its_end_and_resumed_while_records_arrive(self) -> None:
        self.produce("growing", range(600))
        feed = self.topic("topic:growing", batch_rows=64, seed=3)
        whole = [batch["id"].tolist() for batch in feed]
        self.assertEqual(sorted(sum(whole, [])), list(range(600)))
        self.assertEqual(feed.rows, 600)

        half = self.topic("topic:growing", batch_rows=64, seed=3)
        for _ in range(4):
            next(half)
        state = json.loads(json.dumps(half.state_dict()))
        # 32 bytes a partition, as base64.
        partitions = feed.dataset.count(",") + 1
        self.assertEqual([len(text) for text in state["offsets"]], [-(-32 * partitions * 4 // 3)])
        self.produce("growing", range(600, 700))
        resumed = self.topic("topic:growing", batch_rows=64, seed=3)
        self.assertEqual(resumed.rows, 700)
        resumed.load_state_dict(state)
        self.assertEqual((resumed.rows, resumed.dataset), (600, feed.dataset))
        self.assertEqual([batch["id"].tolist() for batch in resumed], whole[4:])
        self.assertEqual([batch["id"].tolist() for batch in pickle.loads(pickle.dumps(half))], whole[4:])

    def test_ranks_agree_on_the_offsets_or_are_refused(self) -> None:
        whole = together([self.topic(batch_rows=60)])
        for world in (2, 3, 7):
            feeds = [self.topic(batch_rows=60, rank=rank, world=world) for rank in range(world)]
            with self.assertRaisesRegex(millrace.UsageError, "by itself"):
                next(feeds[0])
            with self.assertRaisesRegex(millrace.UsageError, "by itself"):
                pickle.dumps(feeds[0])
            state = feeds[0].state_dict()
            for feed in feeds:
                feed.load_state_dict(state)
            self.assertEqual(together(feeds), whole)
            named = [self.topic(feeds[0].dataset, batch_rows=60, rank=rank, world=world) for rank in range(world)]
            self.assertEqual(together(named), whole)

    def test_the_end_is_a_number_of_records_or_a_time(self) -> None:
        self.assertEqual(self.topic(until=100).rows, 100)
        self.assertEqual(self.topic(until="latest").rows, 600)
        now = datetime.datetime.now(datetime.timezone.utc)
        self.assertEqual(self.topic(until=now).rows, 600)
        batch = next(self.topic(columns=None, until=100))
        self.assertEqual(sorted(batch), ["_offset", "_partition", "_timestamp", "id", "pixels"])
        with self.assertRaisesRegex(millrace.UsageError, "cannot be read until"):
            self.topic(until=now + datetime.timedelta(days=1))
        with self.assertRaisesRegex(millrace.NotFoundError, "fewer than the 601"):
            self.topic(until=601)
        for until, text in ((now.replace(tzinfo=None), "time zone"), (True, "must be"), ("soon", "latest"), (0, "1 to")):
            with self.assertRaisesRegex(millrace.UsageError, text):
                self.topic(until=until)
        with self.assertRaisesRegex(millrace.UsageError, "until is for a topic"):
            self.topic("topic:clicks@latest", until=5)
        with self.assertRaisesRegex(millrace.UsageError, "until is for a topic"):
            self.feed(until=5)

    def test_what_cannot_be_resumed_says_why(self) -> None:
        state = self.topic().state_dict()
        for offsets, text in ((["x"], "no offsets of these"), ([], "no offsets of these"), ("AAAA", "no list"), ([1], "no list")):
            with self.assertRaisesRegex(millrace.UsageError, text):
                self.topic().load_state_dict({**state, "offsets": offsets})
        # A topic that was deleted and created again has other records at its offsets.
        self.produce("again", range(50))
        state = self.topic("topic:again").state_dict()
        run(self.home, "topic", "delete", "again", "--yes")
        self.produce("again", range(100, 150))
        feed = self.topic("topic:again")
        with self.assertRaisesRegex((millrace.ConflictError, millrace.NotFoundError), "topic again partition"):
            feed.load_state_dict(state)
            list(feed)


if __name__ == "__main__":
    unittest.main()
