# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Handwritten digits with a caption in English and in Chinese.

The 1,797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded; the
caption is made from the label. Which images are held out depends on their number alone,
never on a seed, so that figures of different runs can be compared.

Legend: N images, H x W pixels, P patches.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.data.tokenizer import Language

NUM_IMAGES = 1797
IMAGE_SIZE = 8

_WORDS: dict[Language, tuple[str, ...]] = {
    "en": (
        *("zero", "one", "two", "three", "four"),
        *("five", "six", "seven", "eight", "nine"),
    ),
    "zh": tuple("零一二三四五六七八九"),
}
# Short on purpose: with bytes a caption has at most 11 tokens, so that 4 patches, a
# corrupted caption and the caption itself fit into 28 positions.
_FRAMES: dict[Language, str] = {"en": "digit {}", "zh": "数字{}"}


class Digits(NamedTuple):
    """Images, float32 in [0, 1], and what they show, int32 in 0..9."""

    images: np.ndarray  # [N, 8, 8]
    labels: np.ndarray  # [N]


def caption(label: int, language: Language) -> str:
    """The true caption of an image, e.g. 'digit seven'."""
    return _FRAMES[language].format(_WORDS[language][label])


def load_digits(held_out: int, *, training: bool) -> Digits:
    """Loads the images to train on, or those held out.

    Args:
      held_out: How many images are kept from training. More of them keep the same ones
        and add others.
      training: The images to train on, rather than the held-out ones.

    Raises:
      ConfigError: if none would be left for either use.
    """
    if not 1 <= held_out < NUM_IMAGES:
        raise ConfigError(
            f"Data.held_out={held_out} leaves no images on one side: there are"
            f" {NUM_IMAGES}, so it must be from 1 to {NUM_IMAGES - 1}. Set"
            " Data.held_out to 297, for example."
        )
    digits, order = _all_digits(), _split_order()
    chosen = order[held_out:] if training else order[:held_out]
    return Digits(digits.images[chosen], digits.labels[chosen])


def content_hash() -> str:
    """Identifies images, labels and captions."""
    digits = _all_digits()
    parts = (digits.images.tobytes(), digits.labels.tobytes(), repr((_WORDS, _FRAMES)))
    content = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
    return hashlib.sha256(content).hexdigest()[:16]


def to_patches(images: np.ndarray, patch_size: int) -> np.ndarray:
    """Cuts [N, H, W] or [N, H, W, C] images into patches, in raster order.

    Returns:
      [N, P, patch_size**2 * C]; the channels of a pixel stand side by side.
    """
    n, height, width = images.shape[:3]
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(n, rows, patch_size, columns, patch_size, -1)
    # [N, rows, p, columns, p, C] -> [N, rows * columns, p * p * C]
    return cut.swapaxes(2, 3).reshape(n, rows * columns, -1)


def shift(image: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """Moves an [H, W, ...] image down by dy and right by dx pixels; 0 comes in."""
    height, width = image.shape[:2]
    dy, dx = max(-height, min(dy, height)), max(-width, min(dx, width))
    moved = np.zeros_like(image)
    moved[max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = image[
        max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)
    ]
    return moved


@functools.lru_cache(maxsize=1)
def _all_digits() -> Digits:
    pixels, labels = np.split(_table(), [-1], axis=1)  # 0..16, 64 to an image
    images = np.asarray(pixels / 16.0, np.float32)
    images = images.reshape(NUM_IMAGES, IMAGE_SIZE, IMAGE_SIZE)
    labels = np.asarray(labels[:, 0], np.int32)
    images.flags.writeable = labels.flags.writeable = False
    return Digits(images, labels)


def _table() -> np.ndarray:
    """Pixels and label of each image, [N, 65]: the file, not imported by its package,
    which takes a second."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn import datasets  # it may be kept elsewhere one day

    pixels, labels = datasets.load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])


def _split_order() -> np.ndarray:
    # RandomState, since its streams are promised never to change.
    return np.random.RandomState(NUM_IMAGES).permutation(NUM_IMAGES)
