# SPDX-License-Identifier: Apache-2.0
"""Floor 4. One of several steps, chosen in every tick, that changes what is carried.

A step gives back what it does not change, and that should cost nothing. On TPU and GPU
a `lax.switch` chooses. On CPU a branch copies all that it gives back as it came; there
every step has a loop of one turn or none instead, whose carry is changed in place.
docs/pipeline.md says what either costs where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Row = Mapping[str, jax.Array]  # numbers of a tick by name
Step = Callable[[Row, Any], Any]  # (row, carry) -> carry


def choose(
    number: jax.Array,
    steps: Sequence[Step | None],
    row: Row,
    carry: Any,
    *,
    loops: bool,
) -> tuple[Row, Any]:
    """Takes steps[number], or none where that is None.

    Args:
      number: scalar, from 0 on.
      steps: all that a step computes must depend on the numbers of the row.
      row: numbers of the tick.
      carry: what steps change.
      loops: loops instead of a switch, for CPU.

    Returns:
      The row again, to be used from here on, and the carry.
    """
    if not loops:
        branches = [step or (lambda row, carry: carry) for step in steps]
        return row, jax.lax.switch(number, branches, row, carry)
    turns = jnp.int32(0)
    for i, step in enumerate(steps):
        if step is not None:
            turn = partial(_turn, step, row)
            turns, carry = turn_if(number == i, turn, (turns, carry))
    # Numbers as they are, since turns is 0 or 1. But what depends on them now comes
    # after every read of the steps; else buffers would be copied before a write.
    return _plus(row, turns > 1), carry


def turn_if(
    condition: jax.Array, turn: Callable[[jax.Array, Any], Any], carry: Any
) -> Any:
    """turn(0, carry) if the condition holds, else the carry, which is changed in place.

    A loop of one turn or none: a conditional would copy what it gives back.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), turn, carry)


def _turn(
    step: Step, row: Row, counter: jax.Array, carry: tuple[jax.Array, Any]
) -> tuple[jax.Array, Any]:
    """Takes a step and counts its turn."""
    # The counter is 0. What did not depend on it would be taken out of the loop, as the
    # same in every turn, and computed in every tick.
    turns, carry = carry
    return turns + 1, step(_plus(row, counter), carry)


def _plus(row: Row, number: jax.Array) -> Row:
    return {name: value + number.astype(value.dtype) for name, value in row.items()}
