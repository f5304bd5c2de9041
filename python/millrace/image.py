"""The transform of images: from encoded images in a column to arrays of one shape."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import UsageError

__all__ = ["Image"]


@dataclass(frozen=True)
class Image:
    """What an image column becomes: ``Feed(..., images={"image": Image(224, crop="random_resized", flip=0.5)})``.

    The column holds JPEG, PNG or WebP images as bytes (or in a struct with a field ``bytes``, as Hugging Face datasets
    have them), or texts that name files of the volume: relative to the dataset's folder, or from the volume's root with a
    leading ``/``.

    The feed decodes an image, applies its EXIF orientation, scales, crops and flips it. Transparency is dropped, 16-bit
    values become 8-bit ones, CMYK becomes RGB, and of an animation the first frame is taken. A broken image is an error
    that names its file and row.

    Random draws depend on the feed's ``seed``, the epoch and the row only: any number of readers, workers and resumes
    gives the same pixels. All image columns of a row share them, so that an image and its mask are cropped alike.

    :param size: side of the square, or height and width, of the result.
    :param crop: ``"whole"`` scales the whole image to ``size``, whatever its aspect ratio. ``"center"`` and ``"random"``
        scale its shorter side and cut ``size`` out. ``"random_resized"`` is torchvision's ``RandomResizedCrop``.
    :param resize: length of the shorter side before a ``"center"`` or ``"random"`` crop; by default the image just covers
        ``size``.
    :param scale: least and largest part of the area for ``"random_resized"``.
    :param ratio: least and largest aspect ratio for ``"random_resized"``.
    :param flip: probability of a flip from left to right.
    :param flip_vertical: probability of a flip from top to bottom.
    :param filter: ``"bilinear"`` or ``"bicubic"``, both antialiased.
    :param channels: ``"rgb"`` or ``"grey"``.
    :param dtype: ``"uint8"``, or ``"float32"`` for ``(value / 255 - mean) / std``; by default ``"float32"`` if ``mean`` or
        ``std`` is given.
    :param layout: ``"chw"`` for PyTorch, ``"hwc"`` for JAX and TensorFlow.
    :param mean: a number, or one for each channel.
    :param std: a number, or one for each channel.
    :param pixels_max: most pixels of an encoded image; one that says that it has more is an error.
    """

    size: int | tuple[int, int]
    crop: str = "whole"
    resize: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0
    flip_vertical: float = 0.0
    filter: str = "bilinear"
    channels: str = "rgb"
    dtype: str | None = None
    layout: str = "chw"
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    pixels_max: int = 64 << 20

    def encode(self, column: str) -> str:
        """The transform as the native half reads it."""
        try:
            options = {
                "size": _size(self.size),
                "crop": self.crop,
                "resize": None if self.resize is None else operator.index(self.resize),
                "scale": _numbers(self.scale),
                "ratio": _numbers(self.ratio),
                "flip": float(self.flip),
                "flip_vertical": float(self.flip_vertical),
                "filter": self.filter,
                "channels": self.channels,
                "dtype": self.dtype,
                "layout": self.layout,
                "mean": _numbers(self.mean),
                "std": _numbers(self.std),
                "pixels_max": operator.index(self.pixels_max),
            }
            return json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"images, column {column!r}: {self!r} has a value of another type ({error})") from error


def _size(size: Any) -> list[int]:
    """Height and width, of any type of whole numbers."""
    if isinstance(size, bool):
        raise TypeError("size is a whole number, or two of them")
    try:
        side = operator.index(size)
    except TypeError:
        if isinstance(size, str) or not isinstance(size, Iterable):
            raise TypeError("size is a whole number, or two of them") from None
        return [operator.index(side) for side in size]
    return [side, side]


def _numbers(values: Any) -> list[float]:
    """A number or several, of any type: also arrays and tensors."""
    if values is None:
        return []
    if isinstance(values, str):
        raise TypeError(f"{values!r} is a text")
    if isinstance(values, Iterable) and getattr(values, "shape", None) != ():
        return [float(value) for value in values]
    return [float(values)]
