# SPDX-License-Identifier: Apache-2.0
"""Floor 4. A stage as three programs: forward, backward for inputs, for weights.

The forward keeps the residuals of `jax.vjp`, but for those that are weights or come
with the microbatch: they are there again when the backward runs. The backward is traced
once to a list of equations, calls inside it written out. What the gradient of the input
needs is Bi; what then remains is W: the products that make weight gradients, and the
small sums of biases and norms. Nothing is computed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal

Tree = Any
# (weights, x, context) -> ((y, share of the loss), statistics)
Forward = Callable[[Tree, jax.Array, Tree], tuple[tuple[jax.Array, jax.Array], Tree]]
# (weights of the head, y, context) -> (share of the loss, statistics)
Finish = Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]


@dataclasses.dataclass(frozen=True)
class Backward:
    """What a backward gives.

    Attributes:
      dx: gradient of the stage's input.
      deferred: what W needs; None after a whole B.
      dweights: gradients of the weights; None after Bi.
      dhead, statistics: of the head, at the last stage; else None.
    """

    dx: jax.Array
    deferred: list[jax.Array] | None
    dweights: Tree
    dhead: Tree
    statistics: Tree


class StagePrograms:
    """The programs of one stage.

    Args:
      forward: applies the stage's layers.
      finish: the head and the loss, if this is the last stage. It runs when the
        backward begins: its logits never wait for their turn.
      weights, head, x, context: abstract arguments.
    """

    def __init__(
        self,
        forward: Forward,
        finish: Finish | None,
        *,
        weights: Tree,
        head: Tree,
        x: jax.ShapeDtypeStruct,
        context: Tree,
    ):
        self._finish = finish
        self._recipe: list[tuple[str, Any]] = []
        self._vjp_tree: Any = None
        self._forward = _trace(
            lambda *arguments: self._traced_forward(forward, *arguments),
            (weights, x, context),
        )
        self.saved: list[jax.ShapeDtypeStruct] = self._forward.shapes[2]
        backward = _trace(
            self._traced_backward, (weights, head, context, self.saved, x), inline=True
        )
        given = len(jax.tree.leaves((weights, head, context)))
        self._split = _Split(backward, given)
        self.deferred = self._split.deferred

    def forward(self, weights: Tree, x: jax.Array, context: Tree):
        """(y, share of the loss, statistics, what is to be stashed)."""
        (y, share), statistics, saved = self._forward(weights, x, context)
        return y, share, statistics, saved

    def backward(self, weights, head, context, saved, dy) -> Backward:
        """B; at the last stage `dy` is not used."""
        return Backward(
            deferred=None, **self._split.all(weights, head, context, saved, dy)
        )

    def backward_inputs(self, weights, head, context, saved, dy) -> Backward:
        """Bi."""
        given, deferred = self._split.first(weights, head, context, saved, dy)
        return Backward(deferred=deferred, dweights=None, **given)

    def backward_weights(self, weights, head, context, deferred) -> Tree:
        """W: the gradients of the weights."""
        return self._split.rest(weights, head, context, deferred)

    def _traced_forward(self, forward: Forward, weights, x, context):
        (y, share), vjp, statistics = jax.vjp(
            lambda w, x: forward(w, x, context), weights, x, has_aux=True
        )
        leaves, self._vjp_tree = jax.tree.flatten(vjp)
        known = {id(leaf): ("weights", i) for i, leaf in _numbered(weights)}
        known |= {id(leaf): ("context", i) for i, leaf in _numbered(context)}
        saved: list[jax.Array] = []
        self._recipe = []
        for leaf in leaves:
            if not isinstance(leaf, jax.core.Tracer):
                self._recipe.append(("constant", leaf))
                continue
            if id(leaf) not in known:
                known[id(leaf)] = ("saved", len(saved))
                saved.append(leaf)
            self._recipe.append(known[id(leaf)])
        if self._finish is not None:
            saved.append(y)
        return (y, share), statistics, saved

    def _traced_backward(self, weights, head, context, saved, dy):
        found = {
            "weights": jax.tree.leaves(weights),
            "context": jax.tree.leaves(context),
            "saved": saved,
        }
        leaves = [
            value if source == "constant" else found[source][value]
            for source, value in self._recipe
        ]
        vjp = jax.tree.unflatten(self._vjp_tree, leaves)
        dhead, statistics = None, None
        if self._finish is not None:
            finish = jax.value_and_grad(self._finish, argnums=(0, 1), has_aux=True)
            (_, statistics), (dhead, dy) = finish(head, saved[-1], context)
        dweights, dx = vjp((dy, jnp.ones((), jnp.float32)))
        first = {"dx": dx, "dhead": dhead, "statistics": statistics}
        return first, dweights


class _Traced:
    """A function as a jaxpr that is called with trees."""

    def __init__(self, closed: ClosedJaxpr, shapes: Tree):
        self.closed, self.shapes = closed, shapes

    def __call__(self, *arguments):
        flat = jax.tree.leaves(arguments)
        out = jax.core.eval_jaxpr(self.closed.jaxpr, self.closed.consts, *flat)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), out)


def _trace(function: Callable, arguments: tuple, *, inline: bool = False) -> _Traced:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if inline:
        flat = jax.make_jaxpr(lambda *xs: _evaluate(closed.jaxpr, closed.consts, xs))
        closed = flat(*jax.tree.leaves(arguments))
    return _Traced(closed, shapes)


class _Split:
    """The equations of a backward, cut in two.

    Args:
      traced: (weights, head, context, saved, dy) -> (first results, weight gradients).
      given: number of leaves of the first three, which both parts get.
    """

    def __init__(self, traced: _Traced, given: int):
        self._traced, self._given = traced, given
        first_shapes, weights_shapes = traced.shapes
        self._first_tree = jax.tree.structure(first_shapes)
        self._weights_tree = jax.tree.structure(weights_shapes)
        jaxpr = traced.closed.jaxpr
        first_out = jaxpr.outvars[: self._first_tree.num_leaves]
        rest_out = jaxpr.outvars[self._first_tree.num_leaves :]
        early = needed(jaxpr.eqns, first_out)
        done = {id(equation) for equation in early}
        late = [e for e in needed(jaxpr.eqns, rest_out) if id(e) not in done]
        made_late = {v for equation in late for v in equation.outvars}
        always = {*jaxpr.constvars, *jaxpr.invars[:given]}
        read_late = [
            v
            for v in (*(v for e in late for v in e.invars), *rest_out)
            if not isinstance(v, Literal) and v not in made_late and v not in always
        ]
        crossing = list(dict.fromkeys(read_late))
        self.deferred = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in crossing
        ]
        self.early_equations, self.late_equations = early, late
        self._first = jaxpr.replace(eqns=early, outvars=[*first_out, *crossing])
        self._rest = jaxpr.replace(
            invars=[*jaxpr.invars[:given], *crossing], eqns=late, outvars=rest_out
        )

    def all(self, *arguments) -> dict[str, Any]:
        first, dweights = self._traced(*arguments)
        return {**first, "dweights": dweights}

    def first(self, *arguments) -> tuple[dict[str, Any], list[jax.Array]]:
        flat = jax.tree.leaves(arguments)
        out = jax.core.eval_jaxpr(self._first, self._traced.closed.consts, *flat)
        count = self._first_tree.num_leaves
        return jax.tree.unflatten(self._first_tree, out[:count]), out[count:]

    def rest(self, weights, head, context, deferred) -> Tree:
        flat = [*jax.tree.leaves((weights, head, context)), *deferred]
        out = jax.core.eval_jaxpr(self._rest, self._traced.closed.consts, *flat)
        return jax.tree.unflatten(self._weights_tree, out)


def needed(equations: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """The equations that the given variables depend on, in order."""
    wanted = {v for v in results if not isinstance(v, Literal)}
    kept = []
    for equation in reversed(equations):
        if wanted.isdisjoint(equation.outvars):
            continue
        kept.append(equation)
        wanted |= {v for v in equation.invars if not isinstance(v, Literal)}
    return kept[::-1]


def _numbered(tree: Tree):
    return enumerate(jax.tree.leaves(tree))


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list:
    """Runs a jaxpr with every call in it written out."""
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True)
    )

    def read(v):
        return v.val if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        inner = _called(equation)
        if inner is not None:
            inputs = [read(v) for v in equation.invars]
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
            values.update(zip(equation.outvars, outputs, strict=True))
            continue
        read_here = [v for v in equation.invars if not isinstance(v, Literal)]
        made_here = [v for v in equation.outvars if not isinstance(v, DropVar)]
        alone = jaxpr.replace(
            constvars=[], invars=read_here, outvars=made_here, eqns=[equation]
        )
        outputs = jax.core.eval_jaxpr(alone, (), *map(read, read_here))
        values.update(zip(made_here, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _called(equation: Any) -> ClosedJaxpr | None:
    """What a call, or a part marked for recomputation, consists of.

    Recomputation needs no barrier here: its results were never kept, and the forward
    that first made them is in another tick.
    """
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "checkpoint"):
        return None
    inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
