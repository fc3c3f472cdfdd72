# SPDX-License-Identifier: Apache-2.0
"""The digits: a fixed split, true captions, patches in raster order."""

import hypothesis
import numpy as np
import pytest
import sklearn.datasets
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data import digits
from jaxmoe.data.tokenizer import LANGUAGES, make_tokenizer


def test_split_is_a_partition():
    """Each image is in exactly one part, and more held-out images only add."""
    train = digits.load_digits(297, training=True)
    held_out = digits.load_digits(297, training=False)
    assert train.images.shape == (1500, 8, 8)
    assert held_out.images.shape == (297, 8, 8)
    both = np.concatenate([train.images, held_out.images])
    every = digits.load_digits(1, training=True)
    one = digits.load_digits(1, training=False)
    everything = np.concatenate([every.images, one.images])
    assert sorted(i.tobytes() for i in both) == sorted(i.tobytes() for i in everything)
    np.testing.assert_array_equal(held_out.images[:1], one.images)
    assert len({i.tobytes() for i in everything}) == digits.NUM_IMAGES


def test_values():
    images, labels = digits.load_digits(297, training=False)
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert set(labels.tolist()) == set(range(10))
    assert min(np.bincount(labels)) >= 15  # no digit is missing from the evaluation


@pytest.mark.parametrize("held_out", [0, 1797, 5000])
def test_held_out_must_leave_images(held_out):
    with pytest.raises(ConfigError, match=f"Data.held_out={held_out} leaves no images"):
        digits.load_digits(held_out, training=True)


def test_captions_are_distinct_and_short():
    tokenizer = make_tokenizer("bytes")
    captions = [
        digits.caption(i, language) for language in LANGUAGES for i in range(10)
    ]
    assert digits.caption(7, "en") == "digit seven"
    assert digits.caption(7, "zh") == "数字七"
    assert len(set(captions)) == 20
    assert max(len(tokenizer.encode(text)) for text in captions) == 11


@pytest.mark.parametrize("patch_size", [1, 2, 4, 8])
def test_patches_in_raster_order(patch_size):
    """Patch r * columns + c shows the pixels of row r and column c of the grid."""
    image = np.arange(64.0).reshape(8, 8)
    patches = digits.to_patches(np.stack([image, -image]), patch_size)
    columns = 8 // patch_size
    assert patches.shape == (2, columns**2, patch_size**2)
    for i, patch in enumerate(patches[0]):
        y, x = divmod(i, columns)
        rows = slice(y * patch_size, (y + 1) * patch_size)
        expected = image[rows, x * patch_size : (x + 1) * patch_size]
        np.testing.assert_array_equal(patch, expected.ravel())
    np.testing.assert_array_equal(patches[1], -patches[0])


@hypothesis.given(st.integers(-7, 7), st.integers(-7, 7))
def test_shift(dy, dx):
    """Pixel (y, x) goes to (y + dy, x + dx), if that is inside; the rest is 0."""
    image = np.arange(1.0, 65.0).reshape(8, 8)
    moved = digits.shift(image, dy, dx)
    for y in range(8):
        for x in range(8):
            inside = 0 <= y - dy < 8 and 0 <= x - dx < 8
            assert moved[y, x] == (image[y - dy, x - dx] if inside else 0)


def test_shift_by_more_than_the_image():
    assert not digits.shift(np.ones((8, 8)), 9, 0).any()
    assert not digits.shift(np.ones((8, 8)), -9, -20).any()


def test_images_are_those_of_scikit_learn(monkeypatch):
    """Read from its file, and if the file were elsewhere, by its own function."""
    found = digits._table()
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    np.testing.assert_array_equal(found, np.column_stack([pixels, labels]))
    monkeypatch.setattr(digits.Path, "is_file", lambda _: False)
    np.testing.assert_array_equal(digits._table(), found)
