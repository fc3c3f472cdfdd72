# SPDX-License-Identifier: Apache-2.0
"""Operations are counted as XLA counts them, and a model needs what its step has."""

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.aot import flops
from tests import helpers
from tests.helpers import changed, tiny_config

DENSE = tiny_config(model={"layer_pattern": "dense"})


def count(function, *args, even_rows=10**9):
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return flops.step_flops(jaxpr, devices=1, even_rows=even_rows)


def products(x, w):
    """Products in a loop, in a branch, batched, and in a function of its own."""
    y = jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=3)[0]
    y = jax.lax.cond(True, lambda y: y @ w @ w, lambda y: y @ w, y)
    return jax.jit(lambda y: jnp.einsum("bij,bjk->bik", y[None], w[None]))(y)


def unrolled(x, w):
    for _ in range(5):
        x = x @ w
    return jnp.einsum("bij,bjk->bik", x[None], w[None])


def test_as_xla_counts_the_unrolled_program():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    compiled = jax.jit(unrolled).lower(x, w).compile()
    assert count(products, x, w) == compiled.cost_analysis()["flops"]
    assert count(unrolled, x, w) == 6 * 2 * 8 * 16 * 16


def test_gradients_as_xla_counts_them():
    x, w = jnp.ones((64, 128)), jnp.ones((128, 128))
    loss = lambda x, w: jnp.sum(unrolled(x, w) ** 2)  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    xla = gradient.lower(x, w).compile().cost_analysis()["flops"]
    assert count(gradient, x, w) == pytest.approx(xla, rel=0.01)


def test_ragged_rows_count_as_many_as_there_are():
    x, w = jnp.ones((32, 4)), jnp.ones((2, 4, 8))
    sizes = jnp.array([3, 5])
    product = lambda x, w: jax.lax.ragged_dot(x, w, sizes)  # noqa: E731
    assert count(product, x, w, even_rows=8) == 2 * 8 * 4 * 8
    assert count(product, x, w) == 2 * 32 * 4 * 8
    both = jax.grad(lambda x, w: jnp.sum(product(x, w)), argnums=(0, 1))
    assert count(both, x, w, even_rows=8) == 3 * 2 * 8 * 4 * 8


@pytest.mark.parametrize("devices", [(1, 1), (4, 2)])
def test_a_dense_step_has_what_its_model_needs(devices):
    """Without recomputation, over all devices; tied embeddings add no product."""
    setup = helpers.setup_of(DENSE, *devices)
    jaxpr = setup.traced_step().jaxpr.jaxpr
    found = flops.step_flops(jaxpr, devices=setup.mesh.size, even_rows=1)
    needed = flops.model_flops(DENSE, setup.vocab_size)
    assert found * setup.mesh.size == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize("schedule", ["zb_h1", "dualpipe"])
def test_a_pipeline_has_what_its_model_needs(schedule):
    """Branches count as often as the table runs them, the head once per microbatch."""
    config = changed(DENSE, pipeline={"schedule": schedule}, model={"num_layers": 4})
    setup = helpers.setup_of(config, 1, 1, 4)
    jaxpr = setup.traced_step().jaxpr.jaxpr
    found = flops.step_flops(
        jaxpr,
        devices=4,
        even_rows=1,
        choices=setup.pipelined.traced.choices(),
        heads=8,
    )
    needed = flops.model_flops(config, setup.vocab_size)
    assert 4 * found == pytest.approx(needed, rel=0.01)
