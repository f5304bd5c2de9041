"""Publication of PyTorch models as versions for the model server."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace import rounds
from millrace.errors import (
    ConflictError,
    CorruptError,
    Error,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from millrace.feed import Feed
from millrace.volume import Volume

__all__ = ["Published", "publish"]

_DEFAULT_VOLUME = "models"
# The folder of a volume in which servers look for models.
_ROOT = "models"
# What a training script tells of a model, beside its graph.
_RECORD = "training.json"
# Above this, weights go into a file of their own: a graph may have 2 GiB.
_EMBEDDED_BYTES_MAX = 1 << 30
# Metrics of a version, and characters of a text in its manifest.
_METRICS_MAX = 1024
_CODE_MAX = 256
# The errors that stand for exit codes of the command.
_ERRORS: dict[int, type[Error]] = {
    2: UsageError,
    3: NotFoundError,
    4: ConflictError,
    5: UnavailableError,
    6: CorruptError,
    7: NoSpaceError,
}


@dataclass(frozen=True)
class Published:
    """A published version of a model; ``difference`` is the largest one between its outputs and the model's."""

    name: str
    version: int
    volume: str
    path: str
    sha256: str
    difference: float


def publish(
    model: Any,
    example_inputs: Any,
    name: str,
    *,
    volume: str = _DEFAULT_VOLUME,
    feed: Any = None,
    seed: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    code: str = "",
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    rtol: float = 1e-3,
    atol: float = 1e-5,
    program: str | os.PathLike[str] | None = None,
    home: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Published:
    """Publish a PyTorch model as the next version that ``millrace serve --volume VOLUME`` serves.

    The model is exported with ``torch.onnx.export(dynamo=True)`` in evaluation mode, and ONNX Runtime runs the result
    on the example inputs, also with another number of rows. If an output differs from the model's, nothing is published.

    ``millrace model import`` checks the graph and makes the version appear as a whole, with its lineage; no version is
    ever replaced.

    Needs PyTorch 2.6 or newer, onnx, onnxscript, onnxruntime, and the program ``millrace``, which checks the graph.

    :param model: a ``torch.nn.Module``. Its mode is as before afterwards.
    :param example_inputs: a tensor, a sequence of tensors, or a dictionary of tensors by argument name.
    :param name: the name of the model.
    :param volume: the volume that gets the version, below ``models/``; created if it does not exist, with
        a warning unless it is the default.
    :param feed: the :class:`millrace.Feed` or ``FeedDataset`` that trained the model, for the lineage: dataset and
        snapshot, plan, seed, steps and epochs taken.
    :param seed: the seed of the lineage, by default that of the feed.
    :param steps: optimizer steps of the lineage, by default the batches that the feed has given. With workers of a
        ``DataLoader``, the feed does not know them.
    :param epochs: epochs of the lineage, by default the whole epochs that the feed has given.
    :param code: the version of the training code, for example its Git commit.
    :param metrics: numbers that ``millrace model show`` prints, for example ``{"accuracy": 0.97}``.
    :param metadata: anything else that JSON can hold, for the file ``training.json`` of the version.
    :param input_names: names of the inputs in requests, by default those of the model's arguments.
    :param output_names: names of the outputs.
    :param dynamic_batch: whether the first dimension of all inputs is a number of rows that requests choose.
    :param rtol: allowed relative difference of outputs.
    :param atol: allowed absolute difference of outputs.
    :param program: the program, by default that of ``millrace train --script``, or ``millrace`` on the ``PATH``.
    :param home: the home folder, by default ``MILLRACE_HOME`` or that of the user.
    :param options: those of ``torch.onnx.export``, for example ``opset_version``.
    :raises millrace.MismatchError: when outputs differ.
    """
    torch = _needs("torch", "torch")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        _needs(module, module)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise UnavailableError(f"publish {name}: PyTorch 2.6 or newer is needed, this one is {torch.__version__}")
    program = _program(program)
    feed = getattr(feed, "feed", feed)
    if feed is not None and not isinstance(feed, Feed):
        raise UsageError(
            f"publish {name}: feed is a {type(feed).__name__}; pass the millrace.Feed or FeedDataset that trained the model, "
            "not the name of its dataset"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"publish {name}: the model is a {type(model).__name__}; pass a torch.nn.Module, not its state_dict()")
    wrong = [key for key, value in (metrics or {}).items() if not _is_finite(value)]
    if wrong:
        raise UsageError(f"publish {name}: metric {wrong[0]!r} is not a finite number")
    if len(metrics or {}) > _METRICS_MAX:
        raise UsageError(f"publish {name}: {len(metrics or {})} metrics; a version has at most {_METRICS_MAX}")
    if len(code) > _CODE_MAX or any(len(key) > _CODE_MAX for key in metrics or {}):
        raise UsageError(f"publish {name}: code and the names of metrics have at most {_CODE_MAX} characters")
    lineage, record = _origin(name, feed, seed, steps, epochs, code, metadata)
    arguments = _Arguments(torch, name, example_inputs, dynamic_batch)
    target = _target(name, volume, home)
    with tempfile.TemporaryDirectory(prefix="millrace-publish-") as folder:
        file = Path(folder, "model.onnx")
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            expected = [_outputs(torch, name, model, arguments, values) for values in arguments.samples()]
            _export(torch, name, model, arguments, file, input_names, output_names, options)
        finally:
            for module, mode in modes:
                module.training = mode
        difference = _compare(name, arguments, expected, file, rtol, atol)
        record["compared"] = {"rtol": rtol, "atol": atol, "difference": difference}
        record["torch"] = torch.__version__
        origin = {"lineage": lineage, "metrics": {key: float(value) for key, value in (metrics or {}).items()}}
        Path(folder, "lineage.json").write_bytes(_json(name, origin))
        Path(folder, _RECORD).write_bytes(_json(name, record))
        manifest = _import(name, file, program, target)
    version = manifest["version"]
    sha256 = next(entry["sha256"] for entry in manifest["files"] if entry["path"] == "model.onnx")
    _record_run(name, version, target.name, sha256, home)
    return Published(name, version, target.name, f"{target.name}:/{_ROOT}/{name}/{version}", sha256, difference)


def _target(name: str, volume: str, home: str | os.PathLike[str] | None) -> Volume:
    """The volume to publish to. Creating one other than the default is not silent: its name may be mistyped."""
    try:
        return Volume(volume, home=home)
    except NotFoundError:
        target = Volume(volume, create=True, home=home)
    if volume != _DEFAULT_VOLUME:
        warnings.warn(
            f"publish {name}: volume {volume!r} did not exist and was created; if the name is wrong, delete it with "
            f"millrace volume delete {volume} --yes",
            stacklevel=3,
        )
    return target


class _Arguments:
    """Example inputs in the order of the model's arguments, with at least two rows."""

    def __init__(self, torch: Any, name: str, given: Any, dynamic_batch: bool) -> None:
        self.keys = list(given) if isinstance(given, Mapping) else None
        values = list(given.values()) if isinstance(given, Mapping) else given
        values = [values] if isinstance(values, torch.Tensor) else list(values)
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            raise UsageError(f"publish {name}: example_inputs must be a tensor, or tensors in a sequence or dictionary")
        self.is_dynamic = dynamic_batch
        if dynamic_batch:
            rows = {tuple(value.shape[:1]) for value in values}
            if len(rows) > 1 or () in rows or (0,) in rows:
                raise UsageError(
                    f"publish {name}: the first dimensions of the example inputs are not one number of rows: "
                    f"{', '.join(str(tuple(value.shape)) for value in values)}; pass dynamic_batch=False"
                )
            # The exporter takes an extent of 1 for a constant.
            values = [torch.cat([value, value]) if len(value) == 1 else value for value in values]
        self.values = [value.detach() for value in values]

    def of(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments."""
        return (tuple(values), {}) if self.keys is None else ((), dict(zip(self.keys, values)))

    def samples(self) -> list[list[Any]]:
        """The examples, and if the number of rows is open, one with another number."""
        return [self.values] + ([[value[:1] for value in self.values]] if self.is_dynamic else [])


def _outputs(torch: Any, name: str, model: Any, arguments: _Arguments, values: list[Any]) -> list[Any]:
    """The model's own outputs, as arrays."""
    from torch.utils import _pytree

    args, kwargs = arguments.of(values)
    try:
        with torch.no_grad():
            leaves = _pytree.tree_leaves(model(*args, **kwargs))
    except Exception as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise UsageError(f"publish {name}: the model fails on example inputs of the shapes {shapes}: {error}") from error
    tensors = [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # NumPy has no bfloat16, in which the outputs are compared as floats.
    return [(leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy() for leaf in tensors]


def _export(
    torch: Any,
    name: str,
    model: Any,
    arguments: _Arguments,
    file: Path,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    options: dict[str, Any],
) -> None:
    args, kwargs = arguments.of(arguments.values)
    if arguments.is_dynamic and "dynamic_shapes" not in options:
        shapes = [{0: torch.export.Dim("batch")} for _ in arguments.values]
        options["dynamic_shapes"] = tuple(shapes) if arguments.keys is None else dict(zip(arguments.keys, shapes))
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    try:
        torch.onnx.export(
            model,
            args,
            str(file),
            kwargs=kwargs,
            dynamo=True,
            external_data=size > _EMBEDDED_BYTES_MAX,
            input_names=input_names if input_names is None else list(input_names),
            output_names=output_names if output_names is None else list(output_names),
            **{"verbose": False, **options},
        )
    except Exception as error:
        reason = str(error.__cause__ or error).strip() or type(error).__name__
        raise UsageError(f"publish {name}: PyTorch cannot export the model: {reason.splitlines()[0]}") from error


def _compare(
    name: str, arguments: _Arguments, expected: list[list[Any]], file: Path, rtol: float, atol: float
) -> float:
    """Runs the exported model on the samples, and returns the largest difference of an output."""
    import numpy
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UsageError(f"publish {name}: ONNX Runtime cannot load the exported model: {error}") from error
    inputs = [given.name for given in session.get_inputs()]
    outputs = [output.name for output in session.get_outputs()]
    if len(inputs) != len(arguments.values):
        raise UsageError(
            f"publish {name}: the exported model has the inputs {', '.join(inputs)}, {len(arguments.values)} are given; "
            f"leave out what the model does not use"
        )
    largest = 0.0
    for values, own in zip(arguments.samples(), expected):
        try:
            found = session.run(None, {key: value.cpu().numpy() for key, value in zip(inputs, values)})
        except Exception as error:
            raise MismatchError(f"publish {name}: the exported model fails where the model does not: {error}") from error
        if len(found) != len(own):
            raise MismatchError(f"publish {name}: the exported model has {len(found)} outputs, the model {len(own)}")
        for output, ours, theirs in zip(outputs, own, found):
            if ours.shape != theirs.shape:
                raise MismatchError(
                    f"publish {name}: output {output!r} of the exported model has the shape {theirs.shape}, the model's "
                    f"{ours.shape}"
                )
            if ours.dtype == bool:
                ours, theirs = ours.astype(numpy.uint8), theirs.astype(numpy.uint8)
            far = ~numpy.isclose(theirs, ours, rtol=rtol, atol=atol, equal_nan=True)
            gap = numpy.abs(theirs.astype(numpy.float64) - ours.astype(numpy.float64))
            # Equal infinities and NaNs have no difference.
            gap = numpy.where(~far & ~numpy.isfinite(gap), 0, gap)
            if far.any():
                place = tuple(int(at) for at in numpy.argwhere(far)[0])
                raise MismatchError(
                    f"publish {name}: output {output!r} of the exported model differs from the model's in "
                    f"{int(far.sum())} of {far.size} values, at {place} it is {theirs[place]} and not {ours[place]} "
                    f"(rtol={rtol}, atol={atol}); nothing was published"
                )
            largest = max(largest, float(gap.max(initial=0)))
    return largest


def _import(name: str, file: Path, program: str, target: Volume) -> dict[str, Any]:
    """Lets the program check the graph and publish it as the next version, in one step with what is beside it."""
    expected = rounds.expected(target._native, f"publish {name}")
    command = [program, "--home", os.fspath(target._native.home), "--json", "model", "import", str(file)]
    command += ["--name", name, "--volume", target.name]
    if expected is not None:
        command += ["--expect-key", f"{expected[0]}={expected[1].decode()}"]
    command += ["--lineage", str(file.with_name("lineage.json")), "--training", str(file.with_name(_RECORD))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        # A later round may have begun meanwhile.
        rounds.check(target._native, f"publish {name}")
        text = done.stderr.strip().removeprefix("millrace: ")
        raise _ERRORS.get(done.returncode, Error)(f"publish {name}: {text}")
    manifest: dict[str, Any] = json.loads(done.stdout)
    return manifest


def _origin(
    name: str,
    feed: Any,
    seed: int | None,
    steps: int | None,
    epochs: int | None,
    code: str,
    metadata: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lineage, and the record of the training."""
    record: dict[str, Any] = {"code": code, "metadata": dict(metadata or {})}
    lineage: dict[str, Any] = {"code_version": code}
    if feed is not None:
        place = feed.state_dict()["rows"]
        others = ("rank", "world", "format", "share_cache", "home")
        arguments = {key: value for key, value in feed._arguments.items() if key not in others}
        # A format may stand in front of a volume.
        place_of, found, rest = feed.dataset.partition(":/") if feed._until is None else ("", "", "")
        volume, _, snapshot = place_of.rpartition(":")[2].partition("@")
        path = f"/{rest}" if found else ""
        seed = arguments["seed"] if seed is None else seed
        steps = -(-place // feed.batch_rows) if steps is None else steps
        epochs = feed._reader.epoch_of(place) if epochs is None else epochs
        if feed._until is None and feed.dataset.startswith("topic:") and not feed.dataset.startswith("topic:/"):
            volume, snapshot, path = "", "", ""
            lineage.update(topic=feed.dataset)
        lineage.update(volume=volume, snapshot=snapshot, path=path, config_sha256=feed.plan)
        if feed._until is not None:
            # Versions of single datasets have no such field.
            weighted = feed._reader.datasets
            lineage.update(mixture=[{"dataset": dataset, "weight": weight} for dataset, weight in weighted])
        images = {column: json.loads(image.encode(column)) for column, image in (arguments["images"] or {}).items()}
        # Fractions may be decimal numbers, which JSON has as texts.
        arguments = json.loads(json.dumps({**arguments, "images": images or None}, default=str))
        record["feed"] = {"dataset": feed.dataset, "plan": feed.plan, "rows_read": place, **arguments}
    for key, value in (("seed", seed), ("steps", steps), ("epochs", epochs)):
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
                raise UsageError(f"publish {name}: {key} is {value!r}; it must be a whole number of 64 bits")
            lineage[key] = record[key] = value
    run = _run()
    if run is not None:
        record["run"] = {"job": run["job"], "run": run["run"], "volume": run["volume"]}
    _json(name, record)
    return lineage, record


def _run() -> dict[str, str] | None:
    """The run of ``millrace train --script`` that this process is part of."""
    keys = {"job": "MILLRACE_JOB", "run": "MILLRACE_RUN", "volume": "MILLRACE_RUN_VOLUME"}
    found = {key: os.environ.get(variable, "") for key, variable in keys.items()}
    return found if all(found.values()) else None


def _record_run(name: str, version: int, volume: str, sha256: str, home: str | os.PathLike[str] | None) -> None:
    """Tells the run which version it has published, for ``millrace runs``."""
    run = _run()
    if run is None:
        return
    record = {"model": name, "version": version, "volume": volume, "sha256": sha256}
    try:
        path = f"/runs/{run['job']}/{run['run']}/{name}.{version}.json"
        with Volume(run["volume"], home=home).open(path, "wb") as out:
            out.write(_json(name, record))
    except Error as error:
        raise type(error)(
            f"publish {name}: version {version} is published, but not recorded with run {run['run'][:12]} of job "
            f"{run['job']}: {error}"
        ) from error


def _json(name: str, value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"publish {name}: metadata holds something that JSON cannot: {error}") from error


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _program(program: str | os.PathLike[str] | None) -> str:
    wanted = os.environ.get("MILLRACE_PROGRAM") or "millrace" if program is None else os.fspath(program)
    found = shutil.which(wanted)
    if found is None:
        raise UnavailableError(
            f"the program {wanted!r} was not found, which checks models: put millrace on the PATH, or pass program="
        )
    return found


def _needs(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"millrace.publish needs {module}, which is not installed: pip install {package}") from error
