# SPDX-License-Identifier: Apache-2.0
"""Who attends to whom: by hand, and proven by derivatives.

Legend: B batch, S positions, D width, H heads, Q head size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import Model
from jaxmoe.layers.attention import Attention, attention_mask
from tests import oracle

jitted_mask = jax.jit(attention_mask)


def test_mask_by_hand():
    """Sequence 1: two patches, one encoder word, two decoder words. Sequence 2: one
    encoder word, two decoder words. Then two positions of padding.

    i i e d d   e d d   . .
    """
    sequence = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    decoder = jnp.array([[0, 0, 0, 1, 1, 0, 1, 1, 0, 0]], bool)
    rows = """
        1 1 1 . . . . . . .
        1 1 1 . . . . . . .
        1 1 1 . . . . . . .
        1 1 1 1 . . . . . .
        1 1 1 1 1 . . . . .
        . . . . . 1 . . . .
        . . . . . 1 1 . . .
        . . . . . 1 1 1 . .
        . . . . . . . . 1 .
        . . . . . . . . . 1
    """
    expected = [[c == "1" for c in row.split()] for row in rows.strip().splitlines()]
    got = attention_mask(sequence, decoder)
    assert got.shape == (1, 1, 10, 10)
    np.testing.assert_array_equal(got[0, 0], expected)


def test_decoder_before_its_encoder_sees_it():
    """The rule names parts, not places: a decoder position sees all encoder positions

    of its sequence, wherever they stand.
    """
    mask = attention_mask(jnp.array([[1, 1, 1]]), jnp.array([[True, False, True]]))
    np.testing.assert_array_equal(mask[0, 0], [[1, 1, 0], [0, 1, 0], [1, 1, 1]])


@given(data=st.data())
def test_mask_equals_its_rule(data):
    """[i, j]: same real sequence and (j encoder, or i decoder and j <= i); or i = j."""
    sequence = data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8))
    decoder = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    got = jitted_mask(jnp.array([sequence]), jnp.array([decoder]))
    np.testing.assert_array_equal(got[0, 0], oracle.attention_mask(sequence, decoder))


def make(use_bias=True):
    model = Model(width=8, num_heads=2, head_dim=3, use_bias=use_bias, init_std=0.5)
    module = Attention(model, rngs=nnx.Rngs(0))
    if use_bias:
        rng = np.random.default_rng(0)
        module.qkv_bias[...] = jnp.asarray(rng.standard_normal((3, 2, 3)), jnp.float32)
        module.out_bias[...] = jnp.asarray(rng.standard_normal(8), jnp.float32)
    return module


@pytest.mark.parametrize("use_bias", [True, False])
def test_attention_equals_its_formula(use_bias):
    """out = sum over heads of softmax(q k^T / sqrt(Q), masked) v W_out, one by one."""
    module = make(use_bias)
    x_BSD = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    mask = attention_mask(
        jnp.array([[1, 1, 1, 1, 0], [1, 1, 2, 2, 2]]),
        jnp.array([[0, 0, 1, 1, 0], [0, 1, 0, 1, 1]], bool),
    )
    got = jax.jit(lambda x, m: module(x, m))(jnp.asarray(x_BSD), mask)
    kernel, out = np.asarray(module.qkv_kernel[...]), np.asarray(module.out_kernel[...])
    want = np.zeros((2, 5, 8))
    for b in range(2):
        for h in range(2):
            q, k, v = (x_BSD[b] @ kernel[:, c, h] for c in range(3))
            if use_bias:
                bias = np.asarray(module.qkv_bias[...])[:, h]
                q, k, v = q + bias[0], k + bias[1], v + bias[2]
            score = np.where(mask[b, 0], q @ k.T / np.sqrt(3), -np.inf)
            weight = np.exp(score - score.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            want[b] += weight @ v @ out[h]
    if use_bias:
        want += np.asarray(module.out_bias[...])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_dependencies_are_exactly_the_mask():
    """d out_i / d x_j is not 0 where the mask is True, and exactly 0 elsewhere."""
    module = make()
    sequence = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]])
    decoder = jnp.array([[0, 0, 1, 1, 0, 1, 1, 0]], bool)
    mask = attention_mask(sequence, decoder)
    x_BSD = jax.random.normal(jax.random.key(0), (1, 8, 8))
    jacobian = jax.jit(jax.jacrev(lambda x: module(x, mask)))(x_BSD)
    size = np.abs(jacobian[0, :, :, 0]).max(axis=(1, 3))  # [S, S]
    np.testing.assert_array_equal(size > 0, mask[0, 0])


def test_padding_has_finite_derivatives():
    """A row of padding alone has finite values and gradients: no softmax of nothing."""
    module = make()
    mask = attention_mask(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), bool))
    x_BSD = jax.random.normal(jax.random.key(0), (1, 4, 8))
    run = jax.jit(jax.value_and_grad(lambda x: jnp.sum(module(x, mask) ** 2)))
    value, gradient = run(x_BSD)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_softmax_is_float32_in_bfloat16():
    """The exponential of a bfloat16 model is taken in float32."""
    module = make()
    graph, state = nnx.split(module)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state)
    mask = jnp.ones((1, 1, 4, 4), bool)

    def run(x_BSD):
        return nnx.merge(graph, half)(x_BSD, mask)

    jaxpr = jax.make_jaxpr(run)(jnp.ones((1, 4, 8), jnp.bfloat16))
    exps = [e for e in oracle.equations(jaxpr) if e.primitive.name == "exp"]
    assert [e.outvars[0].aval.dtype for e in exps] == [jnp.float32]
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
