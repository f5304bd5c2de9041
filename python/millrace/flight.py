"""A feed that servers read and decode: batches of ``millrace feed serve`` over Arrow Flight."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from pyarrow import flight

from millrace.errors import ConflictError, CorruptError, Error, NotFoundError, UnavailableError, UsageError
from millrace.feed import Mixture, _epoch_rows, _fraction, _images, _integer, _is_place, _shard
from millrace.image import Image

__all__ = ["FlightFeed"]

# The location that stands for the connection of the call, by the Flight specification.
_SAME_CONNECTION = "arrow-flight-reuse-connection:"
# How soon a client notices that a machine is gone.
_KEEPALIVE_MS = 20_000
# Pauses between attempts, once all servers have failed: doubled up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class FlightFeed:
    """Batches of a dataset at a snapshot, read and decoded by ``millrace feed serve`` on this or other machines.

    The batches, their order and the state are those of :class:`millrace.Feed` with the same arguments: a job can change
    from one to the other. A server that ends or dies is replaced by another one, from the state of the last batch, so
    that no row is missing or repeated. One thread at a time may iterate. Start processes by ``spawn``: gRPC does not
    support a fork while a connection is open.

    :param servers: the location of a server, or of several, for example ``grpc://feed-1:8815`` or
        ``grpc+tls://feed-1.example.org:8815``. A server names the others that it knows.
    :param dataset: ``VOLUME@SNAPSHOT:/PATH`` or ``VOLUME@latest:/PATH``, or a :class:`millrace.Mixture`; the servers
        must expose it.
    :param format: ``"arrow"``, the default: ``pyarrow.RecordBatch``, without a copy. ``"numpy"``: dictionaries of
        arrays, as :class:`millrace.Feed` has them, where a null in a column of numbers is an error. No ``"torch"``.
    :param token: the bearer token, for servers that ask for one.
    :param ca: path of a PEM file with the authorities of the servers' certificates; those of the system by default.
    :param certificate: path of a PEM file with this client's certificate, for servers with ``client_ca``.
    :param key: path of a PEM file with its private key.
    :param patience_s: how long to try without any server that answers, in seconds, before an iteration fails.

    The other arguments are those of :class:`millrace.Feed`. It has no ``until``, ``pad``, ``tokens``, ``buckets``,
    ``device``, ``share_cache`` and ``home``.

    :raises millrace.Error: :class:`millrace.UnavailableError` when no server answers, or refuses the token;
        :class:`millrace.NotFoundError` for a dataset that does not exist; :class:`millrace.UsageError` for arguments
        that do not fit.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        dataset: str | Mixture,
        *,
        batch_rows: int = 128,
        epochs: int | None = 1,
        rows_per_epoch: int | float | None = None,
        seed: int = 0,
        rank: int | str | None = None,
        world: int | None = None,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        splits: Mapping[str, Any] | None = None,
        split: str | None = None,
        split_by: str | Sequence[str] | None = None,
        images: Mapping[str, Image] | None = None,
        keys: str | None = None,
        format: str = "arrow",
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        if format not in ("arrow", "numpy"):
            raise UsageError(f'format is {format!r}; it must be "arrow" or "numpy"')
        if isinstance(columns, str):
            raise UsageError(f"columns is the text {columns!r}; pass a list of names")
        if not isinstance(patience_s, (int, float)) or not 0 <= patience_s <= 1e6:
            raise UsageError(f"patience_s is {patience_s!r}; it must be 0 to 1000000 seconds")
        servers = [servers] if isinstance(servers, str) else list(servers)
        if not servers or not all(isinstance(server, str) and "://" in server for server in servers):
            raise UsageError(f"servers is {servers!r}; name locations, for example grpc://127.0.0.1:8815")
        rank, world = _shard(rank, world)
        mixture = dataset if isinstance(dataset, Mixture) else None
        split_keys = [split_by] if isinstance(split_by, str) else list(split_by or ())
        request = {
            "dataset": dataset if mixture is None else None,
            "mixture": None if mixture is None else mixture.weights,
            "until": None if mixture is None else mixture.until,
            "batch_rows": _integer("batch_rows", batch_rows, 0),
            "seed": _integer("seed", seed, 0),
            "rank": rank,
            "world": world,
            "rows_per_epoch": None if rows_per_epoch is None else _epoch_rows(rows_per_epoch),
            "columns": None if columns is None else list(columns),
            "where": where,
            "splits": None if splits is None else {name: _fraction(name, part) for name, part in splits.items()},
            "split": split,
            "split_by": split_keys or None,
            "images": {column: json.loads(image) for column, image in _images(images)} or None,
            "keys": keys,
        }
        self._request = {name: value for name, value in request.items() if value is not None}
        # Null reads without end.
        endless = ", or None to read without end"
        self._request["epochs"] = None if epochs is None else _integer("epochs", epochs, 1, endless)
        self._arguments = (servers, format, token, ca, certificate, key, patience_s)
        self._name = str(dataset)
        self._format, self._patience_s = format, float(patience_s)
        self._servers = _Servers(servers, token, ca, certificate, key)
        self._state: dict[str, Any] | None = None
        self._stream: Any = None
        # Whether the iteration has raised StopIteration.
        self._has_ended = False
        # Whether a batch was taken since a state was loaded.
        self._has_taken = False
        self._plan()

    def __iter__(self) -> Iterator[Any]:
        if self._has_taken and self._position().get("over"):
            # The iteration was left after its last batch, and the next one begins.
            self._begin_next()
        self._has_ended = False
        return self

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        try:
            chunk = self._try_servers(self._next_chunk)
            if chunk is not None:
                batch, state = chunk
                batch = batch if self._format == "arrow" else _to_numpy(batch)
                self._has_taken, self._state = True, state
                return batch
        except BaseException:
            # After an interrupt, the stream may be beyond a batch that the caller did not get: read it again.
            self._close_stream()
            raise
        self._begin_next()
        self._has_ended = True
        raise StopIteration

    def _begin_next(self) -> None:
        """Begin the next iteration where this one has ended."""
        self._close_stream()
        self._state = {**self._position(), "over": False}

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Batches of an iteration from the state that was loaded last, else from the beginning."""
        if self._details["batches"] is None:
            raise TypeError("a feed with epochs=None has no end")
        return self._details["batches"]

    @property
    def dataset(self) -> str:
        """The dataset. ``@latest`` has become the snapshot that was the newest."""
        return self._details["dataset"]

    @property
    def plan(self) -> str:
        """SHA-256 of all that decides the batches, as :attr:`millrace.Feed.plan`."""
        return self._details["plan"]

    @property
    def rows(self) -> int:
        """Rows of the dataset, or those that are selected."""
        return self._details["rows"]

    @property
    def batch_rows(self) -> int:
        """Rows of a global batch."""
        return self._details["batch_rows"]

    @property
    def schema(self) -> pyarrow.Schema:
        """The columns that are read."""
        return self._schema

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were taken, as :meth:`millrace.Feed.state_dict` has it."""
        return {"over": False, **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that a state counts: one of this class or of :class:`millrace.Feed`.

        :raises millrace.Error: when the state is one of other datasets, selections, weights or seeds.
        """
        if not isinstance(state.get("order"), str) or not _is_place(state.get("rows")):
            raise UsageError(f"resume {self._name}: not a state of a feed: an order and a number of rows are needed")
        self._close_stream()
        before, self._state = self._state, {name: state[name] for name in ("order", "rows", "over") if name in state}
        try:
            self._plan()
        except Error:
            self._state = before
            raise
        self._has_ended = self._has_taken = False

    def close(self) -> None:
        """Close the connection. The next call opens one again."""
        self._close_stream()
        self._servers.close()

    def _position(self) -> dict[str, Any]:
        return dict(self._state or self._details["state"])

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.cancel()
            except pyarrow.ArrowException:
                # The server is gone.
                pass

    def _plan(self) -> None:
        info = self._try_servers(self._ask_info)
        self._details = json.loads(info.app_metadata)
        self._schema = info.schema
        self._ticket = json.loads(info.endpoints[0].ticket.ticket)
        # The newest snapshot may be another one soon, also for a copy of this feed in another process.
        self._request.update({name: self._ticket[name] for name in ("dataset", "mixture") if name in self._ticket})
        self._servers.learn(str(location.uri, "utf-8") for location in info.endpoints[0].locations)

    def _ask_info(self) -> Any:
        request = self._request if self._state is None else {**self._request, "state": self._state}
        descriptor = flight.FlightDescriptor.for_command(json.dumps(request))
        return self._servers.client().get_flight_info(descriptor, self._servers.options(self._patience_s))

    def _next_chunk(self) -> tuple[Any, dict[str, Any]] | None:
        """The next batch with the state after it; none at the end."""
        if self._servers.has_forked():
            self._stream = None
        if self._stream is None:
            state = self._position()
            ticket = json.dumps({**self._ticket, "state": state}).encode()
            self._stream = self._servers.client().do_get(flight.Ticket(ticket), self._servers.options(None))
        try:
            chunk = self._stream.read_chunk()
        except StopIteration:
            return None
        return chunk.data, json.loads(chunk.app_metadata.to_pybytes())

    def _try_servers(self, call: Any) -> Any:
        """The result of a call, of whichever server answers it."""
        failures, pause, since = 0, _FIRST_PAUSE_S, None
        while True:
            try:
                return call()
            except (pyarrow.ArrowException, OSError) as error:
                if not _is_retryable(error):
                    self._close_stream()
                    raise _error(f"read {self._name} from {self._servers.current()}", error) from error
                self._stream = None
                failed = self._servers.current()
                self._servers.move_on()
                failures += 1
                # A call may have waited for long before its server failed.
                since = time.monotonic() if since is None else since
                if failures >= len(self._servers.known) and time.monotonic() - since >= self._patience_s:
                    raise UnavailableError(
                        f"read {self._name}: no server has answered for {self._patience_s:g} s; tried "
                        f"{', '.join(self._servers.known)}; {failed} said: {_text(error)}"
                    ) from error
                if failures % len(self._servers.known) == 0:
                    # Clients of one server must not come back all at once.
                    time.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, _LONGEST_PAUSE_S)

    def __reduce__(self) -> Any:
        return _restore, (type(self), self._arguments, self._request, self._state)

    def __repr__(self) -> str:
        at = f"rank {self._request['rank']} of {self._request['world']}"
        return f"<millrace.flight.FlightFeed {self._name} {at}, row {self._position()['rows']}>"


class _Servers:
    """Locations of servers, and the connection to one of them."""

    def __init__(self, servers: list[str], token: str | None, ca: Any, certificate: Any, key: Any) -> None:
        self._given = list(servers)
        self.known = list(servers)
        self._at = 0
        self._client: Any = None
        self._process = os.getpid()
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._tls: dict[str, Any] = {}
        if (certificate is None) != (key is None):
            raise UsageError("certificate and key belong together; pass both")
        for name, path in (("tls_root_certs", ca), ("cert_chain", certificate), ("private_key", key)):
            if path is not None:
                try:
                    with open(path, "rb") as file:
                        self._tls[name] = file.read()
                except OSError as error:
                    raise UsageError(f"{path} cannot be read: {error}") from error

    def current(self) -> str:
        return self.known[self._at % len(self.known)]

    def learn(self, locations: Iterator[str]) -> None:
        """Turns to the locations of an endpoint in their order, then to the others. With TLS, to none without."""
        is_secure = all(server.startswith("grpc+tls://") for server in self._given)
        schemes = ("grpc+tls://",) if is_secure else ("grpc://", "grpc+tcp://", "grpc+tls://")
        before = self.current()
        named = [before if location.startswith(_SAME_CONNECTION) else location for location in locations]
        usable = [location for location in named if location.startswith(schemes)]
        self.known, self._at = list(dict.fromkeys([*usable, *self.known])), 0
        if self.current() != before:
            self.close()

    def has_forked(self) -> bool:
        if self._process == os.getpid():
            return False
        # The connection is the parent's.
        self._client, self._process = None, os.getpid()
        return True

    def client(self) -> Any:
        self.has_forked()
        if self._client is None:
            keepalive = [("grpc.keepalive_time_ms", _KEEPALIVE_MS), ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS)]
            try:
                self._client = flight.FlightClient(self.current(), generic_options=keepalive, **self._tls)
            except pyarrow.ArrowInvalid as error:
                raise UsageError(f"{self.current()} is no location of a Flight server: {error}") from error
        return self._client

    def options(self, timeout_s: float | None) -> Any:
        return flight.FlightCallOptions(timeout=timeout_s or None, headers=self._headers)

    def move_on(self) -> None:
        self.close()
        self._at += 1

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _restore(kind: type[FlightFeed], arguments: tuple[Any, ...], request: dict[str, Any], state: Any) -> FlightFeed:
    servers, format, token, ca, certificate, key, patience_s = arguments
    feed = kind.__new__(kind)
    feed._request, feed._arguments, feed._state = request, arguments, state
    feed._name = request.get("dataset") or str(request.get("mixture"))
    feed._format, feed._patience_s = format, float(patience_s)
    feed._servers = _Servers(servers, token, ca, certificate, key)
    feed._stream, feed._has_ended, feed._has_taken = None, False, False
    feed._plan()
    return feed


# How pyarrow begins the text of a status for which it has no class of its own.
_EXHAUSTED, _DATA_LOSS = "gRPC returned resource exhausted error", "gRPC returned data loss error"


def _is_retryable(error: BaseException) -> bool:
    """Whether another server may answer: this one is gone, stopping or busy.

    A connection that breaks inside of a message is an internal error to gRPC.
    """
    gone = (
        flight.FlightUnavailableError,
        flight.FlightTimedOutError,
        flight.FlightInternalError,
        flight.FlightCancelledError,
    )
    return (isinstance(error, gone) and not _is(error, _DATA_LOSS)) or _is(error, _EXHAUSTED)


def _is(error: BaseException, status: str) -> bool:
    return str(error).startswith(status)


def _text(error: BaseException) -> str:
    """The server's words of an error."""
    text = str(error).split(". gRPC client debug context:", 1)[0]
    return text.split(", with message: ", 1)[-1]


def _error(attempt: str, error: BaseException) -> Error:
    text = f"{attempt}: {_text(error)}"
    if isinstance(error, (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)):
        return UnavailableError(text)
    if isinstance(error, pyarrow.ArrowKeyError):
        return NotFoundError(text)
    if isinstance(error, pyarrow.ArrowInvalid):
        return UsageError(text)
    return CorruptError(text) if _is(error, _DATA_LOSS) else Error(text)


def _to_numpy(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    return {name: _array(name, batch.column(name)) for name in batch.schema.names}


def _array(name: str, column: Any) -> Any:
    import numpy

    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        values = _array(name, column.storage)
        # Tensors whose axes are stored in another order stay flat, as in a feed of this machine.
        if isinstance(kind, pyarrow.FixedShapeTensorType) and kind.permutation in (None, list(range(len(kind.shape)))):
            return values.reshape(len(column), *kind.shape)
        return values
    if pyarrow.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pyarrow.types.is_fixed_size_list(kind):
        _check_nulls(name, column)
        values = _array(name, column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if pyarrow.types.is_primitive(kind):
        _check_nulls(name, column)
        return column.to_numpy(zero_copy_only=False)
    array = numpy.empty(len(column), dtype=object)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        for row, value in enumerate(column):
            array[row] = None if value.values is None else _array(name, value.values)
    else:
        array[:] = column.to_pylist()
    return array


def _check_nulls(name: str, column: Any) -> None:
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise ConflictError(
            f'column {name!r} has a null in row {row} of the batch; select rows without nulls (where), or read '
            f'format="arrow"'
        )
