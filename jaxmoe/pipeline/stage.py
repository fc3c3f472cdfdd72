# SPDX-License-Identifier: Apache-2.0
"""Floor 4. A stage as three programs: forward, backward for inputs, for weights.

The stage is traced once, with `jax.vjp`, to a list of equations, calls inside it
written out. Of the residuals of the vjp, those that are weights or come with the
microbatch are there again when the backward runs; those that cheap equations make out
of others (`choose_saved`) are made again; the rest is stashed. So about the results of
products are stashed, and no product is computed twice.

The backward is cut in two. What the gradient of the input needs is Bi; what then
remains is W: the products that make weight gradients, and the small sums of biases and
norms. What crosses from one to the other waits in a buffer; where recomputation is
asked for, W makes again what products make of smaller values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal

from jaxmoe.pipeline.alternate import Walk

Tree = Any
# (weights, x, context) -> ((y, share of the loss), statistics)
Forward = Callable[[Tree, jax.Array, Tree], tuple[tuple[jax.Array, jax.Array], Tree]]

# Calls, and parts marked for recomputation; the names are those of several versions.
_CALLS = frozenset(("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2"))
# Equations that cost no more than reading what they read.
_CHEAP = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp"),
        *("concatenate", "convert_element_type", "copy", "cos", "div", "eq"),
        *("erf", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt"),
        *("integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "pow"),
        *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"),
        *("rem", "reshape", "rsqrt", "select_n", "sign", "sin", "slice", "sqrt"),
        *("square", "squeeze", "stop_gradient", "sub", "tanh", "transpose"),
        *("one_minus_square", "unstack", "xor"),  # the first is of newer jax
    )
)
_PRODUCTS = frozenset(("dot_general", "ragged_dot", "ragged_dot_general"))
# A product runs again in W for a value that is so much larger than what it is made of.
_SHARE = 1 / 8
# Those that only move numbers.
_LAYOUT = frozenset(
    ("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose")
)


class StagePrograms:
    """The programs of one stage.

    Args:
      forward: applies the stage's layers.
      weights, x, context: its abstract arguments; its output is like `x`.
      whole: the same function with another derivative, for a B whose two parts need not
        be told apart; it must leave the same residuals.
      recompute: W makes again what can be had by products out of smaller values: the
        hidden vectors of experts are many times the rest of what crosses.

    Attributes:
      saved: shapes of what the forward leaves for the backward.
      deferred: shapes of what Bi leaves for W.
      early, late: the equations of Bi and of W.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        weights: Tree,
        x: jax.ShapeDtypeStruct,
        context: Tree,
        whole: Forward | None = None,
        recompute: bool = False,
    ):
        self._arguments = weights, context, x
        self._forward, self.saved, self._backward = self._trace_both(forward)
        self._whole = self._backward
        if whole is not None:
            _, saved, self._whole = self._trace_both(whole)
            assert saved == self.saved, (saved, self.saved)
        self._cut(len(jax.tree.leaves((weights, context))), recompute)

    def _trace_both(self, forward: Forward):
        """(forward, what it stashes, backward) of one way to compute the stage."""

        def with_residuals(weights, context, x):
            (y, _), vjp, statistics = jax.vjp(
                lambda w, x: forward(w, x, context), weights, x, has_aux=True
            )
            residuals, trees["vjp"] = jax.tree.flatten(vjp)
            return y, statistics, residuals

        def pull(residuals, dy):
            vjp = jax.tree.unflatten(trees["vjp"], residuals)
            dweights, dx = vjp((dy, jnp.ones((), jnp.float32)))
            return dx, dweights

        trees: dict[str, Any] = {}
        weights, context, x = self._arguments
        traced = _trace(with_residuals, self._arguments)
        jaxpr = traced.closed.jaxpr
        given = len(jax.tree.leaves((weights, context)))
        results = len(jax.tree.leaves(traced.shapes[:2]))
        residuals = jaxpr.outvars[results:]
        saved, again = choose_saved(jaxpr, given, residuals)
        shapes = list(map(_shape, saved))
        outvars = [*jaxpr.outvars[:results], *saved]
        forward_only = _Traced(
            ClosedJaxpr(
                jaxpr.replace(eqns=needed(jaxpr.eqns, outvars), outvars=outvars),
                traced.closed.consts,
            ),
            (*traced.shapes[:2], shapes),
        )

        def backward(weights, context, saved_values, dy):
            flat = [*jax.tree.leaves((weights, context)), *saved_values]
            invars = [*jaxpr.invars[:given], *saved]
            remake = jaxpr.replace(invars=invars, eqns=again, outvars=residuals)
            return pull(jax.core.eval_jaxpr(remake, traced.closed.consts, *flat), dy)

        return forward_only, shapes, _trace(backward, (weights, context, shapes, x))

    def _cut(self, given: int, recompute: bool) -> None:
        """Divides the equations of the backward between Bi and W.

        Args:
          given: number of leaves of weights and context, which both have.
          recompute: as in the constructor.
        """
        self._weights_tree = jax.tree.structure(self._backward.shapes[1])
        jaxpr = self._backward.closed.jaxpr
        dx, *dweights = jaxpr.outvars
        wanted = needed(jaxpr.eqns, [dx, *dweights])
        first = {id(equation) for equation in needed(jaxpr.eqns, [dx])}
        # What does not depend on dy makes residuals again: that is no work for W.
        follow = {jaxpr.invars[-1]}
        for equation in wanted:
            if follow.isdisjoint(v for v in equation.invars if not _fixed(v)):
                first.add(id(equation))
            else:
                follow.update(equation.outvars)
        self.early = [equation for equation in wanted if id(equation) in first]
        late = [equation for equation in wanted if id(equation) not in first]
        always = {*jaxpr.constvars, *jaxpr.invars[:given]}
        maker = {v: equation for equation in self.early for v in equation.outvars}
        crossing: dict[Any, None] = {}
        layout: list[Any] = []
        made = {v for equation in late for v in equation.outvars}
        todo = [*(v for equation in late for v in equation.invars), *dweights]
        while todo:
            v = todo.pop()
            if _fixed(v) or v in made or v in always or v in crossing:
                continue
            source = maker.get(v)
            if source is not None and source.primitive.name in _LAYOUT:
                # The same numbers in two layouts would cross twice.
                layout.append(source)
                made.update(source.outvars)
                todo += source.invars
            else:
                crossing[v] = None
        self.late = [*reversed(layout), *late]
        if recompute:
            cheap = _CHEAP | _PRODUCTS
            early = jaxpr.replace(eqns=self.early)
            kept, again = choose_saved(
                early, given, list(crossing), cheap=cheap, share=_SHARE
            )
            crossing = dict.fromkeys(kept)
            # An equation may be among both, and must not stand there twice.
            self.late = list({id(e): e for e in (*again, *self.late)}.values())
        self.deferred = list(map(_shape, crossing))
        self._inputs = jaxpr.replace(eqns=self.early, outvars=[dx, *crossing])
        self._weights = jaxpr.replace(
            invars=[*jaxpr.invars[:given], *crossing], eqns=self.late, outvars=dweights
        )

    def forward(self, weights: Tree, x: jax.Array, context: Tree) -> Walk:
        """F, to be run; see `forward_results`."""
        return self._forward.walk(weights, context, x)

    def forward_results(self, results: list) -> tuple[jax.Array, Tree, list]:
        """(y, statistics, what is to be stashed)."""
        return self._forward.unflatten(results)

    def backward(
        self, weights: Tree, context: Tree, saved: list, dy: jax.Array
    ) -> Walk:
        """B, to be run; see `backward_results`."""
        return self._whole.walk(weights, context, saved, dy)

    def backward_results(self, results: list) -> tuple[jax.Array, Tree]:
        """(gradient of the input, gradients of the weights)."""
        return self._whole.unflatten(results)

    def backward_inputs(
        self, weights: Tree, context: Tree, saved: list, dy: jax.Array
    ) -> Walk:
        """Bi, to be run: the gradient of the input, and behind it what W needs."""
        flat = jax.tree.leaves((weights, context, saved, dy))
        return Walk(self._inputs, self._backward.closed.consts, flat)

    def backward_weights(self, weights: Tree, context: Tree, deferred: list) -> Tree:
        """W: the gradients of the weights."""
        flat = [*jax.tree.leaves((weights, context)), *deferred]
        out = Walk(self._weights, self._backward.closed.consts, flat).run()
        return jax.tree.unflatten(self._weights_tree, out)


