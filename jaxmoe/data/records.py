# SPDX-License-Identifier: Apache-2.0
"""Floor 5. The records of one split, and the example that each makes for a task.

Those of digits and text, which need no file. Everything that can be done once is done
here at the start: captions and text are tokenised, and what cannot work is refused.
What is left per example takes microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import ConfigError, Data, Model
from jaxmoe.config_derived import image_patches
from jaxmoe.config_source import TEXT_KINDS
from jaxmoe.data import digits, tasks, text
from jaxmoe.data.tasks import IMAGE_TASKS, TASKS, Example
from jaxmoe.data.tokenizer import LANGUAGES, Tokenizer, make_tokenizer


def possible_tasks(kind: str) -> tuple[str, ...]:
    """The tasks that a kind of source can have records for."""
    if kind in TEXT_KINDS:
        return tuple(name for name in TASKS if name not in IMAGE_TASKS)
    return TASKS


def task_weights(data: Data, kind: str = "") -> dict[str, float]:
    """The share of each task that takes part; they sum to 1.

    Without images the weights of the image tasks do not count.

    Args:
      data: The weights.
      kind: Of the source, if `Data.source` names it by a path.

    Raises:
      ConfigError: if no task has a weight.
    """
    names = possible_tasks(kind or data.source)
    weights = {name: getattr(data, f"{name}_weight") for name in names}
    total = sum(weights.values())
    if not total > 0:
        fields = ", ".join(f"Data.{name}_weight={weights[name]}" for name in names)
        raise ConfigError(
            f"{fields} choose no task: with Data.source={data.source!r} one of them"
            " must be above 0. Set Data.lm_weight to 1, for example."
        )
    return {name: w / total for name, w in weights.items() if w > 0}


def vocab_size(data: Data, model: Model) -> int:
    """The vocabulary of the model, 'auto' resolved.

    Raises:
      ConfigError: if the model has fewer tokens than the tokenizer.
    """
    return fitting_vocab(make_tokenizer(data.tokenizer), data, model)


def fitting_vocab(tokenizer: Tokenizer, data: Data, model: Model) -> int:
    """The same for a tokenizer that is there.

    Raises:
      ConfigError: if the model has fewer tokens.
    """
    if model.vocab_size == "auto":
        return tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"Model.vocab_size={model.vocab_size} is smaller than the"
            f" {tokenizer.vocab_size} tokens of Data.tokenizer={data.tokenizer!r}:"
            " every token needs an embedding. Set Model.vocab_size='auto', or to at"
            f" least {tokenizer.vocab_size}."
        )
    return model.vocab_size


class Records:
    """The records of one split for the given tasks.

    Attributes:
      tokenizer: The one that `Data.tokenizer` names.
      content: Identifies what was read, for each source that the tasks use.
    """

    def __init__(
        self, data: Data, model: Model, *, names: tuple[str, ...], training: bool
    ):
        """Loads and tokenises.

        Args:
          data: What to read.
          model: The shape that the examples must fit into.
          names: The tasks.
          training: Training examples, augmented by chance, rather than held-out ones.

        Raises:
          ConfigError: if data and model do not fit together.
        """
        _check_task_names(names, data)
        self._data, self._model, self._training = data, model, training
        self.tokenizer = make_tokenizer(data.tokenizer)
        self.content: dict[str, str] = {}
        fitting_vocab(self.tokenizer, data, model)
        check_mask_fraction(data)
        longest = 0
        if any(name in IMAGE_TASKS for name in names):
            _check_patches(data, model)
            self._load_digits()
            longest = max(len(i) for ids in self._captions.values() for i in ids)
        if any(name not in IMAGE_TASKS for name in names):
            self._load_text()
        check_sequence_length(names, data, model, longest)

    def _load_digits(self) -> None:
        data = self._data
        self._images, labels = digits.load_digits(
            data.held_out, training=self._training
        )
        self._labels = labels.tolist()
        self._captions = {
            language: [
                self.tokenizer.encode(digits.caption(label, language))
                for label in range(10)
            ]
            for language in LANGUAGES
        }
        self.content["digits"] = digits.content_hash()

    def _load_text(self) -> None:
        # One stream of blocks, each with its end.
        ids = []
        for block in text.load_text(training=self._training):
            ids += self.tokenizer.encode(block)
            ids.append(self.tokenizer.eos_id)
        self._stream = np.array(ids, np.int32)
        self.content["text"] = text.content_hash()

    def count(self, task: str) -> int:
        """How many records a task has: one epoch of it."""
        if task in IMAGE_TASKS:
            return len(self._labels)
        chunk = tasks.chunk_tokens(task, self._model.sequence_length)
        return max(1, len(self._stream) // chunk)

    def sizes(self, task: str) -> np.ndarray:
        """The most positions that the example of each record takes, int64 [count]."""
        longest = 0
        if task in IMAGE_TASKS:
            longest = max(len(i) for ids in self._captions.values() for i in ids)
        size = tasks.min_sequence_length(
            task, num_patches=image_patches(self._data)[0], caption_tokens=longest
        )
        if task not in IMAGE_TASKS:
            chunk = tasks.chunk_tokens(task, self._model.sequence_length)
            size = chunk if task == "lm" else 2 * chunk + 1
        return np.full(self.count(task), size, np.int64)

    def example(self, task: str, index: int, rng: np.random.Generator) -> Example:
        """Makes the example of a record.

        Args:
          task: One of the given tasks.
          index: The record, in [0, count(task)). Of the held-out images even ones have
            an English caption, odd ones a Chinese one.
          rng: Decides what is left to chance, in the order of use.
        """
        fraction = self._data.mask_fraction
        if task in IMAGE_TASKS:
            image, language = self._image(index, rng)
            patches = digits.to_patches(image[None], self._data.patch_size)[0]
            ids = self._captions[language][self._labels[index]]
            spoken = {"language": language, "tokenizer": self.tokenizer}
            if task == "caption":
                return tasks.caption(patches, ids, **spoken)
            return tasks.image_denoise(
                patches, ids, **spoken, mask_fraction=fraction, rng=rng
            )
        chunk = self._chunk(task, index, rng)
        if task == "lm":
            return tasks.lm(chunk, self.tokenizer)
        chunk = _longest_without(chunk, self.tokenizer.eos_id)
        return tasks.text_denoise(
            chunk, self.tokenizer, mask_fraction=fraction, rng=rng
        )

    def _image(self, index: int, rng: np.random.Generator):
        """An image and the language to describe it in."""
        if not self._training:
            return self._images[index], LANGUAGES[index % len(LANGUAGES)]
        pixels = self._data.shift_pixels
        width = 2 * pixels + 1
        # One draw for all, as each costs more than the divisions.
        choice, language = divmod(int(rng.integers(width * width * 2)), 2)
        dy, dx = divmod(choice, width)
        image = digits.shift(self._images[index], dy - pixels, dx - pixels)
        return image, LANGUAGES[language]

    def _chunk(self, task: str, index: int, rng: np.random.Generator) -> np.ndarray:
        """A crop of the text; in training it begins by chance near its place."""
        size = tasks.chunk_tokens(task, self._model.sequence_length)
        start = index * size
        if self._training:
            start += int(rng.integers(size))
        start = max(0, min(start, len(self._stream) - size))
        return self._stream[start : start + size]


def check_mask_fraction(data: Data) -> None:
    """Checks that it is a share.

    Raises:
      ConfigError: if it is not.
    """
    if not data.mask_fraction <= 1:
        raise ConfigError(
            f"Data.mask_fraction={data.mask_fraction} is a share of the tokens: it"
            " must be from 0 to 1. Set Data.mask_fraction to 0.3, for example."
        )


def _longest_without(ids: np.ndarray, separator: int) -> np.ndarray:
    """The longest piece between separators."""
    ends = np.flatnonzero(ids == separator)
    if not len(ends):
        return ids
    first, *others = np.split(ids, ends)  # the others begin with a separator
    return max(first, *(piece[1:] for piece in others), key=len)


def _check_task_names(names: tuple[str, ...], data: Data) -> None:
    for name in names:
        if name not in TASKS:
            raise ValueError(f"task {name!r} is not one of {TASKS}.")
        if name not in possible_tasks(data.source):
            raise ConfigError(
                f"Data.source={data.source!r} has no images, which the task {name!r}"
                " needs. Set Data.source='digits'."
            )


def _check_patches(data: Data, model: Model) -> None:
    size = digits.IMAGE_SIZE
    if size % data.patch_size:
        raise ConfigError(
            f"Data.patch_size={data.patch_size} does not divide the images of {size} x"
            f" {size} pixels. Set Data.patch_size to 1, 2, 4 or 8."
        )
    right = (size // data.patch_size) ** 2, data.patch_size**2
    several = data.packing and model.num_patches and model.num_patches % right[0] == 0
    patches = right[0] if several else model.num_patches
    if (patches, model.patch_dim) != right:
        raise ConfigError(
            f"Model.num_patches={model.num_patches} and Model.patch_dim="
            f"{model.patch_dim} do not fit images of {size} x {size} pixels with"
            f" Data.patch_size={data.patch_size}: they give {right[0]} patches of"
            f" {right[1]} numbers. Set Model.num_patches={right[0]} and"
            f" Model.patch_dim={right[1]}, or Data.source='text' for no images."
        )


def check_sequence_length(
    names: Sequence[str], data: Data, model: Model, caption_tokens: int
) -> None:
    """Checks that an example of each task fits into a sequence.

    Args:
      names: The tasks.
      data: How many patches an image has.
      model: How long a sequence is.
      caption_tokens: Of the longest caption.

    Raises:
      ConfigError: if one does not, with the length that is needed.
    """
    num_patches = image_patches(data)[0]
    lengths = {
        name: tasks.min_sequence_length(
            name, num_patches=num_patches, caption_tokens=caption_tokens
        )
        for name in names
    }
    name = max(lengths, key=lengths.__getitem__)
    needed = lengths[name]
    if model.sequence_length < needed:
        raise ConfigError(
            f"Model.sequence_length={model.sequence_length} is too small for the task"
            f" {name!r}: {num_patches} patches and the longest text need"
            f" {needed} positions. Set Model.sequence_length to at least {needed}, or"
            f" Data.{name}_weight to 0."
        )
