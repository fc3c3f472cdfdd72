# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Examples from a source of one's own: one split of an index.

Legend: P patches, D numbers of a patch, S positions of a sequence.
"""

from __future__ import annotations

import numpy as np

from jaxmoe.config import Data, Model
from jaxmoe.config_derived import image_patches
from jaxmoe.data import digits, tasks
from jaxmoe.data.fields import BrokenRecord, Fields, parse_fields
from jaxmoe.data.images import decode, to_patches
from jaxmoe.data.index import Index, Items, num_pieces, piece_of
from jaxmoe.data.readers import Raw, image_bytes
from jaxmoe.data.tasks import IMAGE_TASKS, Example
from jaxmoe.data.tokenizer import Language, Tokenizer


class OwnRecords:
    """The records of one split of a source."""

    def __init__(
        self,
        index: Index,
        items: dict[str, Items],
        *,
        tokenizer: Tokenizer,
        data: Data,
        model: Model,
        training: bool,
    ):
        """Takes a part of an index.

        Args:
          index: Of the source.
          items: Those of its items that belong to the split.
          tokenizer: That of the index.
          data: How images are scaled and moved, and text masked.
          model: The shape that the examples must fit into; text that is too long is
            cut at its end.
          training: Training examples, augmented by chance, rather than held-out ones.
        """
        self._index, self._items, self._tokenizer = index, items, tokenizer
        self._data, self._model, self._training = data, model, training
        self._patches = image_patches(data)[0]

    def count(self, task: str) -> int:
        """How many items a task has: one epoch of it."""
        return len(self._items[task].record) if task in self._items else 0

    def sizes(self, task: str) -> np.ndarray:
        """The most positions that the example of each item takes, int64 [count]."""
        tokens = self._items[task].tokens.astype(np.int64)
        room = self._room(task)
        if task == "lm":
            return np.minimum(tokens + 1, room)
        if task == "text_denoise":
            return 2 * np.minimum(tokens, room) + 1
        if task == "caption":
            return self._patches + np.minimum(tokens + 1, room)
        return self._patches + 2 * (1 + np.minimum(tokens, room))

    def longest(self, task: str) -> int:
        """Tokens of the longest text of a task that has records."""
        return int(self._items[task].tokens.max())

    def too_long(self) -> int:
        """Captions that are cut, as they do not fit into the sequence."""
        if "caption" not in self._items:
            return 0
        return int((self._items["caption"].tokens >= self._room("caption")).sum())

    def caption(self, index: int) -> tuple[Language, str]:
        """The whole text of an item of the task 'caption', and its language."""
        return self._text("caption", index, self._record("caption", index)[1])

    def patches(self, index: int) -> np.ndarray:
        """The image of an item of the task 'caption', float32 [P, D].

        Raises:
          BrokenRecord: if it cannot be decoded.
        """
        raw, _ = self._record("caption", index)
        return to_patches(self._image(raw), self._data)

    def example(self, task: str, index: int, rng: np.random.Generator) -> Example:
        """Makes the example of an item.

        Args:
          task: One that has records.
          index: The item, in [0, count(task)).
          rng: Decides what is left to chance, in the order of use.

        Raises:
          BrokenRecord: if its image cannot be decoded, or its files have changed.
        """
        try:
            raw, fields = self._record(task, index)
            language, text = self._text(task, index, fields)
            if task in IMAGE_TASKS:
                return self._with_image(task, raw, language, text, rng)
            return self._of_text(task, index, text, rng)
        except BrokenRecord as error:
            name = self._index.reader.name(int(self._items[task].record[index]))
            raise BrokenRecord(f"{name}: {error}") from error

    def _record(self, task: str, index: int) -> tuple[Raw, Fields]:
        raw = self._index.reader.raw(int(self._items[task].record[index]))
        return raw, parse_fields(raw.fields, has_image=raw.image is not None)

    def _text(self, task: str, index: int, fields: Fields) -> tuple[Language, str]:
        number = int(self._items[task].text[index])
        if number >= len(fields.texts):
            raise BrokenRecord("its texts have changed since the start")
        return fields.texts[number]

    def _room(self, task: str) -> int:
        """Tokens for which there is room: of the caption with its end, of the text."""
        size, patches = self._model.sequence_length, self._patches
        return {
            "caption": size - patches,
            "image_denoise": (size - patches - 2) // 2,
            "text_denoise": tasks.chunk_tokens("text_denoise", size),
            "lm": size,
        }[task]

    def _with_image(
        self,
        task: str,
        raw: Raw,
        language: Language,
        text: str,
        rng: np.random.Generator,
    ) -> Example:
        image = self._image(raw)
        if self._training and self._data.shift_pixels:
            pixels = self._data.shift_pixels
            dy, dx = rng.integers(-pixels, pixels + 1, size=2).tolist()
            image = digits.shift(image, dy, dx)
        patches, room = to_patches(image, self._data), self._room(task)
        ids = self._tokenizer.encode(text)
        spoken = {"language": language, "tokenizer": self._tokenizer}
        if task == "caption":
            whole = tasks.caption(patches, ids, **spoken)
            # What is cut has no end: nothing says that the text stops there.
            return whole._replace(
                decoder=whole.decoder[:room], targets=whole.targets[:room]
            )
        fraction = self._data.mask_fraction
        return tasks.image_denoise(
            patches, ids[:room], **spoken, mask_fraction=fraction, rng=rng
        )

    def _of_text(
        self, task: str, index: int, text: str, rng: np.random.Generator
    ) -> Example:
        content, size = text.encode(), self._index.piece_bytes[task]
        number, count = int(self._items[task].piece[index]), num_pieces(content, size)
        if number >= count:
            raise BrokenRecord("its text has changed since the start")
        ids = self._tokenizer.encode(piece_of(content, size, number))
        if task == "lm" and number == count - 1:
            ids = [*ids, self._tokenizer.eos_id]
        spare = len(ids) - self._room(task)
        start = 0
        if spare > 0 and self._training:
            start = int(rng.integers(spare + 1))
        chunk = np.array(ids[start : start + self._room(task)], np.int64)
        if task == "lm":
            return tasks.lm(chunk, self._tokenizer)
        fraction = self._data.mask_fraction
        return tasks.text_denoise(
            chunk, self._tokenizer, mask_fraction=fraction, rng=rng
        )

    def _image(self, raw: Raw) -> np.ndarray:
        if raw.image is None:
            raise BrokenRecord("its image is gone")
        data = self._data
        return decode(image_bytes(raw.image), data.image_size, data.image_mode)
