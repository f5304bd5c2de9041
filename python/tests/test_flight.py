"""The feed over Arrow Flight: servers read by pyarrow's own client, and by ``millrace.flight.FlightFeed``."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy
import pyarrow
from pyarrow import flight

import millrace
from millrace.flight import FlightFeed, _array
from support import DATASET, DEADLINE_S, PROGRAM, ROWS, TENSORS, HomeCase, ids_of, run, together


class Server:
    """A server on a free port; killed at the end of the test."""

    def __init__(self, home: str, *arguments: str, config: str | None = None, at: str = "127.0.0.1:0") -> None:
        flags = [] if config is None else ["--config", config]
        self.process = subprocess.Popen(
            [PROGRAM, "--home", home, *flags, "--json", "feed", "serve", "--grpc", at, *arguments],
            stdout=subprocess.PIPE, text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = json.loads(line)["grpc"] if line else ""
        self.location = f"grpc://{self.address}"

    def end(self, by: int = signal.SIGTERM) -> int:
        self.process.send_signal(by)
        code = self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class FlightCase(HomeCase):
    def serve(self, *arguments: str, **options: Any) -> Server:
        server = Server(self.home, *(arguments or ("--dataset", "digits:/train")), **options)
        self.addCleanup(lambda: server.process.poll() is None and server.end(signal.SIGKILL))
        return server

    def flight_feed(self, *servers: Server, **arguments: Any) -> FlightFeed:
        locations = [server.location for server in servers]
        feed = FlightFeed(locations, DATASET, **{"columns": ["id"], "patience_s": 20, **arguments})
        self.addCleanup(feed.close)
        return feed


class ArrayTest(unittest.TestCase):
    def test_stored_tensors_are_those_of_a_feed_of_this_machine(self) -> None:
        tensors = numpy.arange(24, dtype=numpy.float32).reshape(4, 2, 3)
        stored = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(tensors)
        numpy.testing.assert_array_equal(_array("x", stored), tensors)
        turned = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(tensors.transpose(0, 2, 1))
        self.assertEqual(_array("x", turned).shape, (4, 6))
        rows = pyarrow.array([[0.0] * 6, None], stored.type.storage_type)
        with self.assertRaisesRegex(millrace.ConflictError, "'x' has a null in row 1"):
            _array("x", pyarrow.ExtensionArray.from_storage(stored.type, rows))


class ClientTest(FlightCase):
    """pyarrow's client, without this package."""

    def test_pyarrow_reads_each_row_once_from_the_endpoints_of_three_ranks(self) -> None:
        server = self.serve()
        with flight.FlightClient(server.location) as client:
            listed = [info.descriptor.path for info in client.list_flights()]
            self.assertEqual(listed, [[DATASET.encode()]])
            request = {"dataset": DATASET, "batch_rows": 64, "world": 3}
            info = client.get_flight_info(flight.FlightDescriptor.for_command(json.dumps(request)))
            self.assertEqual((info.total_records, len(info.endpoints)), (ROWS, 3))
            self.assertEqual([str(e.locations[0].uri, "utf-8") for e in info.endpoints], [server.location] * 3)
            ranks = []
            for endpoint in info.endpoints:
                reader = client.do_get(endpoint.ticket)
                self.assertEqual(reader.schema, info.schema)
                ranks.append([chunk for chunk in reader])
            states = [json.loads(chunk.app_metadata.to_pybytes()) for chunk in ranks[0]]
            self.assertEqual([state["rows"] for state in states], [*range(64, ROWS, 64), ROWS])
            ids = []
            for chunks in zip(*ranks, strict=True):
                for chunk in chunks:
                    ids += chunk.data.column("id").to_pylist()
            self.assertEqual(ids, self.order(64))
            table = client.do_get(info.endpoints[0].ticket).read_all()
            kinds = [f"kind {i % 3}" for i in table.column("id").to_pylist()]
            self.assertEqual(table.column("kind").to_pylist(), kinds)
            by_path = client.get_flight_info(flight.FlightDescriptor.for_path("digits@v1", "train"))
            self.assertEqual(by_path.total_records, ROWS)
            self.assertEqual(client.get_schema(by_path.descriptor).schema, info.schema)

    def test_errors_have_the_words_of_the_server(self) -> None:
        server = self.serve("--dataset", "digits:/train", "--streams", "1")
        with flight.FlightClient(server.location) as client:
            for request, kind, says in [
                ({"dataset": "digits@v1:/"}, flight.FlightUnauthorizedError, "does not expose"),
                ({"dataset": "digits@none:/train"}, pyarrow.ArrowKeyError, "does not exist"),
                ({"dataset": DATASET, "columns": ["none"]}, pyarrow.ArrowKeyError, "none"),
                ({"dataset": DATASET, "epochs": 0}, pyarrow.ArrowInvalid, "epochs is 0"),
            ]:
                with self.assertRaises(kind) as raised:
                    client.get_flight_info(flight.FlightDescriptor.for_command(json.dumps(request)))
                self.assertIn(says, str(raised.exception))
            with self.assertRaises(pyarrow.ArrowInvalid):
                client.do_get(flight.Ticket(b"mine")).read_all()