def choose_saved(
    jaxpr: Jaxpr,
    given: int,
    residuals: Sequence[Any],
    *,
    cheap: frozenset[str] = _CHEAP,
    share: float = 1.0,
) -> tuple[list[Any], list[Any]]:
    """Which values to keep so that all residuals can be had again cheaply.

    Greedy, from the largest residual on: it is made again if cheap equations lead to it
    from what is there, or from other values of at most `share` of its size.

    Args:
      jaxpr: without calls.
      given: number of its first arguments that are there again anyway.
      residuals: variables of it, or literals.
      cheap: primitives of equations that may run again.
      share: of the size of a residual.

    Returns:
      The variables to keep, and the equations that make the residuals out of them.
    """
    maker = {
        v: equation
        for equation in jaxpr.eqns
        if equation.primitive.name in cheap and not equation.effects
        for v in equation.outvars
    }
    there = {*jaxpr.constvars, *jaxpr.invars[:given]}
    wanted = dict.fromkeys(v for v in residuals if not _fixed(v))
    saved = [v for v in wanted if v not in maker and v not in there]
    there |= {*saved}
    again: set[int] = set()
    for residual in sorted(wanted, key=lambda v: -_bytes(v)):
        path, ends = _way_back(residual, maker, there)
        if sum(map(_bytes, ends)) <= share * _bytes(residual):
            saved += ends
            again |= {id(equation) for equation in path}
            there |= {*ends, *(v for equation in path for v in equation.outvars)}
        else:
            saved.append(residual)
            there.add(residual)
    made = [equation for equation in jaxpr.eqns if id(equation) in again]
    kept = {*saved}
    # What a later choice keeps need not be made again.
    made = [e for e in made if not kept.issuperset(e.outvars)]
    return list(dict.fromkeys(saved)), made


