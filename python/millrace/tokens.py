"""Packing of tokens: from documents of any length to sequences of one length."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from typing import Any

from millrace.errors import UsageError

__all__ = ["Tokens"]


@dataclass(frozen=True)
class Tokens:
    """Sequences of one length from a column of token lists: ``Feed(..., tokens=Tokens("ids", length=2048, eos=2))``.

    The rows of the feed are sequences then: ``batch_rows``, ``feed.rows`` and ``rows_per_epoch`` count them. A batch has
    these arrays or tensors, all ``[rows, length]``:

    - the column under its own name: the tokens, ``int32`` for columns of at most 32 bits signed or 16 bits unsigned, else
      ``int64``;
    - ``segment_ids``, ``int32``: the number of the document within the sequence, from 1; 0 for padding;
    - ``position_ids``, ``int32``: the position within the document, from 0. A part of a document that begins in another
      sequence counts from 0, too;
    - ``labels``, ``int64``, if asked for. -100 is the label that the losses of PyTorch and Hugging Face ignore.

    Each list is a document; null and empty lists are none. The documents of a row group are laid end to end, in another
    order in each epoch, and cut into sequences. A document that does not fit goes on in the next sequence, so nothing is
    dropped or cut off. Only the last sequence of a row group is padded; ``millrace feed plan`` shows how much that is.
    Sequences are shuffled as rows are. Their order and the documents in them follow from the dataset and the seed alone,
    so any number of ranks, workers and resumes reads the same sequences.

    The first feed of a snapshot reads the column once, to count its tokens. The counts are kept in the home.

    :param column: the column; lists of integers from 0.
    :param length: tokens of a sequence, at most 1,048,576.
    :param bos: token to put in front of each document.
    :param eos: token to put behind each document.
    :param pad: token that fills the last sequence of a row group.
    :param labels: ``"next"`` for the token after each one, also where that one is in another sequence; the last token of a
        document has -100. ``"same"`` for the token itself, for models that shift labels, as those of Hugging Face do; the
        first token of a document has -100.
    """

    column: str
    length: int
    bos: int | None = None
    eos: int | None = None
    pad: int = 0
    labels: str | None = None

    def encode(self) -> str:
        """The packing as the native half reads it."""
        if not isinstance(self.column, str):
            raise UsageError(f"tokens: column is {self.column!r}; pass the name of a column of token lists")
        if self.labels not in (None, "next", "same"):
            raise UsageError(f'tokens of column {self.column!r}: labels is {self.labels!r}; it must be "next" or "same"')
        options: dict[str, Any] = {"column": self.column, "length": self._number("length", self.length, 1, 1 << 20)}
        for name, token in (("bos", self.bos), ("eos", self.eos), ("pad", self.pad)):
            if token is not None or name == "pad":
                options[name] = self._number(name, token, 0, (1 << 63) - 1)
        if self.labels is not None:
            options["labels"] = self.labels
        return json.dumps(options)

    def _number(self, name: str, value: Any, least: int, most: int) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if isinstance(value, bool) or not least <= number <= most:
            raise UsageError(
                f"tokens of column {self.column!r}: {name} is {value!r}; it must be a whole number from {least} to {most}"
            )
        return number
