# SPDX-License-Identifier: Apache-2.0
"""Grouped feed-forward: the two implementations, and experts one at a time.

Legend: R rows, b rows of a block, p slots, D width, F hidden width.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.config import Model
from jaxmoe.moe import experts as experts_lib
from jaxmoe.moe.dispatch import Layout
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.experts import Experts
from jaxmoe.pipeline.stage import needed
from tests import oracle

D, F, SLOTS, BLOCK = 8, 12, 4, 8
PARTS = (4 * BLOCK, 2 * BLOCK, BLOCK)
# Rows of a slot: part of a block, none, 6 blocks (4 at once, then 2), one.
SIZES = np.array([3, 0, 45, 8])
OF_BLOCK = np.array([0, 2, 2, 2, 2, 2, 2, 3, 3, 3])  # two blocks more than are used


def layout():
    sizes = jnp.asarray(SIZES, jnp.int32)
    return Layout(sizes, jnp.asarray(OF_BLOCK, jnp.int32), jnp.int32(8), PARTS)


def real_rows():
    """(row, slot) of every row that a token stands in."""
    starts = np.array([0, 8, 8, 56])
    return [(starts[s] + i, s) for s in range(SLOTS) for i in range(SIZES[s])]


def make(activation="gelu", use_bias=True, dtype=jnp.float32):
    model = Model(width=D, activation=activation, use_bias=use_bias, init_std=0.3)
    module = Experts(model, SLOTS, F, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(module))
    rng = np.random.default_rng(0)
    for name in ("up_bias", "down_bias"):
        if use_bias:
            bias = rng.standard_normal(weights[name].shape)
            weights[name] = jnp.asarray(bias, jnp.float32)
    rows = [row for row, _ in real_rows()]
    x_RD, dy_RD = np.zeros((2, len(OF_BLOCK) * BLOCK, D), np.float32)
    x_RD[rows] = rng.standard_normal((len(rows), D))
    dy_RD[rows] = rng.standard_normal((len(rows), D))
    cast = partial(jax.tree.map, lambda a: jnp.asarray(a, dtype))
    return cast(weights), cast(x_RD), cast(dy_RD)


@partial(jax.jit, static_argnames="apart")
def blocks(weights, x_RD, dy_RD, apart=False):
    """Value and derivatives (of the rows, of the weights) of the loop over blocks."""

    def apply(x_RD, weights):
        return experts_lib._blocks(x_RD, weights, layout().sizes_p, PARTS, apart)

    y_RD, pull = jax.vjp(apply, x_RD, weights)
    return y_RD, pull(dy_RD)


def apart(weights, x_RD, dy_RD):
    """The same with the gradients of the weights in a loop of their own."""
    return blocks(weights, x_RD, dy_RD, apart=True)


@partial(jax.jit, compiler_options=oracle.QUICK)
def ragged(weights, x_RD, dy_RD):
    """The same of the products by ragged_dot."""

    def apply(x_RD, weights):
        return experts_lib._ragged(x_RD, weights, layout())

    y_RD, pull = jax.vjp(apply, x_RD, weights)
    return y_RD, pull(dy_RD)


@partial(jax.jit, compiler_options=oracle.QUICK)
def one_by_one(weights, x_RD, dy_RD):
    """The same of each real row with its expert's own matrices."""
    rows, slots = np.array(real_rows()).T

    def apply(x_RD, weights):
        own = jax.tree.map(lambda w: w[slots], weights)
        apply_row = lambda w, x: oracle.feed_forward(w, x[None])[0]  # noqa: E731
        y = jax.vmap(apply_row)(own, x_RD[rows])
        return jnp.zeros_like(x_RD).at[rows].set(y)

    y_RD, pull = jax.vjp(apply, x_RD, weights)
    return y_RD, pull(dy_RD)


def only_real(result):
    y_RD, (dx_RD, dweights) = result
    rows = [row for row, _ in real_rows()]
    return y_RD[np.array(rows)], (dx_RD[np.array(rows)], dweights)


@pytest.mark.parametrize("implementation", [blocks, apart, ragged])
@pytest.mark.parametrize(
    ("activation", "use_bias"),
    [("gelu", True), ("gelu", False), ("swiglu", True), ("swiglu", False)],
)
def test_equals_each_row_by_its_own_expert(implementation, activation, use_bias):
    """Both implementations give y_r = FFN_slot(r)(x_r) and all its derivatives.

    Slots with no row, with part of a block and with several blocks; blocks past the
    used ones add nothing to any gradient.
    """
    inputs = make(activation, use_bias)
    got, want = implementation(*inputs), one_by_one(*inputs)
    oracle.assert_close(only_real(got), only_real(want))
    for leaf in jax.tree.leaves(got[1][1]):
        assert not np.any(leaf[1])  # the slot without rows


