# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Two programs in turns: while one exchanges tokens, the other computes.

Each program is a list of equations, cut behind every exchange over `expert`. Parts are
taken in turns, and a barrier lets the result of an exchange be read only when the
other's part is done. Only the order is given by this; no value changes. DeepSeek orders
the kernels of a forward and a backward so (combine, attention, dispatch, ... in their
published trace); without it the compiler chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import DropVar, Jaxpr, Literal

_EXCHANGES = frozenset(("all_to_all", "ragged_all_to_all"))


class Walk:
    """A jaxpr that is evaluated part by part.

    Args:
      jaxpr: without calls.
      consts, arguments: values of its constvars and invars.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]):
        self._jaxpr = jaxpr
        self._consts, self._arguments = consts, arguments
        names = [*jaxpr.constvars, *jaxpr.invars]
        self._values = dict(zip(names, [*consts, *arguments], strict=True))
        self._rest = list(jaxpr.eqns)
        self._made: list[Any] = []
        self._exchanged: list[Any] = []

    def run(self) -> list[Any]:
        """All of it at once: its results."""
        return jax.core.eval_jaxpr(self._jaxpr, self._consts, *self._arguments)

    @property
    def done(self) -> bool:
        return not self._rest

    def go_on(self) -> None:
        """Evaluates up to the next exchange, with it."""
        self._made, self._exchanged = [], []
        while self._rest:
            equation = self._rest.pop(0)
            read = [v for v in equation.invars if not isinstance(v, Literal)]
            made = [v for v in equation.outvars if not isinstance(v, DropVar)]
            alone = self._jaxpr.replace(
                constvars=[], invars=read, outvars=made, eqns=[equation]
            )
            results = jax.core.eval_jaxpr(alone, (), *(self._values[v] for v in read))
            self._values.update(zip(made, results, strict=True))
            if _exchanges(equation):
                self._exchanged = made
                return
            self._made += made

    def wait_for(self, other: Walk) -> None:
        """The last exchange can be read only behind what `other` computed last."""
        mine, theirs = self._exchanged, other._still_read()
        if not mine or not theirs:
            return
        values = [self._values[v] for v in mine], [other._values[v] for v in theirs]
        mine_after, theirs_after = jax.lax.optimization_barrier(values)
        self._values.update(zip(mine, mine_after, strict=True))
        other._values.update(zip(theirs, theirs_after, strict=True))

    def results(self) -> list[Any]:
        return [
            v.val if isinstance(v, Literal) else self._values[v]
            for v in self._jaxpr.outvars
        ]

    def _still_read(self) -> list[Any]:
        """Of what the last part made, that which something reads later."""
        later = {v for e in self._rest for v in e.invars if not isinstance(v, Literal)}
        later |= {v for v in self._jaxpr.outvars if not isinstance(v, Literal)}
        return [v for v in self._made if v in later]


def alternate(one: Walk, other: Walk) -> tuple[list[Any], list[Any]]:
    """The results of both."""
    while not (one.done and other.done):
        for walk, waiting in ((one, other), (other, one)):
            walk.go_on()
            waiting.wait_for(walk)
    return one.results(), other.results()


def _exchanges(equation: Any) -> bool:
    """Whether it is an exchange, or a call of one."""
    if equation.primitive.name in _EXCHANGES:
        return True
    inner = (getattr(v, "jaxpr", v) for v in equation.params.values())
    return any(
        _exchanges(e) for jaxpr in inner for e in getattr(jaxpr, "eqns", ()) or ()
    )