class FeedTest(FlightCase):
    """``FlightFeed``, which goes on at another server."""

    def test_batches_and_states_are_those_of_the_feed(self) -> None:
        server = self.serve()
        columns = [*TENSORS, "name", "tokens", "kind", "at"]
        ours = self.flight_feed(server, batch_rows=96, seed=5, epochs=2, format="numpy", columns=columns)
        local = self.feed(batch_rows=96, seed=5, epochs=2, columns=columns)
        self.assertEqual((ours.rows, ours.plan, ours.dataset, len(ours)), (local.rows, local.plan, DATASET, len(local)))
        for _ in range(2):
            count, batches = 0, len(local)
            for batch, expected in zip(ours, local, strict=True):
                self.assertEqual(list(batch), columns)
                for name in TENSORS:
                    numpy.testing.assert_array_equal(batch[name], expected[name])
                self.assertEqual(list(batch["name"]), list(expected["name"]))
                for row, other in zip(batch["tokens"], expected["tokens"]):
                    numpy.testing.assert_array_equal(row, other)
                count += 1
                self.assertEqual(ours.state_dict(), local.state_dict())
            self.assertEqual(count, batches)
            self.assertEqual(ours.state_dict(), local.state_dict())
        with self.assertRaisesRegex(millrace.ConflictError, "null"):
            next(self.flight_feed(server, format="numpy", columns=["score"], batch_rows=ROWS))

    def test_a_batch_lost_to_an_interrupt_is_read_again(self) -> None:
        server = self.serve()
        feed = self.flight_feed(server, batch_rows=64)
        first = next(feed)["id"].to_pylist()
        state, take = feed.state_dict(), feed._next_chunk

        def interrupted() -> Any:
            # As Ctrl-C between the arrival of a batch and its use.
            take()
            raise KeyboardInterrupt

        feed._next_chunk = interrupted
        with self.assertRaises(KeyboardInterrupt):
            next(feed)
        feed._next_chunk = take
        self.assertEqual(feed.state_dict(), state)
        self.assertEqual(first + [i for batch in feed for i in batch["id"].to_pylist()], self.order(64))

    def test_copies_of_a_feed_keep_its_snapshot(self) -> None:
        volume = millrace.Volume("digits", home=self.home)
        server = self.serve()
        feed = FlightFeed(server.location, "digits@latest:/train", columns=["id"], batch_rows=64)
        self.addCleanup(feed.close)
        state = feed.state_dict()
        volume.snapshot("later")
        copy = pickle.loads(pickle.dumps(feed))
        self.addCleanup(copy.close)
        self.assertEqual((copy.dataset, copy.state_dict()), (feed.dataset, state))
        copy.load_state_dict(state)

    def test_killed_servers_are_replaced_without_a_missing_or_repeated_row(self) -> None:
        first = self.serve()
        second = self.serve("--dataset", "digits:/train", "--peer", first.location)
        options = {"batch_rows": 500, "epochs": None, "world": 2, "columns": ["id", "pixels", "name"]}
        # Rank 0 begins at the second server, rank 1 at the first one, of which it learns there.
        feeds = [self.flight_feed(second, rank=rank, **options) for rank in range(2)]
        expected = [self.feed(rank=rank, **options) for rank in range(2)]
        # A killed server's last batches may still be on the way.
        for step in range(20_000):
            if step == 300:
                second.end(signal.SIGKILL)
            if step == 600:
                self.serve("--volume", "digits", at=second.address)
                first.end(signal.SIGKILL)
            for feed, local in zip(feeds, expected):
                numpy.testing.assert_array_equal(next(feed)["id"].to_numpy(), next(local)["id"])
            if step > 600 and {feed._servers.current() for feed in feeds} == {second.location}:
                break
        else:
            self.fail("a feed never left the killed server")
        self.assertEqual([feed.state_dict() for feed in feeds], [local.state_dict() for local in expected])

    def test_state_goes_on_in_the_feed_and_back(self) -> None:
        server = self.serve()
        feed = self.flight_feed(server, batch_rows=64)
        seen = [i for _ in range(3) for i in next(feed)["id"].to_pylist()]
        local = self.feed(batch_rows=64)
        local.load_state_dict(feed.state_dict())
        seen += ids_of(next(local)) + ids_of(next(local))
        other = self.flight_feed(server, batch_rows=128)
        other.load_state_dict(local.state_dict())
        copy = pickle.loads(pickle.dumps(other))
        self.addCleanup(copy.close)
        rest = [i for batch in other for i in batch["id"].to_pylist()]
        self.assertEqual(seen + rest, self.order(64))
        self.assertEqual([i for batch in copy for i in batch["id"].to_pylist()], rest)
        with self.assertRaisesRegex(millrace.Error, "order"):
            self.flight_feed(server, seed=1).load_state_dict(local.state_dict())
        with self.assertRaises(millrace.UsageError):
            feed.load_state_dict({"rows": 1})

    def test_readers_together_get_the_order_of_the_program(self) -> None:
        server = self.serve()
        feeds = [self.flight_feed(server, rank=rank, world=3, batch_rows=50, format="numpy") for rank in range(3)]
        self.assertEqual(together(feeds), self.order(50))
        mixture = millrace.Mixture({f"{DATASET}/0.parquet": 0.5, f"{DATASET}/1.parquet": 0.5})
        mixed = FlightFeed(server.location, mixture)
        self.addCleanup(mixed.close)
        local = millrace.Feed(mixture, home=self.home)
        self.assertEqual((mixed.plan, mixed.rows), (local.plan, local.rows))
        part = self.flight_feed(server, where="id < 100", splits={"a": 0.5, "b": 0.5}, split="a", split_by="id")
        local = self.feed(where="id < 100", splits={"a": 0.5, "b": 0.5}, split="a", split_by="id")
        self.assertEqual(part.plan, local.plan)

    def test_errors_name_the_servers_and_the_way_out(self) -> None:
        server = self.serve()
        for arguments, kind, says in [
            ({"columns": ["none"]}, millrace.NotFoundError, "none"),
            ({"where": "id >"}, millrace.UsageError, "where"),
            ({"rank": 2, "world": 2}, millrace.UsageError, "rank 2 of 2"),
            ({"format": "torch"}, millrace.UsageError, "arrow"),
        ]:
            with self.assertRaisesRegex(kind, says):
                self.flight_feed(server, **arguments)
        with self.assertRaisesRegex(millrace.UnavailableError, "does not expose"):
            FlightFeed(server.location, "digits@v1:/")
        with self.assertRaisesRegex(millrace.NotFoundError, "does not exist"):
            FlightFeed(server.location, "digits@none:/train")
        self.assertEqual(server.end(), 0)
        with self.assertRaisesRegex(millrace.UnavailableError, f"tried {server.location}"):
            self.flight_feed(server, patience_s=0.2)

    def test_tls_and_tokens(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="millrace-test-"))
        self.addCleanup(shutil.rmtree, folder)
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", folder / "server.key", "-out", folder / "server.pem", "-subj", "/CN=localhost",
                "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE",
            ],
            check=True, capture_output=True, timeout=DEADLINE_S,
        )
        made = json.loads(run(self.home, "--json", "serve", "token", "ci", "--models", "digits"))
        (folder / "tokens.txt").write_text(made["line"] + "\n")
        config = folder / "millrace.toml"
        config.write_text('[feed]\ntokens = "tokens.txt"\n[feed.tls]\ncertificate = "server.pem"\nkey = "server.key"\n')
        server = self.serve("--volume", "digits", config=str(config))
        location, ca = f"grpc+tls://{server.address}", folder / "server.pem"
        feed = FlightFeed(location, DATASET, columns=["id"], token=made["token"], ca=ca)
        self.addCleanup(feed.close)
        self.assertEqual([i for batch in feed for i in batch["id"].to_pylist()], self.order())
        with self.assertRaisesRegex(millrace.UnavailableError, "Bearer"):
            FlightFeed(location, DATASET, ca=ca)
        with self.assertRaisesRegex(millrace.UnavailableError, "does not know the token"):
            FlightFeed(location, DATASET, ca=ca, token="wrong")
        with self.assertRaises(millrace.UnavailableError):
            FlightFeed(f"grpc://{server.address}", DATASET, token=made["token"], patience_s=0.1)
        with self.assertRaises(millrace.UsageError):
            FlightFeed(location, DATASET, ca=folder / "none.pem")


if __name__ == "__main__":
    unittest.main()
