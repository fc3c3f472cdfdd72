# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Running text that is there without a download: Python's own help topics.

The text differs between Python versions, so nothing may depend on what it says. It is
cut into blocks of some 2,000 characters, and every tenth block is held out. Paragraphs
that occur in several topics count once, so held-out text is never trained on.
"""

from __future__ import annotations

import functools
import hashlib
import re

from jaxmoe.config import ConfigError

BLOCK_CHARACTERS = 2000
HELD_OUT_EVERY = 10

_SHORTEST_PARAGRAPH = 30  # characters; shorter ones are headings and table cells
_NOT_PROSE = re.compile(r"::=|>>>|^\s*[|+]", re.MULTILINE)  # grammars, sessions, tables
_RULE = re.compile(r"^[^\w\n]+$", re.MULTILINE)  # underlined headings
_MARKUP = re.compile(r":\w+:(?=`)|`+|(?<!\w)\*{1,2}(?=\w)|(?<=\w)\*{1,2}(?!\w)")


@functools.cache
def load_text(*, training: bool) -> tuple[str, ...]:
    """Loads the blocks of text to train on, or those held out."""
    blocks = _blocks(_paragraphs())
    if len(blocks) < HELD_OUT_EVERY:
        raise ConfigError(
            f"this Python's pydoc_data.topics holds {len(blocks)} blocks of text: at"
            f" least {HELD_OUT_EVERY} are needed. Use a Python with its documentation,"
            " or set Data.lm_weight and Data.text_denoise_weight to 0."
        )
    return tuple(
        block
        for i, block in enumerate(blocks)
        if (i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1) == training
    )


def content_hash() -> str:
    """Identifies the text, all of it."""
    text = "\0".join(load_text(training=True) + load_text(training=False))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _paragraphs() -> list[str]:
    """Distinct paragraphs of prose, each on one line."""
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship Python without it
        return []
    found = {}
    for name in sorted(topics.topics):
        for paragraph in re.split(r"\n\s*\n", _RULE.sub("", topics.topics[name])):
            if _NOT_PROSE.search(paragraph):
                continue
            clean = " ".join(_MARKUP.sub("", paragraph).split())
            if len(clean) >= _SHORTEST_PARAGRAPH:
                found.setdefault(clean)
    return list(found)


def _blocks(paragraphs: list[str]) -> list[str]:
    """Joins paragraphs to blocks; the last, short one joins its neighbour."""
    blocks, block, size = [], [], 0
    for paragraph in paragraphs:
        block.append(paragraph)
        size += len(paragraph)
        if size >= BLOCK_CHARACTERS:
            blocks.append("\n".join(block))
            block, size = [], 0
    if block and blocks:
        blocks[-1] = "\n".join([blocks[-1], *block])
    return blocks