def test_blocks_equal_ragged():
    """The two implementations agree with each other, values and gradients."""
    inputs = make("swiglu", True)
    oracle.assert_close(only_real(ragged(*inputs)), only_real(blocks(*inputs)))


def test_ragged_reads_no_row_past_the_groups(monkeypatch):
    """Garbage in rows that no group covers reaches no real row and no gradient.

    A grouped product leaves those rows as it found the memory: here, and in the
    derivative with respect to the rows, they are made NaN.
    """
    real = jax.lax.ragged_dot

    def inside(x, sizes):
        return (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]

    @jax.custom_vjp
    def poisoned(x, w, sizes):
        y = real(jnp.where(inside(x, sizes), x, 0.0), w, sizes)
        return jnp.where(inside(y, sizes), y, jnp.nan)

    def forward(x, w, sizes):
        return poisoned(x, w, sizes), (x, w, sizes)

    def backward(residuals, dy):
        x, w, sizes = residuals
        clean = [jnp.where(inside(a, sizes), a, 0.0) for a in (x, dy)]
        _, pull = jax.vjp(lambda x, w: real(x, w, sizes), clean[0], w)
        dx, dw = pull(clean[1])
        return jnp.where(inside(dx, sizes), dx, jnp.nan), dw, None

    poisoned.defvjp(forward, backward)
    inputs = make("gelu", True)
    want = only_real(blocks(*inputs))
    monkeypatch.setattr(jax.lax, "ragged_dot", poisoned)
    fresh = jax.jit(lambda *inputs: ragged.__wrapped__(*inputs))  # traced anew
    got = only_real(fresh(*inputs))
    oracle.assert_close(got, want)


def test_bfloat16_weight_gradients_add_up_in_float32():
    """200 equal blocks of one expert: the gradient is 200 times that of one.

    Added in bfloat16, whose sums stop growing at 256 times the addend, it would not be.
    """
    weights, _, _ = make("gelu", True, jnp.bfloat16)
    x_bD = jnp.ones((BLOCK, D), jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def gradient(number):
        def total(weights):
            x_RD = jnp.tile(x_bD, (number, 1))
            sizes = jnp.array([number * BLOCK, 0, 0, 0], jnp.int32)
            y = experts_lib._blocks(x_RD, weights, sizes, (BLOCK,), False)
            return jnp.sum(y, dtype=jnp.float32)

        return jax.grad(total)(weights)

    one, many = gradient(1), gradient(200)
    assert {leaf.dtype for leaf in jax.tree.leaves(many)} == {jnp.dtype(jnp.bfloat16)}
    times = jax.tree.map(lambda a: 200 * a.astype(jnp.float32), one)
    oracle.assert_close(many, times, relative=2**-7)


def test_module_hands_its_weights_over():
    """The module applies the loop to all that it has, and to nothing it has not."""
    model = Model(width=D, activation="swiglu", use_bias=False, init_std=0.3)
    module = Experts(model, SLOTS, F, rngs=nnx.Rngs(0))
    assert set(nnx.to_pure_dict(nnx.state(module))) == {"up", "gate", "down"}
    weights, x_RD, dy_RD = make("swiglu", False)
    graph, state = nnx.split(module)

    def apply(x_RD):
        return nnx.merge(graph, state)(x_RD, layout(), axis=ExpertAxis())

    got = jax.jit(apply)(x_RD)
    np.testing.assert_array_equal(got, blocks(weights, x_RD, dy_RD)[0])


def test_weight_gradients_can_wait():
    """With `weights_apart` the weights' gradients have a loop of their own.

    Of the two loops over slots in the backward, the gradient of the rows needs the
    first only. Together there is one loop. Products, for each size of parts: 2 forward,
    3 + 2 backward either way.
    """
    weights, x_RD, dy_RD = make()

    def gradients(apart):
        def pull(x_RD, dy_RD):
            apply = lambda x, w: experts_lib._blocks(  # noqa: E731
                x, w, layout().sizes_p, PARTS, apart
            )
            return jax.vjp(apply, x_RD, weights)[1](dy_RD)

        return jax.make_jaxpr(pull)(x_RD, dy_RD).jaxpr

    products, loops = {}, {}
    for apart in (False, True):
        jaxpr = gradients(apart)
        primitives = [e.primitive.name for e in oracle.equations(jaxpr)]
        products[apart] = primitives.count("dot_general")
        loops[apart] = sum(e.primitive.name == "while" for e in jaxpr.eqns)
        for_rows = [e.primitive.name for e in needed(jaxpr.eqns, jaxpr.outvars[:1])]
        assert for_rows.count("while") == 1
    assert products == dict.fromkeys((False, True), len(PARTS) * (2 + 5))
    assert loops == {False: 2, True: 3}
