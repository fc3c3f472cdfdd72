# SPDX-License-Identifier: Apache-2.0
"""Balance losses, counts and the bias update, by hand.

Legend: G routing groups, N tokens of a group, E experts, K experts per token.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.config import Model, MoE
from jaxmoe.moe import balance
from jaxmoe.moe.router import Router
from tests.moe.harness import sequences

ALL = np.ones((1, 4), bool)
jitted_count = jax.jit(balance.count_tokens, static_argnums=1)


def switch_loss(probs, ids, valid=ALL):
    probs, E = np.asarray(probs, np.float32), np.shape(probs)[-1]
    ids = np.where(np.asarray(valid)[:, :, None], ids, E)
    load = jitted_count(ids, E)
    return jax.jit(balance.switch_loss)(probs, load, np.asarray(valid))


@lru_cache
def jitted_router(moe, group):
    model = Model(width=moe.num_experts)
    graph, state = nnx.split(Router(model, moe, group, rngs=nnx.Rngs(0)))
    state["router_kernel"].set_value(jnp.eye(moe.num_experts, dtype=jnp.float32))

    def apply(x_TD, valid_T):
        return nnx.merge(graph, state)(x_TD, sequences(valid_T))

    return jax.jit(apply)


def test_void_assignments_count_nowhere():
    """Counts per group; the id E (void) adds to no expert."""
    ids = jnp.array([[[0, 1], [1, 3]], [[3, 3], [2, 0]]])
    np.testing.assert_array_equal(jitted_count(ids, 3), [[1, 2, 0], [1, 0, 1]])


@pytest.mark.parametrize("router", ["top_k", "prototype", "grouped_sigmoid"])
def test_even_load_gives_exactly_1(router):
    """E * sum_e (1/E) p_e = sum_e p_e = 1: even counts make it 1, whatever p is.

    The probabilities sum to 1 over all E experts also with prototypes, of which each
    has a softmax of its own.
    """
    logits = np.full((4, 4), -1.0)
    for t in range(4):  # every expert twice
        logits[t, [t // 2, 2 + t % 2]] = 1.0
    moe = MoE(num_experts=4, top_k=2, router=router)
    routing = jitted_router(moe, 4)(jnp.asarray(logits, jnp.float32), jnp.ones(4, bool))
    np.testing.assert_array_equal(routing.stats.load_E, [2, 2, 2, 2])
    assert float(routing.stats.balance_loss) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("experts", [2, 8, 64])
def test_collapse_gives_the_number_of_experts(experts):
    """All tokens on one expert with probability 1: E * 1 * 1 = E."""
    probs = np.zeros((1, 4, experts))
    probs[..., 1] = 1.0
    np.testing.assert_array_equal(
        switch_loss(probs, np.ones((1, 4, 1), int)), [experts]
    )


def test_uneven_load_by_hand():
    """Shares .75, .25; mean probabilities .65, .35: 2 (.4875 + .0875) = 1.15."""
    probs = [[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]]]
    np.testing.assert_allclose(switch_loss(probs, [[[0], [0], [0], [1]]]), [1.15], 1e-6)


def test_padding_is_excluded():
    """Two real tokens among four: shares 1/2, 1/2, whatever the padding says.

    E (.5 * .45 + .5 * .55) = 1, and a group of padding alone gives 0.
    """
    probs = [[[0.8, 0.2], [1e3, -1e3], [0.1, 0.9], [7.0, 7.0]]] * 2
    valid = np.array([[True, False, True, False], [False] * 4])
    got = switch_loss(probs, [[[0], [0], [1], [0]]] * 2, valid)
    np.testing.assert_allclose(got, [1.0, 0.0], rtol=1e-6)
    z = jax.jit(balance.z_loss)(jnp.asarray(probs, jnp.float32), jnp.asarray(valid))
    assert float(z[1]) == 0.0


def test_gradient_pushes_towards_the_underloaded():
    """d loss / d p_te = E * share_e / N: the gradient sees the counts as constants."""
    probs = jnp.array([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]]])
    load, valid = jnp.array([[3, 1]]), jnp.asarray(ALL)
    gradient = jax.grad(lambda p: balance.switch_loss(p, load, valid)[0])(probs)
    np.testing.assert_allclose(
        gradient, [[[2 * 0.75 / 4, 2 * 0.25 / 4]] * 4], rtol=1e-6
    )


def test_groups_are_independent():
    """Losses of a batch are the sums of the losses of its groups, one at a time."""
    moe = MoE(num_experts=4, top_k=2)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((12, 4)), jnp.float32)
    valid = jnp.asarray(rng.random(12) < 0.7)
    run = jitted_router(moe, 4)
    whole = run(logits, valid)
    parts = [run(logits[i : i + 4], valid[i : i + 4]) for i in (0, 4, 8)]
    for name in ("balance_loss", "z_loss", "load_E"):
        total = sum(np.asarray(getattr(part.stats, name)) for part in parts)
        np.testing.assert_allclose(getattr(whole.stats, name), total, rtol=1e-6)
    assert parts[0].stats.balance_loss != parts[1].stats.balance_loss


def test_z_loss_by_hand():
    """Mean of (log sum exp)^2 over real tokens: logits log 1, log 3 give (log 4)^2."""
    logits = jnp.log(jnp.array([[[1.0, 3.0], [0.5, 0.5], [5.0, 9.0]]]))
    valid = jnp.array([[True, True, False]])
    expected = (np.log(4.0) ** 2 + 0.0) / 2
    np.testing.assert_allclose(
        jax.jit(balance.z_loss)(logits, valid), [expected], rtol=1e-6
    )


def test_z_loss_does_not_overflow():
    """log-sum-exp of 1000 twice is 1000 + log 2."""
    z = jax.jit(balance.z_loss)(jnp.full((1, 1, 2), 1000.0), jnp.ones((1, 1), bool))
    np.testing.assert_allclose(z, [(1000 + np.log(2)) ** 2], rtol=1e-6)


def test_update_bias_by_hand():
    """b += gamma sign(mean - load): up below the mean, down above, no move at it."""
    load = jnp.array([[0, 10, 5, 5], [4, 4, 4, 4]])
    bias = jnp.array([[0.0, 0.0, 0.5, 0.0], [1.0, 2.0, 3.0, 4.0]])
    got = balance.update_bias(bias, load, 0.25)
    expected = [[0.25, -0.25, 0.5, 0.0], [1.0, 2.0, 3.0, 4.0]]
    np.testing.assert_array_equal(got, expected)


def test_bias_updates_even_out_the_load():
    """Feedback of the right sign: from 20 of 32 on one expert to 8 on each, about."""
    moe = MoE(num_experts=4, top_k=1, router="grouped_sigmoid")
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((32, 4)) * 0.5 + np.array([1.5, 0.5, -0.5, -1.5])
    router = Router(Model(width=4), moe, 32, rngs=nnx.Rngs(0))
    graph = nnx.split(router, nnx.Param, ...)[0]

    @jax.jit
    def step(bias_E):
        router = nnx.merge(graph, {"router_kernel": jnp.eye(4)}, {"bias": bias_E})
        routing = router(jnp.asarray(x_TD, jnp.float32), sequences(jnp.ones(32, bool)))
        load_LE = routing.stats.load_E[None]
        return balance.update_bias(bias_E[None], load_LE, 0.02)[0], routing

    bias_E, loads = jnp.zeros(4), []
    for _ in range(100):
        bias_E, routing = step(bias_E)
        loads.append(np.asarray(routing.stats.load_E))
    assert loads[0].max() >= 20
    # The step has a fixed size: loads swing around the mean for ever.
    np.testing.assert_allclose(np.mean(loads[50:], axis=0), [8] * 4, atol=3.0)
