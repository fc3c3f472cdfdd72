# SPDX-License-Identifier: Apache-2.0
"""Reading and continuing gives the logits of the model applied to whole sequences.

Legend: B sequences, S positions, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.data.tasks import TASKS
from jaxmoe.decode import Decoder
from jaxmoe.mesh import BATCH_AXES
from tests import helpers
from tests.helpers import tiny_config

ROUTERS = {
    "top_k": {"capacity_factor": 0.5},  # in training half of the tokens are dropped
    "prototype": {"router": "prototype", "group_tokens": 8},
    "grouped_sigmoid": {
        "router": "grouped_sigmoid",
        "num_groups": 2,
        "num_shared_experts": 1,
    },
    "balanced": {"router": "balanced", "group_tokens": 80},
}
FIRST = 3  # tokens of decoder text that are read; the others are written one by one


def config_of(router="top_k", balancer=None, **model):
    return tiny_config(
        model={"init_std": 0.4, **model}, moe=ROUTERS[router], balancer=balancer or {}
    )


def programs(config, data, expert):
    """(whole, stepwise): from params, buffers and a batch [B, ...] to logits [B, S, V];
    those of the second are 0 but at positions from the last one read on."""
    setup = helpers.setup_of(config, data, expert).for_inference()
    spec = P(BATCH_AXES)

    def whole(params, buffers, batch):
        weights = setup.weights(params, buffers)
        return setup.network(weights, buffers, batch, setup.axis)[0]

    def stepwise(params, buffers, batch):
        weights = setup.weights(params, buffers)
        decoder = Decoder(setup.network, weights, buffers, setup.axis)
        length_B = jnp.sum(batch["modality"] != 0, axis=1)
        encoder_B = length_B - jnp.sum(batch["decoder"], axis=1)
        place_B = jnp.minimum(encoder_B + FIRST, length_B) - 1
        given = jnp.arange(batch["tokens"].shape[1])[None] <= place_B[:, None]
        # Nothing of what comes later is there to be read.
        prompt = {
            name: jnp.where(given, batch[name], 0)
            for name in ("tokens", "modality", "sequence", "positions")
        }
        prompt["decoder"] = batch["decoder"] & given
        prompt |= {"patches": batch["patches"], "number": batch["number"]}
        logits_BV, memories = decoder.read(prompt, place_B)
        B, S = batch["tokens"].shape
        row_B = jnp.arange(B)
        out_BSV = jnp.zeros((B, S, logits_BV.shape[1]))
        out_BSV = out_BSV.at[row_B, place_B].set(logits_BV)

        def step(_, carry):
            memories, place_B, out_BSV = carry
            place_B = place_B + 1
            token_B = batch["tokens"][row_B, jnp.minimum(place_B, S - 1)]
            logits_BV, memories = decoder.step(
                memories,
                token_B,
                place_B,
                valid_B=place_B < length_B,
                number_B=batch["number"],
            )
            where = jnp.where(place_B < length_B, place_B, S)
            out_BSV = out_BSV.at[row_B, where].set(logits_BV, mode="drop")
            return memories, place_B, out_BSV

        return jax.lax.fori_loop(0, S - 1, step, (memories, place_B, out_BSV))[2]

    return [jax.jit(setup.per_device(f, spec, spec)) for f in (whole, stepwise)]


@functools.lru_cache
def logits_of(config, data, expert):
    """(batch, whole, stepwise) for a training batch of all tasks."""
    setup = helpers.setup_of(config, data, expert)
    state = helpers.initial_state(config, data, expert)
    batch = {name: array[0] for name, array in helpers.batches(config)[0].items()}
    batch = shortened(batch) | {"number": np.arange(len(batch["tokens"]))}
    put = jax.device_put(batch, NamedSharding(setup.mesh, P(BATCH_AXES)))
    found = [
        helpers.quickly(f, state.params, state.buffers, put)(
            state.params, state.buffers, put
        )
        for f in programs(config, data, expert)
    ]
    return batch, *helpers.host(found)


def shortened(batch):
    """Sequences of every length: row r loses its last r positions, if so many."""
    length = (batch["modality"] != 0).sum(1)
    rows = np.arange(len(length))
    kept = np.arange(batch["tokens"].shape[1]) < np.maximum(length - rows, 9)[:, None]
    names = ("tokens", "modality", "decoder", "sequence", "positions", "targets")
    return batch | {name: batch[name] * kept for name in names}


def written(batch):
    """bool [B, S]: positions from the last one read to the last one there is."""
    length = (batch["modality"] != 0).sum(1)
    first = np.minimum(length - batch["decoder"].sum(1) + FIRST, length) - 1
    where = np.arange(batch["tokens"].shape[1])[None]
    return (where >= first[:, None]) & (where < length[:, None])


def assert_equal(batch, whole, stepwise, task=None, tolerance=2e-5):
    """Equal where logits are written."""
    where, length = written(batch), (batch["modality"] != 0).sum(1)
    if task is not None:
        where &= (batch["task"].max(1) == 1 + TASKS.index(task))[:, None]
        assert len(set(length[where.any(1)])) > 1, "one length: a weak case"
    assert where.sum() > 10
    assert np.abs(whole[where]).max() > 1, "small logits: a weak case"
    np.testing.assert_allclose(
        stepwise[where], whole[where], rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("task", TASKS)
def test_logits_are_those_of_the_whole_sequence(task):
    """For every task, and sequences of many lengths in one batch, padded and full:
    logits(x_0 .. x_n) of the whole model = logits after reading and stepping, at every
    n; on 8 devices, with experts, none of whose tokens is dropped."""
    assert_equal(*logits_of(config_of(), 4, 2), task)


def test_a_prefix_is_never_told_what_follows():
    """The case is no proof if reading could see behind the prompt: with other tokens
    there, the whole model's logits differ, so those of a leak would."""
    batch, whole, stepwise = logits_of(config_of(), 4, 2)
    rows = np.arange(len(whole))
    length = (batch["modality"] != 0).sum(1)
    assert (
        (np.abs(whole[rows, length - 1] - whole[rows, length - 2]) > 0.1).any(1).all()
    )
    assert not stepwise[rows, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(router):
    """The same with every router, whatever the routing groups and the capacity are in
    training; and with experts over 1 and over 8 devices."""
    assert_equal(
        *logits_of(config_of(router), *((1, 8) if router != "top_k" else (1, 1)))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"norm_position": "post", "norm": "rms", "activation": "swiglu"},
        {"num_layers": 4, "share_layers": True, "use_bias": False},
        {"remat": "full", "tie_embeddings": False, "layer_pattern": "moe"},
    ],
)
def test_every_kind_of_model(model):
    assert_equal(*logits_of(config_of(**model), 2, 4))


@pytest.mark.slow
def test_copies_of_experts():
    """With 16 slots for 8 experts, as a run with a balancer has them in training."""
    placed = config_of(balancer={"interval": 5, "num_replicas": 16})
    got = logits_of(placed, 2, 4)
    assert_equal(*got)
    np.testing.assert_allclose(got[1], logits_of(config_of(), 4, 2)[1], atol=2e-5)


@pytest.mark.slow
def test_in_bfloat16():
    """Stepwise logits are as near those of the whole model as bfloat16 is to float32:
    both round, and neither may do it more."""
    batch, whole, stepwise = logits_of(config_of(compute_dtype="bfloat16"), 4, 2)
    exact = logits_of(config_of(), 4, 2)[1]
    where = written(batch)
    rounding = np.abs(whole[where] - exact[where])
    apart = np.abs(stepwise[where] - whole[where])
    assert rounding.mean() > 1e-3, "nothing was rounded: a weak case"
    assert apart.mean() < 1.5 * rounding.mean()
    assert np.abs(stepwise[where] - exact[where]).mean() < 1.5 * rounding.mean()
    assert (stepwise[where].argmax(1) == whole[where].argmax(1)).mean() > 0.9
