# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The distinct works of a table of ticks: what has to be compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmoe.pipeline.lower import TickTable


class Work(NamedTuple):
    """What a rank does in a tick, but for the microbatches: one step.

    Attributes:
      kinds: as in `TickTable.branches`.
      directions: of the forward, of the backward and of the W; -1 for none.
      stages: of each, the first stage that has the same programs; -1 for none.
    """

    kinds: tuple[str, ...]
    directions: tuple[int, ...]
    stages: tuple[int, ...]

    def gradients_of(self) -> int:
        """The direction whose weights get gradients; -1 for none."""
        if "W" in self.kinds:
            return self.directions[2]
        return self.directions[1] if "B" in self.kinds else -1


class Choice(NamedTuple):
    """Of several works every rank takes one in every tick.

    Attributes:
      name: of its column in the row of a tick.
      works: the distinct ones.
      work_of: the number of each tick's and rank's, [ticks, ranks].
    """

    name: str
    works: list[Work]
    work_of: np.ndarray


_LETTERS = {"f": ("F",), "b": ("B", "Bi"), "w": ("W",)}


def list_choices(
    table: TickTable, programs: Sequence[object], *, apart: bool
) -> list[Choice]:
    """What is chosen in a tick, one after another.

    Args:
      table: the ticks.
      programs: of each stage; the same object where stages have the same.
      apart: a forward, a backward and a W are chosen each by itself, which makes a
        smaller program of fewer works; else at once, what is to overlap in one work.
    """
    first = [*map(programs.index, programs), -1]
    if not apart:
        return [_choice(table, first, "fbw")]
    choices = [_choice(table, first, letter) for letter in _LETTERS]
    return [choice for choice in choices if any(work.kinds for work in choice.works)]


def _choice(table: TickTable, first: list[int], letters: str) -> Choice:
    """Of the works that consist of some of forward, backward and W.

    Args:
      table: the ticks.
      first: of each stage, the first one with the same programs; last -1, for none.
      letters: some of `_LETTERS`.
    """
    columns = table.columns
    wanted = {kind for letter in letters for kind in _LETTERS[letter]}
    found: dict[Work, int] = {}
    work_of = np.zeros_like(columns["branch"])
    for place in np.ndindex(work_of.shape):
        kinds = table.branches[columns["branch"][place]]
        number = lambda name, place=place: int(columns[name][place])  # noqa: E731
        sides = [
            (number(f"{letter}_direction"), first[number(f"{letter}_stage")])
            if letter in letters
            else (-1, -1)
            for letter in _LETTERS
        ]
        directions, stages = zip(*sides, strict=True)
        kinds = tuple(kind for kind in kinds if kind in wanted)
        work = Work(kinds, directions, stages)
        work_of[place] = found.setdefault(work, len(found))
    return Choice(f"work_{letters}", list(found), work_of)


def gradients_of(choices: list[Choice]) -> np.ndarray:
    """The direction whose weights get gradients, [ticks, ranks]; -1 for none."""
    each = [
        np.array([work.gradients_of() for work in choice.works])[choice.work_of]
        for choice in choices
    ]
    return np.max(each, axis=0)


def parts_of_ticks(table: TickTable, choices: list[Choice]) -> dict[str, np.ndarray]:
    """What runs beside the work in some ticks: named scope -> [ticks, ranks]."""
    columns, schedule = table.columns, table.schedule
    last = columns["b_stage"] == schedule.num_stages - 1
    found = {"head": last & (columns["b_microbatch"] >= 0)}
    direction = gradients_of(choices)
    for d in range(schedule.num_directions):
        found[f"weights_{d}"] = direction == d
        found[f"statistics_{d}"] = columns["f_direction"] == d
    return found
