#!/usr/bin/env python3
"""JPEG files of Pillow with the pixels that Pillow decodes, for the tests of the decoder.

    jpeg_fixtures.py

Writes streams/src/feed/image/jpeg/fixtures.rs, and the files alone to fuzz/corpus/jpeg/. Needs Pillow and NumPy. The
pixels are those of libjpeg-turbo: its arithmetic is the same on every machine.
"""

import base64
import io
import pathlib

import numpy
from PIL import Image, ImageDraw, features

ROOT = pathlib.Path(__file__).parent.parent
RUST = ROOT / "streams/src/feed/image/jpeg/fixtures.rs"
CORPUS = ROOT / "fuzz/corpus/jpeg"

HEAD = """//! JPEG files of Pillow with the pixels that Pillow decodes. Written by `scripts/jpeg_fixtures.py`.

/// Name, width and height, file, and pixels: grey, or red, green and blue. Pillow {pillow}, libjpeg-turbo {turbo}.
pub(super) const FILES: [(&str, (u32, u32), &str, &str); {count}] = [
"""

# Widths and heights beside the units of 8 and 16 pixels, and one that ends with a whole pair.
KINDS = {
    "subsampled_both_ways": (17, 11, {"quality": 85, "subsampling": 2}),
    "subsampled_even_width": (12, 10, {"quality": 95, "subsampling": 2}),
    "subsampled_two_columns": (3, 5, {"quality": 90, "subsampling": 2}),
    "subsampled_progressive": (19, 9, {"quality": 75, "subsampling": 2, "progressive": True}),
    "subsampled_columns": (13, 9, {"quality": 40, "subsampling": 1}),
    "restarts": (21, 18, {"quality": 60, "subsampling": 1, "restart_marker_blocks": 1}),
    "whole": (10, 7, {"quality": 70, "subsampling": 0}),
    "red_green_blue": (9, 9, {"quality": 80, "keep_rgb": True}),
    "grey": (11, 6, {"quality": 80, "progressive": True}),
}


def picture(width, height):
    """Shades, noise and a saturated edge: subsampled colours differ most there."""
    random = numpy.random.default_rng(width * height)
    y, x = numpy.mgrid[0:height, 0:width]
    shades = numpy.stack([x * 9 + y * 4, x * 3 + y * 11, x * y], -1) % 256 + random.normal(0, 12, (height, width, 3))
    image = Image.fromarray(numpy.clip(shades, 0, 255).astype(numpy.uint8))
    ImageDraw.Draw(image).rectangle([width // 2, 0, width, height // 2], fill=(255, 20, 0))
    return image


def main():
    entries = []
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, (width, height, options) in KINDS.items():
        image = picture(width, height)
        out = io.BytesIO()
        (image.convert("L") if name == "grey" else image).save(out, "JPEG", optimize=True, **options)
        (CORPUS / name.replace("_", "-")).write_bytes(out.getvalue())
        pixels = Image.open(io.BytesIO(out.getvalue())).tobytes()
        file, pixels = (base64.b64encode(data).decode() for data in (out.getvalue(), pixels))
        entries.append(f'    (\n        "{name}",\n        ({width}, {height}),\n        "{file}",\n        "{pixels}",\n    ),\n')
    turbo = features.version("libjpeg_turbo")
    head = HEAD.format(pillow=Image.__version__, turbo=turbo, count=len(entries))
    RUST.write_text(head + "".join(entries) + "];\n")


main()
