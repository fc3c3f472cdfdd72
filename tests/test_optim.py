# SPDX-License-Identifier: Apache-2.0
"""Schedules, decay, clipping and update rules by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmoe import model as model_lib
from jaxmoe import optim
from jaxmoe.config import Model, MoE, Optimizer


def config(**changes):
    values = {"learning_rate": 0.8, "warmup_steps": 4, "end_fraction": 0.1}
    return Optimizer(**values | changes)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rsqrt", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule):
    """With 4 steps of warm-up the rates are 1/4, 2/4, 3/4, 4/4 of the peak.

    Step 0 already learns; step 4, the first after warm-up, has the peak again.
    """
    rate = optim.learning_rate(config(schedule=schedule), steps=20)
    got = [float(rate(step)) for step in range(5)]
    np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.8, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [
        ("cosine", 0.08 + 0.72 * 0.5, 0.08),
        ("linear", (0.8 + 0.08) / 2, 0.08),
        ("rsqrt", 0.8 * np.sqrt(4 / 12), 0.8 * np.sqrt(4 / 20)),
        ("constant", 0.8, 0.8),
    ],
)
def test_decay_by_hand(schedule, middle, end):
    """Steps 12 and 20 of 20, half way and at the end of the 16 steps after warm-up.

    cosine and linear end at 0.1 of the peak; rsqrt is sqrt(warm-up / step).
    """
    rate = optim.learning_rate(config(schedule=schedule), steps=20)
    assert float(rate(12)) == pytest.approx(middle, rel=1e-5)
    assert float(rate(20)) == pytest.approx(end, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_stays_at_its_end(schedule):
    """Past the last step the rate does not move any more."""
    rate = optim.learning_rate(config(schedule=schedule), steps=20)
    assert float(rate(1000)) == pytest.approx(0.08, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rsqrt", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (1, 10), (50, 10), (0, 0)])
def test_every_warm_up_gives_finite_rates_up_to_the_peak(schedule, warmup, steps):
    """No warm-up starts at the peak; one longer than the run is the whole run."""
    rate = optim.learning_rate(config(schedule=schedule, warmup_steps=warmup), steps)
    got = np.array([float(rate(step)) for step in range(12)])
    assert np.isfinite(got).all()
    assert got.max() == pytest.approx(0.8, rel=1e-6)
    assert got.min() > 0
    if warmup <= 1:
        assert got[0] == pytest.approx(0.8, rel=1e-6)
    if warmup == 50:
        np.testing.assert_allclose(got[:10], 0.08 * np.arange(1, 11), rtol=1e-5)


def model_params():
    """Shapes of a model that has every kind of parameter."""
    model = Model(
        num_layers=2,
        layer_pattern="dense,moe",
        activation="swiglu",
        width=8,
        ffn_width=8,
        tie_embeddings=False,
    )
    moe = MoE(num_shared_experts=1, router="grouped_sigmoid")
    module = nnx.eval_shape(lambda: model_lib.M6(model, moe, 32, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def test_decay_reaches_matrices_only():
    """Decayed: kernels and embeddings. Never: norm scales, biases, the router.

    Every parameter of the model is in exactly one of the two lists.
    """
    mask = optim.decay_mask(model_params())
    names = {True: set(), False: set()}
    for path, decays in jax.tree_util.tree_leaves_with_path(mask):
        names[decays].add(path[-1].key)
    assert names[False] == {
        *("scale", "bias", "qkv_bias", "out_bias", "up_bias", "down_bias"),
        *("patch_bias", "router_kernel"),
    }
    assert names[True] == {
        *("qkv_kernel", "out_kernel", "gate", "up", "down", "token", "position"),
        *("segment", "patch_kernel", "head"),
    }


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_decay_is_a_multiple_of_the_learning_rate(name):
    """With gradient 0 a decayed parameter becomes p (1 - rate * decay), others stay."""
    rule = optim.make_optimizer(
        Optimizer(
            name=name,
            learning_rate=0.5,
            warmup_steps=0,
            schedule="constant",
            weight_decay=0.1,
        ),
        steps=10,
    )
    params = {"up": jnp.full((2, 2), 4.0), "up_bias": jnp.full(2, 4.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def update(params):
        updates, _ = rule.update(zeros, rule.init(params), params)
        return optax.apply_updates(params, updates)

    got = update(params)
    np.testing.assert_allclose(got["up"], np.full((2, 2), 4.0 * 0.95), rtol=1e-6)
    np.testing.assert_array_equal(got["up_bias"], params["up_bias"])


def test_sgd_by_hand():
    """p - rate * gradient, no decay."""
    rule = optim.make_optimizer(
        config(name="sgd", warmup_steps=0, schedule="constant"), steps=10
    )
    params = {"up": jnp.array([1.0, 2.0])}
    updates, _ = rule.update({"up": jnp.array([1.0, -1.0])}, rule.init(params), params)
    np.testing.assert_allclose(updates["up"], [-0.8, 0.8], rtol=1e-6)


def test_adamw_first_step_by_hand():
    """The first step is rate * sign(gradient), whatever the gradient's size."""
    rule = optim.make_optimizer(
        config(name="adamw", warmup_steps=0, weight_decay=0.0), steps=10
    )
    params = {"up": jnp.array([1.0, 2.0])}
    gradient = {"up": jnp.array([1e-3, -1e3])}
    updates, _ = rule.update(gradient, rule.init(params), params)
    np.testing.assert_allclose(updates["up"], [-0.8, 0.8], rtol=1e-4)


def test_adafactor_learns_with_factored_moments():
    """256 x 128 numbers have 256 + 128 of second moments, and the loss falls."""
    rule = optim.make_optimizer(
        Optimizer(name="adafactor", learning_rate=0.05, warmup_steps=0), steps=40
    )
    target = jax.random.normal(jax.random.key(0), (256, 128))
    params = {"up": jnp.zeros((256, 128))}
    state = rule.init(params)
    moments = [leaf.size for leaf in jax.tree.leaves(state)]
    assert sum(moments) < 1000

    @jax.jit
    def step(params, state):
        loss = lambda p: jnp.mean((p["up"] - target) ** 2)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(40):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]


def test_clip_by_hand():
    """Leaves with norms 3 and 4 have the global norm 5: limit 1 gives 0.6 and 0.8."""
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[0.0, -4.0]])}
    got = optim.clip(gradients, jnp.float32(5.0), 1.0)
    np.testing.assert_allclose(got["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(got["b"], [[0.0, -0.8]], rtol=1e-6)


@pytest.mark.parametrize(("norm", "limit"), [(5.0, None), (5.0, 6.0), (0.0, 1.0)])
def test_clip_leaves_small_gradients_alone(norm, limit):
    """A norm at most the limit, no limit, or no gradient at all: nothing changes."""
    gradients = {"a": jnp.array([3.0, 4.0])} if norm else {"a": jnp.zeros(2)}
    got = optim.clip(gradients, jnp.float32(norm), limit)
    np.testing.assert_array_equal(got["a"], gradients["a"])


def test_clip_keeps_not_finite_gradients_visible():
    """A NaN norm stays NaN: clipping hides no broken step."""
    got = optim.clip({"a": jnp.ones(2)}, jnp.float32(np.nan), 1.0)
    assert np.isnan(got["a"]).all()
