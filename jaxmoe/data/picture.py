# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Image files that a model is asked about, made what it was trained on.

Legend: P patches of D numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxmoe.config import Data
from jaxmoe.config_base import mistake, shown_path
from jaxmoe.data import digits, images
from jaxmoe.data.fields import BrokenRecord

GREYS = 16  # levels above black that the digits have


def read_patches(path: str, data: Data, *, digit: bool) -> np.ndarray:
    """The patches of an image file, as a model has seen images in training.

    Args:
      path: A file in any common format.
      data: How images were made.
      digit: It is to look like those of the digits; else as those of files.

    Returns:
      float32 [P, D].

    Raises:
      ConfigError: if it cannot be read.
    """
    try:
        content = Path(path).read_bytes()
        if digit:
            return digit_patches(content, data.patch_size)
        pixels = images.decode(content, data.image_size, data.image_mode)
        return images.to_patches(pixels, data)
    except OSError as error:
        reason = error.strerror
    except BrokenRecord as error:
        reason = str(error)
    raise mistake(
        f"--image={shown_path(path)} cannot be read ({reason})",
        "it must be an image file, such as PNG or JPEG",
        "Name another file",
    )


def digit_patches(content: bytes, patch_size: int) -> np.ndarray:
    """A picture of a digit as the model was trained on them, float32 [P, D].

    The picture becomes grey and square, with its background around it, and is averaged
    down to 8 x 8 pixels of 17 grey levels. The digits of the training data are light on
    dark: a picture whose border is light is taken as a negative.

    Raises:
      BrokenRecord: if it is no image, or not a whole one.
    """
    from PIL import Image

    grey = images.grey(content)
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ground = float(np.median(border))
    if ground > 0.5:
        grey, ground = 1 - grey, 1 - ground
    height, width = grey.shape
    side = max(height, width)
    square = np.full((side, side), ground, np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = grey
    size = (digits.IMAGE_SIZE, digits.IMAGE_SIZE)
    small = np.asarray(Image.fromarray(square).resize(size, Image.Resampling.BOX))
    levels = np.rint(small.clip(0, 1) * GREYS) / np.float32(GREYS)
    return digits.to_patches(levels[None].astype(np.float32), patch_size)[0]
