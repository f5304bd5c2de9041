"""The record of a map job: a manifest in the output folder, and application keys of the volume.

While a job runs, each finished input group has a key that was committed together with the group's file. The key ``run``
names the run and its function; every commit expects it, so processes of an earlier run commit nothing. The end of the job
is one commit, which completes the manifest and removes ``run``. The keys of the groups go after it.

A job that reduces works in a hidden folder of the run beside the output folder. Its manifest is the key ``manifest``, and
the parts have keys and files as the groups do. The commit at the end completes the manifest and writes it beside the files
of the parts. One rename makes that folder the output folder. The key and the hidden folder go after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from millrace.errors import ConflictError, CorruptError, Error, NotFoundError, UsageError
from millrace.feed import Feed
from millrace.volume import Volume, Writer, locate

__all__ = ["GROUPS_MAX", "MANIFEST", "GroupRecord", "Groups", "Job", "Target", "describe"]

# Hidden from datasets by its first character.
MANIFEST = "_map.json"
_VERSION = 2
# Jobs without a reduce function are those of earlier versions.
_VERSION_PLAIN = 1
# The files of a job that reduces: those of its parts, in the folder of the run.
_OUTPUT = "/out"
_PART = "part-%08d.parquet"
# The functions of a job, as errors name them.
_FUNCTIONS = {"function": "function", "reduce": "reduce function"}
# Attempts to begin or end a job beside other processes that do the same.
_ATTEMPTS = 20
# Keys that are removed in one commit.
_KEYS_REMOVED = 10_000
# A value of an application key has 1 MiB at most.
_SCHEMA_BYTES_MAX = 1 << 20
# Most files of a dataset.
GROUPS_MAX = 1_000_000


@dataclass(frozen=True)
class GroupRecord:
    """What one input group or part became: ``file`` is none without output, ``keys`` those of a part."""

    rows_read: int
    rows: int
    bytes: int
    file: str | None
    keys: int = 0


def describe(feed: Feed, group: int) -> str:
    """An input group for people: its number, and where it is."""
    found = feed._reader.group(group)
    if found is None:
        return f"input group {group}"
    file, row_group, first, _ = found
    rows = f" from row {first} on" if first else ""
    return f"input group {group} (/{file}, row group {row_group}{rows})"


class Target:
    """The output folder of a job.

    :param to: ``VOLUME:/PATH``.
    """

    def __init__(self, to: str, home: str | None) -> None:
        self.volume, path = locate(to, home)
        parts = [part for part in path.split("/") if part]
        if "@" in self.volume.name:
            raise UsageError(f"map to {to}: a snapshot is read-only; write VOLUME:/PATH")
        if not parts or {".", ".."} & set(parts) or any(part[0] in "._" for part in parts):
            raise UsageError(
                f"map to {to}: name a folder below the root, without '.' and '..'; datasets do not see names that begin "
                f"with '.' or '_'"
            )
        self.path = "/" + "/".join(parts)
        self._prefix = f"map/{hashlib.sha256(self.path.encode()).hexdigest()[:32]}"

    def __str__(self) -> str:
        return f"{self.volume.name}:{self.path}"

    @property
    def run_key(self) -> str:
        """The key of the run that may commit."""
        return f"{self._prefix}/run"

    def keys_of(self, run: str) -> str:
        """The prefix of the keys of a run."""
        return f"{self._prefix}/{run}/"

    @property
    def manifest_key(self) -> str:
        """The key of the manifest of a job that reduces, until its output is in the folder."""
        return f"{self._prefix}/manifest"

    def work(self, run: str) -> str:
        """The hidden folder in which a run works that reduces."""
        parent, _, name = self.path.rpartition("/")
        return f"{parent}/_{name}.reduce-{run}"

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the job of this folder, if there is one."""
        found = self.installed() or self._unfinished()
        # The output may have been moved here in between.
        return found or self.installed()

    def _unfinished(self) -> dict[str, Any] | None:
        """The manifest of a job that reduces and has not yet moved its output, unless its folder was removed."""
        value = self.volume._native.key(self.manifest_key)
        if value is None:
            return None
        manifest: dict[str, Any] = json.loads(value)
        try:
            self.volume.info(self.work(manifest["run"]))
        except NotFoundError:
            return None
        return manifest

    def installed(self) -> dict[str, Any] | None:
        """The manifest in the folder, if there is one."""
        path = f"{self.path}/{MANIFEST}"
        try:
            with self.volume.open(path) as file:
                manifest = json.loads(file.read())
        except NotFoundError:
            return None
        except ValueError as error:
            raise CorruptError(f"map to {self}: {path} is not the manifest of a job: {error}") from error
        if not isinstance(manifest, dict) or not isinstance(manifest.get("version"), int):
            raise CorruptError(f"map to {self}: {path} is not the manifest of a job")
        if manifest["version"] > _VERSION:
            raise ConflictError(f"map to {self}: {path} was written by a newer Millrace; update this one")
        return manifest

    def publish(
        self,
        manifest: dict[str, Any],
        *,
        expect: list[tuple[str, bytes | None]],
        put: list[tuple[str, bytes]],
        delete: list[str],
        is_new: bool = False,
    ) -> None:
        """Commits a manifest together with keys."""
        folder = self.path
        absent = [f"{self.path}/{MANIFEST}"] if is_new else []
        if _reduces(manifest):
            folder = self.work(manifest["run"])
            if manifest["completed"] is not None:
                folder += _OUTPUT
            put = [*put, (self.manifest_key, json.dumps(manifest).encode())]
        path = f"{folder}/{MANIFEST}"
        out = Writer(self.volume._native.write(path), autocommit=False)
        out.write(json.dumps(manifest, indent=2).encode() + b"\n")
        out.close()
        self.volume._native.publish([out._file], put=put, delete=delete, expect=expect, absent=absent)

    def install(self, manifest: dict[str, Any]) -> None:
        """Moves the output of a complete job that reduces to the folder, and removes what it worked with.

        Does nothing where this was done before; any process may do it, and several at once.
        """
        if not _reduces(manifest):
            return
        native, run = self.volume._native, manifest["run"]
        work = self.work(run)
        failed: Error | None = None
        try:
            native.rename(f"{work}{_OUTPUT}", self.path)
        except Error as error:
            failed = error
        found = self.installed()
        if found is None or found["run"] != run:
            raise ConflictError(
                f"map to {self}: the folder holds something else that came while the job ran; its output is in "
                f"{self.volume.name}:{work}{_OUTPUT}: empty the folder and run the command again"
            ) from failed
        value = native.key(self.manifest_key)
        if value is not None and json.loads(value)["run"] == run:
            with contextlib.suppress(ConflictError):
                native.publish([], put=[], delete=[self.manifest_key], expect=[(self.manifest_key, value)], absent=[])
        _remove_folder(self.volume, work)

    def is_empty(self) -> bool:
        """Whether the folder is missing, or holds nothing."""
        try:
            return not self.volume.list(self.path)
        except NotFoundError:
            return True

    def forget_others(self, run: str | None, run_value: bytes | None) -> None:
        """Removes the keys of all runs but one, in slices: a crash leaves the rest to the next call.

        :param run_value: the value of the key ``run``; when it is another one now, nothing is removed.
        """
        kept = (self.run_key, self.manifest_key) if run is None else (self.run_key, self.manifest_key, self.keys_of(run))
        keys = [key for key, _ in self.volume._native.keys(f"{self._prefix}/") if not key.startswith(kept)]
        expect = [(self.run_key, run_value)]
        for first in range(0, len(keys), _KEYS_REMOVED):
            removed = keys[first : first + _KEYS_REMOVED]
            try:
                self.volume._native.publish([], put=[], delete=removed, expect=expect, absent=[])
            except ConflictError:
                return


