# SPDX-License-Identifier: Apache-2.0
"""The programs of a stage against plain `jax.vjp`, and what is in them.

Legend: B sequences, D width, F hidden width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.pipeline.stage import StagePrograms
from tests import oracle

B, D, F = 4, 8, 32


def two_layers(weights, x, context):
    """Normed feed-forward layers with a call and a part marked for recomputation."""

    @jax.jit
    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True)) * scale[None]

    def layer(x, w):
        h = jnp.tanh(norm(x, w["scale"]) @ w["up"] + w["bias"][None])
        return x + jnp.where(context["mask"], h, 0.0) @ w["down"]

    x = layer(x, weights[0])
    x = jax.checkpoint(layer)(x, weights[1])
    return (x, 0.1 * jnp.sum(jnp.square(x))), {"sum": jnp.sum(x)}


@pytest.fixture(scope="module")
def scene():
    """(weights, x, context, dy)"""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    draw = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    weights = [
        {"scale": draw(D), "up": draw(D, F), "bias": draw(F), "down": draw(F, D)}
        for _ in range(2)
    ]
    context = {"mask": jnp.arange(B * F).reshape(B, F) % 3 > 0}
    return weights, jnp.ones((B, 1)) + jnp.arange(D)[None] / 10, context, draw(B, D)


def programs_of(forward, scene, **options):
    weights, x, context, _ = scene
    abstract = lambda tree: jax.tree.map(  # noqa: E731
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree
    )
    return StagePrograms(
        forward,
        weights=abstract(weights),
        x=abstract(x),
        context=abstract(context),
        **options,
    )


@pytest.fixture(scope="module")
def programs(scene):
    return programs_of(two_layers, scene)


@pytest.fixture(scope="module")
def expected(scene):
    weights, x, context, dy = scene
    apply = lambda w, x: two_layers(w, x, context)[0]  # noqa: E731
    y, pull = jax.vjp(apply, weights, x)
    return y, pull((dy, jnp.ones(())))


def forward(programs, *arguments):
    return programs.forward_results(programs.forward(*arguments).run())


def test_equal_plain_autodiff(programs, scene, expected):
    """Forward, B, and Bi then W: the output and every gradient of jax.vjp."""
    weights, x, context, dy = scene
    (y, _), (dweights, dx) = expected
    got_y, statistics, saved = forward(programs, weights, x, context)
    oracle.assert_close(got_y, y, relative=1e-6)
    oracle.assert_close(statistics["sum"], jnp.sum(y), relative=1e-6)
    whole = programs.backward(weights, context, saved, dy).run()
    whole = programs.backward_results(whole)
    oracle.assert_close(whole, (dx, dweights), relative=1e-6)
    got_dx, *deferred = programs.backward_inputs(weights, context, saved, dy).run()
    got = programs.backward_weights(weights, context, deferred)
    oracle.assert_close((got_dx, got), (dx, dweights), relative=1e-6)


def test_w_makes_again_what_is_large(scene):
    """With recomputation nothing so wide as the hidden vectors, 16 times the stage's
    input, waits between Bi and W; the gradients are the same."""
    _, x, context, dy = scene
    wide = 16 * D
    keys = jax.random.split(jax.random.key(1), 2)
    w = {
        "up": jax.random.normal(keys[0], (D, wide)),
        "down": jax.random.normal(keys[1], (wide, D)),
    }

    def layer(weights, x, context):
        apply = lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"]  # noqa: E731
        return (jax.checkpoint(apply)(weights, x), jnp.zeros(())), None

    found = {}
    for recompute in (False, True):
        programs = programs_of(layer, (w, x, context, dy), recompute=recompute)
        *_, saved = forward(programs, w, x, context)
        dx, *deferred = programs.backward_inputs(w, context, saved, dy).run()
        found[recompute] = dx, programs.backward_weights(w, context, deferred)
        assert any(a.shape == (B, wide) for a in deferred) == (not recompute)
    oracle.assert_close(found[True], found[False], relative=1e-6)


def test_what_is_stashed_is_announced(programs, scene):
    """The shapes of `saved` and `deferred` are those of what the programs give."""
    weights, x, context, dy = scene
    *_, saved = forward(programs, weights, x, context)
    _, *deferred = programs.backward_inputs(weights, context, saved, dy).run()
    for arrays, shapes in ((saved, programs.saved), (deferred, programs.deferred)):
        assert [(a.shape, a.dtype) for a in arrays] == [
            (s.shape, s.dtype) for s in shapes
        ]


def test_no_weight_and_nothing_of_the_microbatch_is_stashed(programs):
    """Of width F x D there is nothing, nor the mask: booleans [B, F].

    Kept are the stage's input, the first layer's pre-activation, and of each layer the
    output: what is cheap is made again, and the second layer as a whole.
    """
    kept = [(s.shape, s.dtype) for s in programs.saved]
    assert (D, F) not in [shape for shape, _ in kept]
    assert np.dtype(bool) not in [dtype for _, dtype in kept]
    numbers = sum(np.prod(shape) for shape, _ in kept)
    assert numbers <= B * D + B * F + 2 * B * D


def test_w_is_products_and_small_sums(programs):
    """W has the four weight products and the sums of biases and norms, nothing else."""
    names = {equation.primitive.name for equation in programs.late}
    moving = {"transpose", "reshape", "broadcast_in_dim", "squeeze"}
    assert names - moving <= {"dot_general", "reduce_sum", "mul", "add_any"}
    products = [e for e in programs.late if e.primitive.name == "dot_general"]
    assert len(products) == 4


def test_no_product_is_computed_twice(programs):
    """2 layers, 2 products each: 4 in the forward; 8 backward and the 2 that the
    second layer, marked for recomputation, needs again (its last one has no use)."""
    forward = [
        e
        for e in oracle.equations(programs._forward.closed)
        if e.primitive.name == "dot_general"
    ]
    backward = [
        e
        for e in (*programs.early, *programs.late)
        if e.primitive.name == "dot_general"
    ]
    assert len(forward) == 4
    assert len(backward) == 8 + 1


def test_an_empty_stage_is_the_identity(scene):
    """No layers: y is x, the gradient passes, nothing is stashed."""
    _, x, context, dy = scene

    def nothing(weights, x, context):
        return (x, jnp.zeros(())), None

    programs = programs_of(nothing, ([], x, context, dy))
    y, statistics, saved = forward(programs, [], x, context)
    np.testing.assert_array_equal(y, x)
    assert statistics is None
    assert saved == [] == programs.deferred
    whole = programs.backward([], context, saved, dy).run()
    dx, dweights = programs.backward_results(whole)
    np.testing.assert_array_equal(dx, dy)
    assert dweights == []
