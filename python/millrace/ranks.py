"""The rank of this process, from the environment that launchers set and from ``torch.distributed``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from millrace.errors import UsageError

__all__ = ["own_rank", "ranks"]

# Variables of a rank and of the number of ranks, by launcher.
_TORCHRUN = ("RANK", "WORLD_SIZE")
_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# torchrun may run in a task of Slurm or MPI, whose rank is then that of the launcher. `millrace train --script` sets this
# variable as well, to its own run.
_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
# `millrace train --script` removes the variables of Slurm and MPI: those that are there are of a launcher inside of it.
_ROUND, _RUN = "MILLRACE_ROUND", "MILLRACE_RUN"


def own_rank() -> tuple[int, int] | None:
    """Rank and number of ranks of this process: :func:`ranks`, or those of ``torch.distributed``; ``None`` without either.

    Processes of ``torch.multiprocessing.spawn`` have no variables of a launcher, and pass their rank to
    ``init_process_group``. A process group of one process says nothing.

    :raises millrace.UsageError: also when the variables and the process group contradict each other.
    """
    found, group = ranks(), _process_group()
    if found is not None and group is not None and found != group:
        raise UsageError(
            f"rank of this process: the variables of its launcher say {found[0]} of {found[1]}, torch.distributed says "
            f"{group[0]} of {group[1]}; pass rank and world"
        )
    return group if found is None else found


def _process_group() -> tuple[int, int] | None:
    """Rank and size of the default process group, if it has several processes. Does not import PyTorch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return (rank, world) if world > 1 else None


def ranks(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Rank and number of ranks of this process; ``None`` if no launcher has set them.

    ``RANK`` and ``WORLD_SIZE`` come first, as torchrun and ``millrace train --script`` set them, then ``OMPI_COMM_WORLD_*``
    of Open MPI, ``PMI_*`` of MPICH and Intel MPI, and ``SLURM_PROCID`` of ``srun``. In a script of ``millrace train`` with
    one process, which starts ``mpirun`` or ``srun`` itself, theirs come first.

    :raises millrace.UsageError: when variables contradict each other, when one of a pair is missing, or is no number.
    """
    found = os.environ if environment is None else environment
    own = _pair(found, *_TORCHRUN)
    is_script = bool(found.get(_ROUND)) and found.get(_TORCHRUN_ID) in (None, "", found.get(_RUN))
    if own is not None and is_script:
        inner = _inner(found)
        if inner is None:
            return own[1]
        if own[1][1] > 1:
            raise UsageError(
                f"rank from the environment: {own[0][0]} and {own[0][1]} of millrace train --script say {own[1][0]} of "
                f"{own[1][1]}, {inner[0][0]} and {inner[0][1]} of a launcher inside of it say {inner[1][0]} of "
                f"{inner[1][1]}; pass rank and world"
            )
        return inner[1]
    if own is not None and found.get(_TORCHRUN_ID):
        return own[1]
    launched = [pair for pair in [own, *(_pair(found, *names) for names in _MPI)] if pair is not None]
    for names, pair in launched[1:]:
        _check(*launched[0], names, pair)
    slurm = _pair(found, *_SLURM)
    if not launched and slurm is None and found.get("PMIX_RANK"):
        raise UsageError("rank from the environment: PMIX_RANK is set, and nothing tells how many there are; pass rank and world")
    if not launched:
        return None if slurm is None else slurm[1]
    # A launcher in a task of Slurm has ranks of its own. With as many as Slurm has tasks, they are the same ones.
    if slurm is not None and slurm[1][1] == launched[0][1][1]:
        _check(*launched[0], *slurm)
    return launched[0][1]


def _inner(found: Mapping[str, str]) -> tuple[tuple[str, str], tuple[int, int]] | None:
    """The rank of a launcher of MPI or Slurm."""
    pairs = [pair for pair in (_pair(found, *names) for names in (*_MPI, _SLURM)) if pair is not None]
    for names, pair in pairs[1:]:
        _check(*pairs[0], names, pair)
    return pairs[0] if pairs else None


def _pair(found: Mapping[str, str], rank: str, world: str) -> tuple[tuple[str, str], tuple[int, int]] | None:
    """The names, and the values that they have."""
    values = found.get(rank, ""), found.get(world, "")
    if values[0] == "" and values[1] == "":
        return None
    if rank == "SLURM_PROCID" and "" in values:
        # A batch script has the first one alone; it is no task of srun.
        return None
    for name, value in zip((rank, world), values):
        if not (value.isascii() and value.isdecimal()) or len(value) > 10:
            other = world if name == rank else rank
            raise UsageError(
                f"rank from the environment: {name} is {value!r}, not a number, while {other} is "
                f"{found.get(other, '')!r}; set both, or pass rank and world"
            )
    number, count = int(values[0]), int(values[1])
    if number >= count:
        raise UsageError(
            f"rank from the environment: {rank} is {number} and {world} is {count}; ranks run from 0 to one less than "
            f"their number; pass rank and world"
        )
    return (rank, world), (number, count)


def _check(
    names: tuple[str, str], pair: tuple[int, int], other_names: tuple[str, str], other: tuple[int, int]
) -> None:
    if pair != other:
        raise UsageError(
            f"rank from the environment: {names[0]} and {names[1]} say {pair[0]} of {pair[1]}, {other_names[0]} and "
            f"{other_names[1]} say {other[0]} of {other[1]}; unset the wrong ones, or pass rank and world"
        )
