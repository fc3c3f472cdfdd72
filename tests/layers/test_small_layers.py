# SPDX-License-Identifier: Apache-2.0
"""Feed-forward part, norms and parameter declarations against their formulas.

Legend: D width, F hidden width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.config import Model
from jaxmoe.layers.linear import no_param, normal_param, zeros_param
from jaxmoe.layers.mlp import Mlp
from jaxmoe.layers.norm import make_norm
from tests import oracle


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_mlp_equals_its_formula(activation, use_bias):
    """down(gelu(up(x))) or down(silu(gate(x)) up(x)), value and every gradient."""
    model = Model(width=4, activation=activation, use_bias=use_bias, init_std=0.5)
    mlp = Mlp(model, 6, rngs=nnx.Rngs(0))
    if use_bias:
        mlp.up_bias[...], mlp.down_bias[...] = jnp.arange(6.0), jnp.arange(4.0)
    graph, state = nnx.split(mlp)
    pure = nnx.to_pure_dict(state)
    biases = {"up_bias", "down_bias"} if use_bias else set()
    gates = {"gate"} if activation == "swiglu" else set()
    assert set(pure) == {"up", "down"} | biases | gates
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))

    def total(apply):
        def run(weights, x):
            y = apply(weights, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(pure, x)

    got = total(lambda weights, x: nnx.merge(graph, weights)(x))
    want = total(lambda w, x: oracle.feed_forward(w, x.reshape(6, 4)).reshape(2, 3, 4))
    oracle.assert_close(got, want)


def norm_of(norm, use_bias=True):
    return make_norm(Model(width=64, norm=norm, use_bias=use_bias), nnx.Rngs(0))


def test_norms_equal_their_formulas():
    """LayerNorm: (x - mean) / std. RMSNorm: x / root mean square. Scale starts at 1."""
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32) * 5 + 2
    layer = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    rms = x / np.sqrt((x**2).mean(1, keepdims=True))
    np.testing.assert_allclose(norm_of("layer")(jnp.asarray(x)), layer, atol=1e-4)
    np.testing.assert_allclose(norm_of("rms")(jnp.asarray(x)), rms, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "use_bias", "names"),
    [
        ("layer", True, {"scale", "bias"}),
        ("layer", False, {"scale"}),
        ("rms", True, {"scale"}),
    ],
)
def test_norm_parameters(norm, use_bias, names):
    """A bias only where the model has biases and the norm centres."""
    assert set(nnx.to_pure_dict(nnx.state(norm_of(norm, use_bias)))) == names


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_are_float32(norm):
    """The statistics of bfloat16 input are float32, and so is the result."""
    module = norm_of(norm)
    jaxpr = jax.make_jaxpr(lambda x: module(x))(jnp.ones((2, 64), jnp.bfloat16))
    reductions = [e for e in oracle.equations(jaxpr) if "reduce" in e.primitive.name]
    assert reductions
    assert {e.outvars[0].aval.dtype for e in reductions} == {jnp.dtype(jnp.float32)}
    assert jaxpr.out_avals[0].dtype == jnp.float32


def test_parameters_are_truncated_normal_and_carry_their_axes():
    """Values within 2 std, mean 0, spread 0.88 std (that of the truncated normal)."""
    param = normal_param(nnx.Rngs(0), (200, 300), ("width", None), 0.5)
    value = np.asarray(param[...])
    assert np.abs(value).max() <= 1.0
    assert abs(value.mean()) < 0.01
    assert value.std() == pytest.approx(0.5 * 0.8796, rel=0.01)
    assert param.get_metadata()["logical_axes"] == ("width", None)
    zeros = zeros_param((3,), ("width",))
    assert not np.any(zeros[...])
    assert zeros.get_metadata()["logical_axes"] == ("width",)
    assert no_param(nnx.Rngs(0), (3,), ("width",), 0.1) is None
