"""Exceptions of users' functions in map jobs, with texts of bounded size."""

from __future__ import annotations

import os
import traceback

__all__ = ["TRACE_MAX", "FunctionFailed", "shortened", "text_of"]

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Characters of an exception's first line, and of its traceback, that reach the caller: an exception may hold a whole batch.
_LINE_MAX = 2_000
TRACE_MAX = 100_000


class FunctionFailed(Exception):
    """The user's code raised an exception; ``where`` says for which rows."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(f"{where}: {text_of(error)}")
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN):
            frames = frames.tb_next
        self.traceback = shortened("".join(traceback.format_exception(type(error), error, frames)).rstrip(), TRACE_MAX)


def text_of(error: BaseException) -> str:
    """The type of an exception, and the first line of its text."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception as failed:
        text = f"its text cannot be had ({type(failed).__name__})"
    return shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__, _LINE_MAX)


def shortened(text: str, most: int) -> str:
    """A text with its middle left out where it is long: a traceback says what happened at its end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most} characters left out] {text[-(most // 2) :]}"
