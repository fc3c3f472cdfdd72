# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Example number i of a run: of which source, which task, which record.

Every task of every source is a stream of its own, in which each epoch has all records
in another order. The streams are mixed by their weights. All of this is a function of
the seed and i alone.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.data.fields import BrokenRecord
from jaxmoe.data.sources import Part, Sources
from jaxmoe.data.tasks import IMAGE_TASKS, TASKS, Example

_PROPORTION_UNIT = 10_000  # grain mixes by whole numbers
_MANY = 100_000  # records, of which only a few orders are kept in memory


class Skipped(NamedTuple):
    """In place of a broken record's example: where it stands, and what is wrong."""

    reason: str


class _Stream(NamedTuple):
    task: str
    count: int
    sizes: np.ndarray
    order: Callable[[int], np.ndarray]
    make: Callable[[int, np.random.Generator], Example | Skipped]


class Mixture:
    """The examples of a run, by their number."""

    def __init__(self, sources: Sources, *, seed: int, image_patches: int):
        """Prepares the streams.

        Args:
          sources: What to mix.
          seed: Decides order and augmentation.
          image_patches: Patches of an image, for `size`.
        """
        import grain  # here, because importing it takes a second

        self._image_patches = image_patches
        self._parts = sources.parts
        self._streams, datasets, shares = [], [], []
        for place, part in enumerate(sources.parts):
            for task, share in part.weights.items():
                # The first source has the streams that it would have alone.
                key = [seed, TASKS.index(task), *([place] if place else [])]
                stream = _stream(part, task, key)
                chance = int(np.random.SeedSequence(key).generate_state(1)[0])
                endless = grain.MapDataset.range(sys.maxsize)
                datasets.append(endless.random_map(stream.make, seed=chance))
                self._streams.append(stream)
                shares.append(share)
        proportions = [max(1, round(_PROPORTION_UNIT * share)) for share in shares]
        self._examples: Any = grain.MapDataset.mix(datasets, proportions)
        places = [
            grain.MapDataset.range(sys.maxsize).map(functools.partial(_place, number))
            for number in range(len(datasets))
        ]
        self._places: Any = grain.MapDataset.mix(places, proportions)
        # grain sets a dataset up at its first access, and not thread-safely.
        for dataset in (*datasets, self._examples, *places, self._places):
            dataset[0]

    def __getitem__(self, number: int) -> Example | Skipped:
        """Makes an example."""
        return self._examples[number]

    def size(self, number: int) -> tuple[int, int]:
        """The most positions that an example takes, and its patches."""
        which, inside = self._places[number]
        stream = self._streams[which]
        epoch, place = divmod(inside, stream.count)
        positions = int(stream.sizes[stream.order(epoch)[place]])
        return positions, self._image_patches if stream.task in IMAGE_TASKS else 0

    def examples_of(self, epochs: int) -> int:
        """How many examples it takes until every source has been gone through so often.

        A source has as many as there are records for the task with the most; sources
        that are done earlier begin again.
        """
        needed = [
            epochs
            * max(part.records.count(task) for task in part.weights)
            / sum(part.weights.values())
            for part in self._parts
        ]
        return math.ceil(max(needed) - 1e-6)  # of shares that do not sum to exactly 1


def _place(stream: int, number: int) -> tuple[int, int]:
    return stream, number


def _stream(part: Part, task: str, key: list[int]) -> _Stream:
    count = part.records.count(task)

    # grain's own shuffle takes 20 microseconds an element, as much as all the rest.
    # Several epochs are kept, as threads may be in different ones.
    @functools.lru_cache(maxsize=16 if count < _MANY else 3)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([*key, epoch]).permutation(count)

    def make(number: int, rng: np.random.Generator) -> Example | Skipped:
        epoch, place = divmod(number, count)
        try:
            return part.records.example(task, int(order(epoch)[place]), rng)
        except BrokenRecord as error:
            return Skipped(str(error))

    return _Stream(task, count, part.records.sizes(task), order, make)
