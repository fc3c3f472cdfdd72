# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Which examples share a row, in the order in which they come.

Each example goes to the first row of the step in which it fits. The first one that fits
nowhere begins the next step, so that no example is skipped and none comes twice. Where
a step begins therefore depends on all before it; the number of its first example is all
that has to be known to go on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np


class Packer:
    """Plans the steps of a run one after the other; safe to share between threads."""

    def __init__(
        self,
        size: Callable[[int], tuple[int, int]],
        *,
        rows: int,
        positions: int,
        patches: int,
        limit: int,
    ):
        """Begins at step 0 with example 0.

        Args:
          size: Of an example by its number: positions and patches at most.
          rows: Of a step.
          positions: Of a row.
          patches: Of a row.
          limit: Number of examples in all.
        """
        self._size, self._limit = size, limit
        self._room = np.array([positions, patches])
        self._rows = rows
        self._lock = threading.Lock()
        # A step is planned to know where the next begins, and then to be made.
        self._plan = functools.lru_cache(maxsize=32)(self._planned)
        self.begin(0, 0)

    def begin(self, step: int, first: int) -> None:
        """Goes on at a step that begins with this example; earlier ones are unknown."""
        with self._lock:
            self._step, self._firsts = step, [first]

    def first(self, step: int) -> int:
        """The number of the first example of a step."""
        with self._lock:
            if step < self._step:  # known again from the start
                self._step, self._firsts = 0, [0]
            while step - self._step >= len(self._firsts):
                plan = self._plan(self._firsts[-1])
                self._firsts.append(self._firsts[-1] + sum(map(len, plan)))
            return self._firsts[step - self._step]

    def plan(self, step: int) -> list[list[int]]:
        """The numbers of the examples of each row; none at all behind the last."""
        return self._plan(self.first(step))

    def _planned(self, first: int) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(self._rows)]
        free = np.tile(self._room, (self._rows, 1))
        number = first
        while number < self._limit:
            size = np.array(self._size(number))
            fits = np.all(free >= size, axis=1)
            row = int(fits.argmax())
            if not fits[row]:
                assert number > first, (number, size, self._room)
                break
            rows[row].append(number)
            free[row] -= size
            number += 1
        return rows
