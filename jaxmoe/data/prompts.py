# SPDX-License-Identifier: Apache-2.0
"""Floor 5. From an image and a text that a user gives to a prompt of one of the tasks.

  image, no text            caption        the whole caption is written
  image, text               caption        the text is continued as a caption
  image, text with masks    image_denoise  the text is written anew, masks filled in
  text                      lm             the text is continued
  text with masks           text_denoise   the text is written anew, masks filled in

`[mask]` in a text stands for one masked token, `[mask:5]` for five.
"""

from __future__ import annotations

import re

import numpy as np

from jaxmoe.config import Model
from jaxmoe.config_base import LARGEST_INT, mistake, shown
from jaxmoe.data.tasks import Example
from jaxmoe.data.tokenizer import Language, Tokenizer

_MASK = re.compile(r"\[mask(?::([0-9]+))?\]")


def make_prompt(
    patches: np.ndarray | None,
    text: str | None,
    *,
    language: Language,
    tokenizer: Tokenizer,
    model: Model,
) -> Example:
    """The beginning of an example, as `data.tasks` makes them for training.

    Args:
      patches: The image, float32 [P, D]; None: a text alone.
      text: The text; None: an image alone.
      language: Which language a caption shall be in.
      tokenizer: Splits the text.
      model: Has a number of positions, into which all must fit.

    Raises:
      ConfigError: if it does not fit, with the tokens that would.
    """
    assert patches is not None or text is not None
    masked = bool(text and _MASK.search(text))
    ids = tokenizer.encode(text or "")
    if masked:
        assert text is not None
        ids = _with_masks(text, tokenizer, model.sequence_length)
    spoken = [] if patches is None else [tokenizer.language_id(language)]
    task = (
        "text_denoise" if masked else "lm",
        "image_denoise" if masked else "caption",
    )
    encoder = [*spoken, *ids] if masked else []
    decoder = [tokenizer.bos_id]
    if not masked:
        decoder = [*(spoken or decoder), *ids]
    image = 0 if patches is None else len(patches)
    used = image + len(encoder) + len(decoder) + (len(ids) if masked else 0)
    if used > model.sequence_length:
        room = len(ids) - (used - model.sequence_length) // (2 if masked else 1)
        room -= masked and (used - model.sequence_length) % 2
        raise mistake(
            f"--prompt={shown(text)} has {len(ids)} tokens",
            f"with Model.sequence_length={model.sequence_length} there is room for"
            f" {max(room, 0)}{', which are written anew' if masked else ''}",
            "Give a shorter text",
        )
    return Example(task[patches is not None], patches, encoder, decoder, ())


def _with_masks(text: str, tokenizer: Tokenizer, most: int) -> list[int]:
    """The ids of a text, with the mask token in the place of each mask."""
    ids: list[int] = []
    end = 0
    for match in _MASK.finditer(text):
        count = int(match[1][:10]) if match[1] else 1
        if not 1 <= count <= min(most, LARGEST_INT):
            raise mistake(
                f"{match[0]} in --prompt masks {count} tokens",
                f"it is from 1 to the positions of a sequence, {most}",
                "Write [mask] for one token, or [mask:3] for three",
            )
        ids += tokenizer.encode(text[end : match.start()])
        ids += [tokenizer.mask_id] * count
        end = match.end()
    return ids + tokenizer.encode(text[end:])
