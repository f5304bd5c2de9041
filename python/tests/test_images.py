"""Images as tensors, against Pillow's antialiased scaling, in every format and for any number of readers."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import unittest
from decimal import Decimal
from typing import Any

import millrace
import numpy
import pyarrow
import pyarrow.parquet
from millrace import export
from PIL import Image as Pillow
from PIL import ImageDraw
from support import HomeCase, torch_or_skip

ROWS = 60


def photo(width: int, height: int, seed: int) -> Pillow.Image:
    """Soft shades on all scales, with some edges."""
    random = numpy.random.default_rng(seed)
    shades = numpy.zeros((height, width, 3))
    for cells in (4, 8, 16, 32, 64):
        noise = random.normal(size=(cells, cells, 3)).astype(numpy.float32) * 160 / cells**0.8
        for channel in range(3):
            layer = Pillow.fromarray(noise[:, :, channel]).resize((width, height), Pillow.Resampling.BICUBIC)
            shades[:, :, channel] += numpy.asarray(layer)
    image = Pillow.fromarray(numpy.clip(shades + 128, 16, 240).astype(numpy.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, r = random.integers(0, width), random.integers(0, height), int(random.integers(4, 30))
        draw.ellipse([x - r, y - r, x + r, y + r], fill=tuple(int(v) for v in random.integers(40, 215, 3)))
    return image


def encoded(image: Pillow.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def picture(row: int) -> bytes:
    image = photo(200 + 10 * (row % 7), 180 + 15 * (row % 5), row)
    if row % 5 == 3:
        return encoded(image, "PNG")
    if row % 5 == 4:
        return encoded(image, "WEBP", lossless=True)
    if row % 10 == 5:
        # Black and white: cubic weights leave the range of a byte, in each of the two passes.
        random = numpy.random.default_rng(row)
        noise = random.integers(0, 2, (image.height, image.width, 3), numpy.uint8) * numpy.uint8(255)
        return encoded(Pillow.fromarray(noise), "PNG")
    return encoded(image, "JPEG", quality=90, subsampling=row % 3, progressive=row % 2 == 1)


class ImagesTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.pictures = [picture(row) for row in range(ROWS)]
        volume = millrace.Volume("photos", create=True, home=cls.home)
        table = pyarrow.table({"id": range(ROWS), "image": cls.pictures, "file": [f"files/{row}" for row in range(ROWS)]})
        for row, content in enumerate(cls.pictures):
            with volume.open(f"/train/files/{row}", "wb") as out:
                out.write(content)
        with volume.open("/train/0.parquet", "wb") as out:
            pyarrow.parquet.write_table(table, out, row_group_size=25)
        volume.snapshot("v1")

    def images(self, image: millrace.Image, column: str = "image", **arguments: Any) -> millrace.Feed:
        arguments = {"columns": ["id", column], "batch_rows": 16, **arguments}
        return millrace.Feed("photos@v1:/train", images={column: image}, home=self.home, **arguments)

    def assert_close(self, found: Any, expected: Any, row: int) -> None:
        off = numpy.abs(found.astype(int) - expected.astype(int))
        # The decoders give the same values, so only the rounding of the scaling differs. Older versions of libjpeg-turbo
        # round differently.
        self.assertLessEqual(off.max(), 2, f"row {row}")
        self.assertLess(off.mean(), 0.6, f"row {row}")

    def test_pixels_are_those_of_pillows_antialiased_scaling(self) -> None:
        filters = {"bilinear": Pillow.Resampling.BILINEAR, "bicubic": Pillow.Resampling.BICUBIC}
        for name, resampling in filters.items():
            seen = 0
            for batch in self.images(millrace.Image((96, 128), filter=name, layout="hwc")):
                self.assertEqual(batch["image"].shape[1:], (96, 128, 3))
                self.assertEqual(batch["image"].dtype, numpy.uint8)
                for row, pixels in zip(batch["id"], batch["image"]):
                    image = Pillow.open(io.BytesIO(self.pictures[row])).convert("RGB")
                    self.assert_close(pixels, numpy.asarray(image.resize((128, 96), resampling)), row)
                    seen += 1
            self.assertEqual(seen, ROWS)

    def test_a_centre_crop_in_floats_is_that_of_torchvision(self) -> None:
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        for batch in self.images(millrace.Image(96, crop="center", resize=112, mean=mean, std=std)):
            self.assertEqual((batch["image"].shape[1:], batch["image"].dtype), ((3, 96, 96), numpy.float32))
            for row, values in zip(batch["id"], batch["image"]):
                image = Pillow.open(io.BytesIO(self.pictures[row])).convert("RGB")
                short, long = min(image.size), max(image.size)
                scaled = int(112 * long / short)
                size = (112, scaled) if image.width <= image.height else (scaled, 112)
                left, top = (round((side - 96) / 2.0) for side in size)
                image = image.resize(size, Pillow.Resampling.BILINEAR).crop((left, top, left + 96, top + 96))
                pixels = values.transpose(1, 2, 0) * numpy.float32(std) + numpy.float32(mean)
                self.assert_close(numpy.round(pixels * 255), numpy.asarray(image), row)

    def test_files_of_the_volume_give_the_pixels_of_bytes(self) -> None:
        image = millrace.Image(32, crop="random", flip=0.5, channels="grey")
        for one, other in zip(self.images(image), self.images(image, "file"), strict=True):
            numpy.testing.assert_array_equal(one["image"], other["file"])
            self.assertEqual(one["image"].shape[1:], (1, 32, 32))

    def test_any_world_resume_and_pickle_give_the_same_pixels(self) -> None:
        image = millrace.Image((24, 32), crop="random_resized", flip=0.5)

        def digests(feeds: list[millrace.Feed], found: dict[tuple[int, int], str], batches: int) -> None:
            for feed in feeds:
                for _ in range(batches):
                    epoch = feed.epoch
                    batch = next(feed)
                    for row, key, pixels in zip(batch["id"], batch["key"], batch["image"]):
                        # The key is one for each row and epoch.
                        digest = hashlib.sha256(pixels.tobytes()).hexdigest()
                        self.assertEqual(found.setdefault((int(row), int(key)), digest), digest)
                    self.assertLessEqual(epoch, 2)

        def feeds(world: int) -> list[millrace.Feed]:
            return [self.images(image, rank=rank, world=world, epochs=None, keys="key") for rank in range(world)]

        whole: dict[tuple[int, int], str] = {}
        digests(feeds(1), whole, 10)
        self.assertEqual(len(whole), 160)
        self.assertEqual(len(set(whole.values())), 160)
        for world in (2, 3, 4):
            parts: dict[tuple[int, int], str] = {}
            first = feeds(world)
            digests(first, parts, 4)
            state = first[0].state_dict()
            second = [pickle.loads(pickle.dumps(feed)) for feed in feeds(5 - world)]
            for feed in second:
                feed.load_state_dict(state)
            digests(second, parts, 6)
            self.assertEqual(parts, whole, f"world {world}")

    def test_arrow_gives_its_extension_type_of_tensors(self) -> None:
        batch = next(self.images(millrace.Image((4, 5)), format="arrow"))
        column = batch.column("image")
        self.assertEqual(column.type.shape, [3, 4, 5])
        expected = next(self.images(millrace.Image((4, 5))))["image"]
        numpy.testing.assert_array_equal(column.to_numpy_ndarray(), expected)

    def test_tensors_of_pytorch_and_its_loader(self) -> None:
        torch = torch_or_skip()
        from torch.utils.data import DataLoader

        from millrace.torch import FeedDataset

        image = millrace.Image(16, crop="random_resized", flip=0.5, mean=0.5, std=0.5)
        expected = [batch["image"] for batch in self.images(image)]
        for workers in (0, 2):
            dataset = FeedDataset(
                "photos@v1:/train", columns=["id", "image"], batch_rows=16, images={"image": image}, home=self.home
            )
            batches = list(DataLoader(dataset, batch_size=None, num_workers=workers))
            for batch, pixels in zip(batches, expected, strict=True):
                self.assertEqual((batch["image"].dtype, tuple(batch["image"].shape[1:])), (torch.float32, (3, 16, 16)))
                self.assertTrue(torch.equal(batch["image"], torch.tensor(pixels.tolist(), dtype=batch["image"].dtype)))

    def test_hostile_images_name_their_row(self) -> None:
        volume = millrace.Volume("photos", home=self.home)
        good = encoded(photo(20, 20, 1), "JPEG")
        cases = [
            (None, "is null"),
            (b"", "has no bytes"),
            (b"\x00" * 64, "neither JPEG, PNG nor WebP"),
            (good[:-100], "cannot be decoded"),
            (encoded(Pillow.new("1", (9_000, 9_000)), "PNG"), "9000 x 9000 pixels, more than 67108864; .*raise pixels_max"),
        ]
        for image, words in cases:
            with volume.open("/bad/0.parquet", "wb") as out:
                pyarrow.parquet.write_table(pyarrow.table({"image": pyarrow.array([good, image], pyarrow.binary())}), out)
            feed = millrace.Feed("photos:/bad", images={"image": millrace.Image(8)}, home=self.home)
            with self.assertRaisesRegex(millrace.CorruptError, f'column "image" in row 1 of row group 0 .*{words}'):
                next(feed)

    def test_the_record_of_a_published_model_has_the_transform(self) -> None:
        image = millrace.Image(8, crop="random", mean=numpy.array([0.5, 0.25, 0]))
        feed = self.images(image, rows_per_epoch=Decimal("0.5"))
        record = json.loads(json.dumps(export._origin("model", feed, None, None, None, "", None)[1]))
        self.assertEqual(record["feed"]["images"], {"image": json.loads(image.encode("image"))})
        self.assertEqual(record["feed"]["rows_per_epoch"], "0.5")

    def test_numbers_of_any_type_are_options(self) -> None:
        plain = millrace.Image((8, 9), crop="random", resize=12, flip=0.5, mean=(0.5, 0.25, 0.0), std=0.5, pixels_max=1 << 20)
        others = millrace.Image(
            numpy.array([8, 9]), crop="random", resize=numpy.int32(12), flip=numpy.float32(0.5), mean=numpy.array([0.5, 0.25, 0]),
            std=numpy.array(0.5), pixels_max=numpy.uint32(1 << 20), scale=numpy.array([0.08, 1.0]),
        )
        self.assertEqual(plain.encode("image"), others.encode("image"))
        self.assertEqual(millrace.Image(numpy.int64(8)).encode("image"), millrace.Image(8).encode("image"))

    def test_wrong_options_are_refused_when_the_feed_opens(self) -> None:
        cases: list[tuple[Any, str]] = [
            ({"image": millrace.Image(8, crop="middle")}, "unknown variant `middle`, expected one of `whole`, `center`"),
            ({"image": millrace.Image((8, 8, 3))}, "images, column \"image\""),
            ({"image": millrace.Image(0)}, "height in size is 0"),
            ({"image": millrace.Image(8, mean=0.5, dtype="uint8")}, "mean needs dtype float32"),
            ({"image": millrace.Image(8, flip=2)}, "flip is 2"),
            ({"image": millrace.Image("8")}, "images, column 'image': .*size is a whole number, or two"),
            ({"image": millrace.Image(8.5)}, "images, column 'image': .*size is a whole number, or two"),
            ({"image": millrace.Image(None)}, "images, column 'image': .*size is a whole number, or two"),
            ({"image": millrace.Image(8, mean="x")}, "images, column 'image': .*'x' is a text"),
            ({"image": millrace.Image(8, mean=[None])}, "images, column 'image': .*a value of another type"),
            ({"image": 224}, "pass the name of a column and a millrace.Image"),
            ({"id": millrace.Image(8)}, "\"id\" is Int64"),
        ]
        for images, words in cases:
            with self.assertRaisesRegex(millrace.UsageError, words):
                millrace.Feed("photos@v1:/train", columns=["id", "image"], images=images, home=self.home)


if __name__ == "__main__":
    unittest.main()