class Job:
    """A run into an output folder: begins or resumes it, records its groups, completes it.

    ``manifest`` is that of the folder. ``run_value`` is the value of the key ``run`` that every commit expects.
    """

    def __init__(self, target: Target, manifest: dict[str, Any], run_value: bytes | None) -> None:
        self.target = target
        self.manifest = manifest
        self.run: str = manifest["run"]
        self.run_value = run_value
        work = target.work(self.run) if self.reduces else target.path
        self.groups = Groups(self, "group", "input group", f"{work}/{'group-%08d.arrow' if self.reduces else _PART}")
        self.parts = Groups(self, "part", "part", f"{work}{_OUTPUT}/{_PART}")

    @property
    def reduces(self) -> bool:
        """Whether the job has a reduce function."""
        return _reduces(self.manifest)

    @property
    def is_complete(self) -> bool:
        """Whether all groups, and all parts, are done."""
        return self.manifest.get("completed") is not None

    @classmethod
    def begin(cls, target: Target, identity: dict[str, Any], allow_changed_function: bool) -> Job:
        """Begins a job, or takes up the one of the folder if it is the same.

        :param identity: ``source``, ``plan``, ``groups``, ``columns``, ``format``, ``function``, and for a job that reduces
            ``reduce``, ``key`` and ``parts``, all from JSON.
        """
        for _ in range(_ATTEMPTS):
            run_value = target.volume._native.key(target.run_key)
            manifest = target.manifest()
            try:
                if manifest is None:
                    job = cls._create(target, identity, run_value)
                else:
                    job = cls._resume(target, identity, manifest, run_value, allow_changed_function)
            except _Again:
                # Another process began, changed or completed it at the same moment.
                continue
            if job.is_complete:
                target.install(job.manifest)
                target.forget_others(None, None)
            else:
                target.forget_others(job.run, job.run_value)
            return job
        raise ConflictError(f"map to {target}: other processes keep changing the job; run it again when they are done")

    @classmethod
    def _create(cls, target: Target, identity: dict[str, Any], run_value: bytes | None) -> Job:
        if not target.is_empty():
            if target.manifest() is not None:
                raise _Again
            raise ConflictError(f"map to {target}: the folder holds files, and none of them is of a map job; name another")
        run = secrets.token_hex(8)
        value = _run_value(run, identity)
        place = {"volume": target.volume.name, "path": target.path}
        version = _VERSION if _reduces(identity) else _VERSION_PLAIN
        manifest = {"version": version, "run": run, **place, **identity, "started_at": _now(), "completed": None}
        try:
            target.publish(
                manifest, expect=[(target.run_key, run_value)], put=[(target.run_key, value)], delete=[], is_new=True
            )
        except ConflictError as error:
            raise _Again from error
        return cls(target, manifest, value)

    @classmethod
    def _resume(
        cls,
        target: Target,
        identity: dict[str, Any],
        manifest: dict[str, Any],
        run_value: bytes | None,
        allow_changed_function: bool,
    ) -> Job:
        job = cls(target, manifest, run_value)
        names = [name for name in identity if name not in _FUNCTIONS]
        names += [name for name in ("key", "parts") if name in manifest and name not in identity]
        changed = [name for name in names if identity.get(name) != manifest.get(name)]
        if _reduces(identity) != _reduces(manifest):
            changed.append("reduce")
        if changed:
            what = "; ".join(f"{name} was {_shown(manifest.get(name))} and is {_shown(identity.get(name))}" for name in changed)
            raise ConflictError(f"map to {target}: the folder is that of another job: {what}; name another folder")
        is_other = any(identity.get(name) != manifest.get(name) for name in _FUNCTIONS)
        if job.is_complete:
            for name in _FUNCTIONS:
                if identity.get(name) != manifest.get(name) and not allow_changed_function:
                    raise job._other_function(identity, int(manifest["groups" if name == "function" else "parts"]), name)
            return job
        if (manifest["volume"], manifest["path"]) != (target.volume.name, target.path):
            raise ConflictError(
                f"map to {target}: the folder was moved or copied from {manifest['volume']}:{manifest['path']} before its "
                f"job was complete; move it back, or name another folder"
            )
        if run_value is None or json.loads(run_value)["run"] != job.run:
            if target.manifest() != manifest or target.volume._native.key(target.run_key) != run_value:
                raise _Again
            raise ConflictError(
                f"map to {target}: {MANIFEST} is there, but the volume has no record of its groups; was the folder "
                f"restored alone? Remove it, or name another folder"
            )
        if is_other:
            job._change_function(identity, allow_changed_function)
        return job

    def _other_function(self, identity: dict[str, Any], done: int, name: str = "function") -> ConflictError:
        what, option = ("input groups", "groups") if name == "function" else ("parts", "parts")
        was, now = self.manifest[name], identity[name]
        names = {"name": "its name", "sha256": "its file", "file": "the name of its file", "arguments": "its arguments"}
        differs = " and ".join(text for field, text in names.items() if was.get(field) != now.get(field))
        return ConflictError(
            f"map to {self.target}: {done} of {self.manifest[option]} {what} are done by another {_FUNCTIONS[name]}: {differs} "
            f"changed; name another folder, or keep these {option} with --allow-changed-function "
            f"(allow_changed_function=True)"
        )

    def _change_function(self, identity: dict[str, Any], is_allowed: bool) -> None:
        manifest, delete, expect = self.manifest, [], [(self.target.run_key, self.run_value)]
        for name, groups in {"function": self.groups, "reduce": self.parts}.items():
            if identity.get(name) == manifest.get(name):
                continue
            done = len(groups.records())
            if done and not is_allowed:
                raise self._other_function(identity, done, name)
            if done:
                earlier = "earlier_functions" if name == "function" else "earlier_reduce_functions"
                manifest = {**manifest, earlier: [*manifest.get(earlier, []), manifest[name]]}
            else:
                # Without a group, no file has the schema that an earlier function gave.
                delete.append(groups.schema_key)
                expect.append((groups.any_key, None))
        manifest = {**manifest, **identity}
        value = _run_value(self.run, identity)
        try:
            self.target.publish(manifest, expect=expect, put=[(self.target.run_key, value)], delete=delete)
        except ConflictError as error:
            raise _Again from error
        self.manifest, self.run_value = manifest, value

    def complete(self, groups: int) -> None:
        """Completes the job: all groups are done."""
        native = self.target.volume._native
        for _ in range(_ATTEMPTS):
            records = self.groups.records()
            parts = self.parts.records()
            manifest = self.target.manifest()
            if manifest is None or manifest["run"] != self.run:
                raise self._gone()
            if manifest.get("completed") is None:
                if len(records) != groups:
                    self.check_current()
                    raise Error(f"map to {self.target}: {len(records)} of {groups} input groups are done; run it again")
                if self.reduces and len(parts) != manifest["parts"]:
                    self.check_current()
                    raise Error(f"map to {self.target}: {len(parts)} of {manifest['parts']} parts are done; run it again")
                output = parts if self.reduces else records
                files = [record for record in output.values() if record.file is not None]
                manifest["completed"] = {
                    "at": _now(),
                    "rows_read": sum(record.rows_read for record in records.values()),
                    "rows": sum(record.rows for record in files),
                    "files": len(files),
                    "bytes": sum(record.bytes for record in files),
                }
                if self.reduces:
                    manifest["completed"]["rows_mapped"] = sum(record.rows for record in records.values())
                    manifest["completed"]["keys"] = sum(record.keys for record in parts.values())
                expect = [(self.target.run_key, self.run_value)]
                try:
                    self.target.publish(manifest, expect=expect, put=[], delete=[self.target.run_key])
                except ConflictError:
                    # Another process completed it, or the job is another one now.
                    if native.key(self.target.run_key) is not None:
                        self.check_current()
                    continue
            self.manifest = manifest
            self.target.install(manifest)
            self.target.forget_others(None, None)
            return
        raise ConflictError(f"map to {self.target}: other processes keep changing the job; run it again when they are done")

    def has_ended(self) -> bool:
        """Whether the job was completed, by this process or another one."""
        manifest = self.target.manifest()
        return manifest is not None and manifest["run"] == self.run and manifest.get("completed") is not None

    def check_current(self) -> None:
        """Fails when the folder holds another job now, or this one with another function."""
        found = self.target.volume._native.key(self.target.run_key)
        if found == self.run_value or (found is None and self.has_ended()):
            return
        if found is not None and json.loads(found)["run"] == self.run:
            raise ConflictError(f"map to {self.target}: another process has gone on with another function")
        raise self._gone()

    def _gone(self) -> ConflictError:
        return ConflictError(
            f"map to {self.target}: the folder was removed or moved while the job ran, or holds another job now; run it again"
        )


