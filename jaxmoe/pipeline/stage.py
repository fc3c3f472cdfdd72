# SPDX-License-Identifier: Apache-2.0
"""Floor 4. A stage as three programs: forward, backward for inputs, for weights.

The forward keeps the residuals of `jax.vjp`, but for those that are weights or come
with the microbatch: they are there again when the backward runs. The backward is traced
once to a list of equations, calls inside it written out. What the gradient of the input
needs is Bi; what then remains is W: the products that make weight gradients, and the
small sums of biases and norms. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal

Tree = Any
# (weights, x, context) -> ((y, share of the loss), statistics)
Forward = Callable[[Tree, jax.Array, Tree], tuple[tuple[jax.Array, jax.Array], Tree]]


class StagePrograms:
    """The programs of one stage.

    Args:
      forward: applies the stage's layers.
      weights, x, context: its abstract arguments; its output is like `x`.

    Attributes:
      saved: shapes of what the forward leaves for the backward.
      deferred: shapes of what Bi leaves for W.
    """

    def __init__(
        self, forward: Forward, *, weights: Tree, x: jax.ShapeDtypeStruct, context: Tree
    ):
        self._recipe: list[tuple[str, Any]] = []
        self._vjp_tree: Any = None
        self._forward = _trace(
            lambda *arguments: self._traced_forward(forward, *arguments),
            (weights, x, context),
        )
        self.saved: list[jax.ShapeDtypeStruct] = self._forward.shapes[2]
        backward = _trace(
            self._traced_backward, (weights, context, self.saved, x), inline=True
        )
        self.split = Split(backward, given=len(jax.tree.leaves((weights, context))))
        self.deferred = self.split.deferred

    def forward(self, weights: Tree, x: jax.Array, context: Tree):
        """(y, statistics, what is to be stashed)."""
        y, statistics, saved = self._forward(weights, x, context)
        return y, statistics, saved

    def backward(self, weights: Tree, context: Tree, saved: list, dy: jax.Array):
        """B: (gradient of the input, gradients of the weights)."""
        return self.split.whole(weights, context, saved, dy)

    def backward_inputs(self, weights: Tree, context: Tree, saved: list, dy: jax.Array):
        """Bi: (gradient of the input, what W needs)."""
        return self.split.inputs(weights, context, saved, dy)

    def backward_weights(self, weights: Tree, context: Tree, deferred: list) -> Tree:
        """W: the gradients of the weights."""
        return self.split.weights(weights, context, deferred)

    def _traced_forward(self, forward: Forward, weights, x, context):
        (y, _), vjp, statistics = jax.vjp(
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
        return y, statistics, saved

    def _traced_backward(self, weights, context, saved, dy):
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
        dweights, dx = vjp((dy, jnp.ones((), jnp.float32)))
        return dx, dweights


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


class Split:
    """The equations of a backward, cut in two.

    Args:
      traced: (weights, context, saved, dy) -> (dx, gradients of the weights).
      given: number of leaves of weights and context, which both parts get.

    Attributes:
      early, late: the equations of Bi and of W.
      deferred: shapes of the values between them.
    """

    def __init__(self, traced: _Traced, given: int):
        self._traced = traced
        self._weights_tree = jax.tree.structure(traced.shapes[1])
        jaxpr = traced.closed.jaxpr
        dx, *dweights = jaxpr.outvars
        self.early = needed(jaxpr.eqns, [dx])
        done = {id(equation) for equation in self.early}
        late = needed(jaxpr.eqns, dweights)
        self.late = [equation for equation in late if id(equation) not in done]
        made_late = {v for equation in self.late for v in equation.outvars}
        always = {*jaxpr.constvars, *jaxpr.invars[:given]}
        read_late = [v for equation in self.late for v in equation.invars]
        crossing = [
            v
            for v in dict.fromkeys(v for v in (*read_late, *dweights) if not _fixed(v))
            if v not in made_late and v not in always
        ]
        shape = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)  # noqa: E731
        self.deferred = list(map(shape, crossing))
        self._inputs = jaxpr.replace(eqns=self.early, outvars=[dx, *crossing])
        self._weights = jaxpr.replace(
            invars=[*jaxpr.invars[:given], *crossing], eqns=self.late, outvars=dweights
        )

    def whole(self, *arguments) -> tuple[jax.Array, Tree]:
        return self._traced(*arguments)

    def inputs(self, *arguments) -> tuple[jax.Array, list[jax.Array]]:
        flat = jax.tree.leaves(arguments)
        out = jax.core.eval_jaxpr(self._inputs, self._traced.closed.consts, *flat)
        return out[0], out[1:]

    def weights(self, weights, context, deferred) -> Tree:
        flat = [*jax.tree.leaves((weights, context)), *deferred]
        out = jax.core.eval_jaxpr(self._weights, self._traced.closed.consts, *flat)
        return jax.tree.unflatten(self._weights_tree, out)


def _fixed(v: Any) -> bool:
    return isinstance(v, Literal)


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
