# SPDX-License-Identifier: Apache-2.0
"""Long texts are cut into pieces."""

import hypothesis
from hypothesis import strategies as st

from jaxmoe.data import index


@hypothesis.given(st.text(min_size=1, max_size=400), st.integers(4, 200))
def test_pieces(text, size):
    """Together the pieces are the text, and none has more bytes."""
    text = text.encode("utf-8", errors="replace").decode()
    content = text.encode()
    count = index.num_pieces(content, size)
    found = [index.piece_of(content, size, number) for number in range(count)]
    assert "".join(found) == text
    assert max(len(piece.encode()) for piece in found) <= size
    assert index.num_pieces(content, 0) == 1
    assert index.piece_of(content, 0, 0) == text


def test_pieces_end_at_blanks():
    content = b"twelve words of one text that is to be cut into pieces here " * 40
    found = [
        index.piece_of(content, 120, n) for n in range(index.num_pieces(content, 120))
    ]
    assert len(found) <= len(content) / 110 + 1
    assert sum(piece.endswith(" ") for piece in found) > 0.8 * len(found)
