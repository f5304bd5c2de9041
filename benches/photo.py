"""Synthetic photos for benchmarks: JPEG files of 500 x 375 pixels with the detail of a photograph."""

import io

import numpy
from PIL import Image


def photo(seed):
    """The bytes of a photo; a seed gives the same one each time."""
    random = numpy.random.default_rng(seed)
    shades = numpy.zeros((375, 500, 3))
    for cells in (4, 8, 16, 32, 64, 128):
        noise = random.normal(size=(cells, cells, 3)).astype(numpy.float32) * 160 / cells**0.8
        for channel in range(3):
            layer = Image.fromarray(noise[:, :, channel]).resize((500, 375), Image.Resampling.BICUBIC)
            shades[:, :, channel] += numpy.asarray(layer)
    out = io.BytesIO()
    Image.fromarray(numpy.clip(shades + 128, 0, 255).astype(numpy.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()