def _way_back(variable: Any, maker: dict[Any, Any], there: set[Any]):
    """The cheap equations that lead to a variable, and the variables they start from
    that are not there."""
    path: dict[int, Any] = {}
    ends: dict[Any, None] = {}
    todo = [variable]
    while todo:
        v = todo.pop()
        if _fixed(v) or v in there or v in ends:
            continue
        if v not in maker:
            ends[v] = None
        elif id(maker[v]) not in path:
            path[id(maker[v])] = maker[v]
            todo += maker[v].invars
    return list(path.values()), list(ends)


class _Traced:
    """A function as a jaxpr, and the tree of its results."""

    def __init__(self, closed: ClosedJaxpr, shapes: Tree):
        self.closed, self.shapes = closed, shapes

    def walk(self, *arguments) -> Walk:
        return Walk(self.closed.jaxpr, self.closed.consts, jax.tree.leaves(arguments))

    def unflatten(self, results: list) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def _trace(function: Callable, arguments: tuple) -> _Traced:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = jax.make_jaxpr(lambda *xs: _evaluate(closed.jaxpr, closed.consts, xs))
    return _Traced(flat(*jax.tree.leaves(arguments)), shapes)


def needed(equations: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """The equations that the given variables depend on, in order."""
    wanted = {v for v in results if not _fixed(v)}
    kept = []
    for equation in reversed(equations):
        if wanted.isdisjoint(equation.outvars):
            continue
        kept.append(equation)
        wanted |= {v for v in equation.invars if not _fixed(v)}
    return kept[::-1]


def _fixed(v: Any) -> bool:
    return isinstance(v, Literal)


def _shape(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


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
    if equation.primitive.name not in _CALLS:
        return None
    inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
