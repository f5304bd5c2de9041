"""Detection of libraries that divide the batches of a feed among processes, after the feed has done so.

Some libraries let each process take every n-th batch of an ``IterableDataset``, or let one process read for all. A feed with
its own rank and world has divided the rows before: together, they lose most of the rows without an error. These libraries
are found in the call stack. A process that a loader forks has the stack of the loader, and one that it spawns gets a pickle,
which is made in that stack.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

# Per module, its classes that divide, and the attribute with the number of parts.
_CLASSES: dict[str, dict[str, str]] = {
    "accelerate.data_loader": {"DataLoaderDispatcher": "state.num_processes", "IterableDatasetShard": "num_processes"},
    "transformers.trainer_pt_utils": {"IterableDatasetShard": "num_processes"},
    # The name of the module before PyTorch 2.0, and that since then.
    "torch.utils.data.datapipes.iter.grouping": {"ShardingFilterIterDataPipe": "num_of_instances"},
    "torch.utils.data.datapipes.iter.sharding": {"ShardingFilterIterDataPipe": "num_of_instances"},
}
# A remedy per package.
_REMEDIES = {
    "accelerate": (
        "keep the loader out of Accelerator.prepare (with the Trainer of Hugging Face, override get_train_dataloader)"
    ),
    "transformers": "pass the dataset to the DataLoader itself, without IterableDatasetShard",
    "torch": "leave sharding_filter out",
}


def dividing(frame: FrameType | None, world: int, workers: int) -> str | None:
    """What divides the batches again for the caller in ``frame``, and what to do about it; ``None`` if nothing does.

    :param world: the readers among which the feed divides the rows.
    :param workers: the workers of the loader among which :class:`millrace.torch.FeedDataset` divides the batches.
    """
    while frame is not None:
        classes = _CLASSES.get(frame.f_globals.get("__name__", ""))
        owner = None if classes is None else frame.f_locals.get("self")
        attribute = None if classes is None else classes.get(type(owner).__name__)
        if attribute is not None and _number(owner, attribute) > 1:
            module = frame.f_globals["__name__"].partition(".")[0]
            # Of these, only sharding_filter counts the workers as well.
            if world > 1 or (module == "torch" and workers > 1 and not _is_of_ranks(owner)):
                return _text(module, type(owner).__name__, world)
        frame = frame.f_back
    return None


def _is_of_ranks(owner: Any) -> bool:
    """Whether a sharding_filter divides among ranks only."""
    return getattr(getattr(owner, "sharding_group_filter", None), "name", None) == "DISTRIBUTED"


def _text(module: str, name: str, world: int) -> str:
    begun = f"{module} ({name}) would divide the batches"
    of = "of the workers" if world == 1 else f"of the {world} ranks"
    refused = f"{begun} {of} again, and most rows would be lost; {_REMEDIES[module]}"
    if module == "torch":
        return refused
    return f"{refused}, or give the dataset rank=0, world=1: batch_rows is then the batch of one process"


def _number(owner: Any, attribute: str) -> int:
    for name in attribute.split("."):
        owner = getattr(owner, name, None)
    return owner if isinstance(owner, int) else 1
