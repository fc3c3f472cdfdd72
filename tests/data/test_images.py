# SPDX-License-Identifier: Apache-2.0
"""Images of any format, made what a model sees."""

import io

import numpy as np
import pytest

from jaxmoe.data import fields
from jaxmoe.data.images import decode
from tests.data import own_files


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP", "JPEG", "GIF", "PPM"])
def test_common_formats(form):
    """A plane of one color comes out as that color, up to what the format loses."""
    from PIL import Image

    image = Image.new("RGB", (40, 30), (200, 100, 50))
    pixels = decode(own_files.encoded(image, form), 8, "rgb")
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.float32
    np.testing.assert_allclose(
        pixels, np.full((8, 8, 3), (200, 100, 50)) / 255, atol=0.02
    )
    gray = decode(own_files.encoded(image, form), 8, "gray")
    assert gray.shape == (8, 8, 1)
    luma = (0.299 * 200 + 0.587 * 100 + 0.114 * 50) / 255
    np.testing.assert_allclose(gray, np.full((8, 8, 1), luma), atol=0.02)


def test_the_middle_is_cut_out():
    """Of a wide image the left and the right part are left out."""
    from PIL import Image

    image = Image.new("L", (300, 100), 0)
    image.paste(255, (100, 0, 200, 100))
    pixels = decode(own_files.encoded(image), 10, "gray")
    np.testing.assert_allclose(pixels, 1.0, atol=0.1)  # the filter sees the edge


def test_turned_deep_and_transparent_images():
    """EXIF says up, 16 bits keep their values, what is transparent becomes white."""
    from PIL import Image

    half = Image.new("L", (40, 40), 0)
    half.paste(255, (0, 0, 40, 20))  # the upper half is white
    turned = half.rotate(90)  # as a camera on its side stores it
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn clockwise
    content = io.BytesIO()
    turned.save(content, "PNG", exif=exif)
    pixels = decode(content.getvalue(), 4, "gray")[:, :, 0]
    assert (pixels[0] > 0.9).all() and (pixels[3] < 0.1).all()
    deep = Image.fromarray(np.full((20, 20), 32768, np.uint16))
    found = decode(own_files.encoded(deep), 4, "gray")
    np.testing.assert_allclose(found, 0.5, atol=0.01)
    clear = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    np.testing.assert_allclose(decode(own_files.encoded(clear), 4, "rgb"), 1.0)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\nxxxx"])
def test_no_image(content):
    with pytest.raises(fields.BrokenRecord, match="its image cannot be decoded"):
        decode(content, 8, "rgb")


def test_half_an_image():
    content = own_files.encoded(own_files.picture(0, (200, 200)))
    with pytest.raises(fields.BrokenRecord, match="its image cannot be decoded"):
        decode(content[: len(content) // 2], 8, "rgb")
