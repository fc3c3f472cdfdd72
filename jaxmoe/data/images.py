# SPDX-License-Identifier: Apache-2.0
"""Floor 5. From an encoded image to an array of one size. Pillow does the work."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxmoe.config import Data
from jaxmoe.data import digits
from jaxmoe.data.fields import BrokenRecord

if TYPE_CHECKING:
    from PIL import Image


def decode(
    content: bytes | memoryview, size: int, mode: Literal["gray", "rgb"]
) -> np.ndarray:
    """Decodes, turns upright, and scales an image.

    Args:
      content: The file, in any format that Pillow knows. Of several pictures the first
        counts; what is transparent becomes white.
      size: Pixels along the side of the result. The middle is cut out as a square, and
        scaled with bicubic filtering.
      mode: Whether the result has one channel or three.

    Returns:
      float32 [size, size, channels] in [0, 1].

    Raises:
      BrokenRecord: if it is no image, or not a whole one.
    """
    from PIL import Image, ImageOps

    # A large JPEG is decoded at a fraction of its size, in a fraction of the time;
    # twice the size is kept for the filter.
    with _opened(content, draft=2 * size) as upright:
        shaped = upright.convert("L" if mode == "gray" else "RGB")
        bicubic = Image.Resampling.BICUBIC
        fitted = ImageOps.fit(shaped, (size, size), method=bicubic)
        pixels = np.asarray(fitted, np.float32) / 255.0
    return pixels.reshape(size, size, -1)


def grey(content: bytes) -> np.ndarray:
    """The same picture as it is, upright and grey: float32 [H, W] in [0, 1].

    Raises:
      BrokenRecord: if it is no image, or not a whole one.
    """
    with _opened(content) as upright:
        return np.asarray(upright.convert("L"), np.float32) / 255.0


@contextlib.contextmanager
def _opened(content: bytes | memoryview, draft: int = 0) -> Iterator[Image.Image]:
    """The first picture of a file, upright, of 8 bits and opaque; errors inside are
    those of the record."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as image:
            if draft:
                image.draft(None, (draft, draft))
            upright = _eight_bits(ImageOps.exif_transpose(image))
            if upright.has_transparency_data:
                over = upright.convert("RGBA")
                white = Image.new("RGBA", over.size, "white")
                upright = Image.alpha_composite(white, over)
            yield upright
    except Exception as error:  # Pillow's formats raise whatever comes
        reason = str(error).partition("<_io")[0].strip() or type(error).__name__
        raise BrokenRecord(f"its image cannot be decoded ({reason})") from error


def to_patches(image: np.ndarray, data: Data) -> np.ndarray:
    """Cuts a decoded image into patches, float32 [P, D]."""
    return digits.to_patches(image[None], data.patch_size)[0]


def _eight_bits(image):
    """Images of 16 bits become images of 8; Pillow would cut off what is above 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.float64) * (255.0 / 65535.0)
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
