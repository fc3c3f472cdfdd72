# SPDX-License-Identifier: Apache-2.0
"""A rebalance between two steps: what it leaves as it was, bit for bit or nearly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import model as model_lib
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.rebalance import Rebalancer
from jaxmoe.train_step import BATCH_SPEC
from tests import helpers
from tests.helpers import changed, tiny_config

OFF = tiny_config(moe={"num_experts": 8})
ON = changed(
    OFF,
    balancer={
        "interval": 1,
        "num_replicas": 12,
        "threshold": 1.0,
        "policy": "reference",  # of all policies it moves most
    },
)


def unevenly_loaded(setup, state, seed):
    """The state as if its experts had had very different loads."""
    placement = model_lib.placement_of(state.buffers)
    random = np.random.default_rng(seed)
    load_LE = random.lognormal(sigma=1.5, size=placement["load"].shape)
    placement = {**placement, "load": load_LE.astype(np.float32)}
    buffers = model_lib.with_placement(state.buffers, placement)
    layout = setup.state_sharding.buffers
    return dataclasses.replace(state, buffers=jax.device_put(buffers, layout))


def slots_of(state):
    return np.asarray(model_lib.placement_of(state.buffers)["slots"])


def forward_of(setup, state, batch):
    """The compiled (params, buffers, batch) -> logits of the one microbatch."""

    def logits(params, buffers, batch):
        batch = {name: x[0] for name, x in batch.items()}
        weights = setup.weights(params, buffers)
        return setup.network(weights, buffers, batch, setup.axis)[0]

    spec = jax.sharding.PartitionSpec(BATCH_AXES)
    forward = jax.jit(setup.per_device(logits, BATCH_SPEC, spec))
    return helpers.quickly(forward, state.params, state.buffers, batch)


@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(12, id="4 spare"),
        pytest.param(8, id="no spare", marks=pytest.mark.slow),
    ],
)
def test_three_rebalances_change_no_logit(replicas):
    """The same batch before and after each, with a training step between them.

    One program of the step and one of the rebalance take the state of every placement.
    """
    config = changed(ON, balancer={"num_replicas": replicas})
    setup = helpers.setup_of(config, 2, 4)
    state = helpers.initial_state(config, 2, 4)
    batch = setup.put_batch(helpers.batches(config)[0])
    step, forward = helpers.step_of(config, 2, 4), forward_of(setup, state, batch)
    rebalancer = Rebalancer(setup)
    with helpers.compilations() as compiled:
        for seed in range(3):
            state, _ = step(state, batch)
            state = unevenly_loaded(setup, state, seed)
            old_LP = slots_of(state)
            want = np.asarray(forward(state.params, state.buffers, batch))
            state, report = rebalancer(state)
            assert (slots_of(state) != old_LP).any(axis=1).all()
            assert int(report.owners) > 0
            got = np.asarray(forward(state.params, state.buffers, batch))
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert np.ptp(want) > 1
    assert compiled == ["jit(step)"]  # that of the rebalancer


def experts_by_number(state):
    """Masters of the experts by name, [L, E, ...], expert e in place e."""
    order_LE = np.argsort(model_lib.placement_of(state.buffers)["rows"], axis=1)
    layer_L1 = np.arange(len(order_LE))[:, None]
    experts = helpers.host(state.params["moe"]["moe"]["experts"])
    return {name: rows[layer_L1, order_LE] for name, rows in experts.items()}


@pytest.mark.slow
def test_a_rebalance_rounds_nothing_where_steps_are_in_bfloat16():
    """Masters that move are the same float32 bits, and losses are those without a
    balancer within 0.001 nats: a share of 2e-4, where bfloat16 keeps 4e-3."""
    off = changed(OFF, model={"compute_dtype": "bfloat16"})
    want = helpers.losses_of(off, 2, 4, 6)
    config = changed(off, balancer=vars(ON.balancer))
    setup = helpers.setup_of(config, 2, 4)
    rebalancer = Rebalancer(setup)
    state, step = helpers.initial_state(config, 2, 4), helpers.step_of(config, 2, 4)
    losses = []
    for seed, batch in enumerate(helpers.batches(config, 6)):
        state, metrics = step(state, batch)
        losses.append(helpers.loss_of(metrics))
        before = experts_by_number(state)
        state, report = rebalancer(unevenly_loaded(setup, state, seed))
        assert int(report.owners) > 0
        helpers.assert_same(experts_by_number(state), before)
    for name, masters in before.items():
        assert masters.dtype == np.float32
        assert (masters != masters.astype(jnp.bfloat16)).any(), name
    np.testing.assert_allclose(losses, want, rtol=0, atol=0.001)