class Groups:
    """The record of the input groups of a run, or of its parts: which are done, and the columns of their output.

    ``noun`` names one for people. ``file`` is the path of its file, with the number left open.
    """

    def __init__(self, job: Job, unit: str, noun: str, file: str) -> None:
        self.noun = noun
        self._job = job
        self._target = job.target
        self._file = file
        # The keys of groups are older than parts.
        self._keys = job.target.keys_of(job.run) + ("" if unit == "group" else f"{unit}-")
        self._prefix = f"{job.target.keys_of(job.run)}{unit}/"

    @property
    def schema_key(self) -> str:
        """The key of the columns that all groups have."""
        return f"{self._keys}schema"

    @property
    def any_key(self) -> str:
        """The key that exists once a group is done."""
        return f"{self._keys}any"

    def key_of(self, group: int) -> str:
        """The key of a group that is done."""
        return f"{self._prefix}{group:08}"

    def file_of(self, group: int) -> str:
        """The path of a group's file."""
        folder, _, name = self._file.rpartition("/")
        return f"{folder}/{name % group}"

    def stage(self, group: int) -> Writer:
        """Begins to write the file of a group."""
        return Writer(self._target.volume._native.write(self.file_of(group)), autocommit=False)

    def is_done(self, group: int) -> bool:
        """Whether a group is done. Fails when the job is no longer this one."""
        if self._target.volume._native.key(self.key_of(group)) is not None:
            return True
        self._job.check_current()
        return self._job.has_ended()

    def records(self) -> dict[int, GroupRecord]:
        """The groups that are done."""
        found = self._target.volume._native.keys(self._prefix)
        return {int(key[len(self._prefix) :]): _record(json.loads(value)) for key, value in found}

    def agree_on_schema(self, group: int, schema: bytes) -> tuple[int, bytes]:
        """Proposes the columns of the output. Returns those that hold, and the group that gave them."""
        native = self._target.volume._native
        value = b"%d\n" % group + schema
        if len(value) > _SCHEMA_BYTES_MAX:
            raise UsageError(f"the columns of the output take {len(schema)} bytes to describe; at most 1 MiB is possible")
        for _ in range(_ATTEMPTS):
            found = native.key(self.schema_key)
            if found is not None:
                first, _, agreed = found.partition(b"\n")
                return int(first), agreed
            try:
                expect = [(self._target.run_key, self._job.run_value), (self.schema_key, None)]
                native.publish([], put=[(self.schema_key, value)], delete=[], expect=expect, absent=[])
            except ConflictError:
                self._job.check_current()
                if self._job.has_ended():
                    # Another process has this group, and will refuse it again.
                    return group, schema
        raise ConflictError(f"map to {self._target}: other processes keep changing the job; run it again when they are done")

    def finish(self, group: int, record: GroupRecord, file: Writer | None) -> bool:
        """Makes the file of a group visible and records the group, in one step.

        :param file: the staged file; none for a group without output.
        :returns: whether it was this call that did so; else another process had.
        """
        native = self._target.volume._native
        token = secrets.token_hex(8)
        value = json.dumps([record.rows_read, record.rows, record.bytes, record.file, token, record.keys]).encode()
        key = self.key_of(group)
        # Once: a key that all commits change would have them wait for each other.
        first = [] if native.key(self.any_key) is not None else [(self.any_key, b"")]
        try:
            native.publish(
                [] if file is None else [file._file],
                put=[(key, value), *first],
                delete=[],
                expect=[(self._target.run_key, self._job.run_value), (key, None)],
                absent=[] if file is None else [self.file_of(group)],
            )
        except Error:
            # The outcome of the commit may be unknown.
            found = native.key(key)
            if found is not None:
                return bool(found == value)
            if self._job.has_ended():
                return False
            self._job.check_current()
            raise
        return True


class _Again(Exception):
    """Another process changed the job at the same moment."""


def _reduces(manifest: dict[str, Any]) -> bool:
    return manifest.get("reduce") is not None


def _record(value: list[Any]) -> GroupRecord:
    # Before the keys there is the token of the commit.
    return GroupRecord(*value[:4], *value[5:6])


def _remove_folder(volume: Volume, path: str) -> None:
    """Removes a folder, beside other processes that do the same."""
    try:
        entries = volume.list(path)
    except NotFoundError:
        return
    for entry in entries:
        with contextlib.suppress(NotFoundError):
            if entry.type == "directory":
                _remove_folder(volume, entry.path)
            else:
                volume._native.remove(entry.path)
    with contextlib.suppress(NotFoundError):
        volume._native.remove_dir(path)


def _run_value(run: str, identity: dict[str, Any]) -> bytes:
    functions = [identity[name] for name in _FUNCTIONS if identity.get(name) is not None]
    # A job without a reduce function has the value of earlier versions.
    function = json.dumps(functions[0] if len(functions) == 1 else functions, sort_keys=True).encode()
    return json.dumps({"run": run, "function": hashlib.sha256(function).hexdigest()}).encode()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
