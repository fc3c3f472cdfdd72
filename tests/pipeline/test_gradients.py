# SPDX-License-Identifier: Apache-2.0
"""A step through a pipeline equals the step without one.

The claim, for every schedule and mesh: on the same weights and the same sequences, the
losses, the routers' losses, the counts and every leaf of the gradient are equal within
1e-5 of the leaf's largest number, in float32. (Key biases are left out where there are
some: their true gradient is 0, what is there is rounding.)
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.data.loader import Loader
from jaxmoe.pipeline.schedule import SCHEDULES
from jaxmoe.train_step import Setup
from tests import helpers, oracle
from tests.helpers import changed, tiny_config

# Balance losses, drops and the z-loss, all tasks: whatever could depend on the cut.
CONFIG = tiny_config(
    model={"num_layers": 4},
    moe={
        "capacity_factor": 1.25,
        "balance_loss": 0.05,
        "sequence_balance_loss": 0.02,
        "z_loss": 0.01,
    },
)
DEEP = changed(CONFIG, model={"num_layers": 16, "layer_pattern": "dense*3,moe"})
UNEVEN = changed(CONFIG, model={"num_layers": 7, "layer_pattern": "moe"})
BY_KIND = changed(CONFIG, model={"layer_pattern": "dense*2,moe*2"})
FEW = changed(CONFIG, model={"num_layers": 6, "layer_pattern": "dense*2,moe"})


def with_schedule(config, name, **more):
    return changed(config, pipeline={"schedule": name, **more})


def results(setup: Setup, *, seed_config=None):
    """(gradients, metrics) of the first step from the initial weights."""
    config = setup.config
    state = helpers._initial_state(seed_config or config)
    loader = Loader(config.data, model=config.model, microbatches=setup.microbatches)
    batch = next(loader)
    loader.close()
    layout = setup.state_sharding
    shardings = layout.params, layout.buffers, setup.batch_sharding

    def gradients(params, buffers, batch):
        return setup.loss_and_gradients(
            params, buffers, setup.numbered(batch, jnp.int32(0))
        )

    arguments = jax.device_put((state.params, state.buffers, batch), shardings)
    compiled = helpers.quickly(
        jax.jit(gradients, in_shardings=shardings),
        *arguments,
        pipelined=setup.pipelined is not None,
    )
    return without_key_biases(helpers.host(compiled(*arguments)))


def without_key_biases(found):
    gradients, metrics = found
    for stack in ("dense", "moe"):
        attention = gradients.get(stack, {}).get("attention", {})
        if "qkv_bias" in attention:
            attention["qkv_bias"] = attention["qkv_bias"].copy()
            attention["qkv_bias"][:, 1] = 0.0
    return gradients, metrics


@functools.lru_cache
def plain(config):
    """The same without a pipeline, on one device."""
    config = dataclasses.replace(config, pipeline=type(config.pipeline)())
    return results(helpers.setup_of(config, 1, 1))


def check(config, mesh, **attributes):
    setup = Setup(config, helpers.mesh_of(*mesh), 264)
    for name, value in attributes.items():
        setattr(setup.pipelined, name, value)
    got = results(setup)
    want = plain(config)
    if want[1].stats is not None:
        np.testing.assert_array_equal(got[1].stats.load_E, want[1].stats.load_E)
        np.testing.assert_array_equal(got[1].stats.dropped, want[1].stats.dropped)
    oracle.assert_close(got, want)
    return setup


FEW_CASES = [
    ("gpipe", (1, 1, 2)),
    ("dualpipe", (2, 2, 2)),
    pytest.param("1f1b", (2, 2, 2), marks=pytest.mark.slow),
    pytest.param("dualpipev", (1, 2, 2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh"), FEW_CASES)
def test_equals_the_plain_step(name, mesh):
    check(with_schedule(CONFIG, name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 2, 2), (1, 2, 4), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_sixteen_layers_equal_the_plain_step(name, mesh):
    check(with_schedule(DEEP, name), mesh)


@pytest.mark.slow
def test_without_w_in_the_same_tick():
    """zb_h1 defers every W it can: three slots wait, and the numbers stay."""
    setup = check(with_schedule(CONFIG, "zb_h1"), (1, 1, 4))
    assert setup.pipelined.table.slots.deferred > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "mesh"),
    [
        pytest.param(CONFIG, "dualpipev", (1, 1, 4), id="a V with empty stages"),
        pytest.param(BY_KIND, "dualpipe", (1, 2, 2), id="a stage of one kind"),
    ],
)
def test_directions_without_layers_of_a_kind(config, name, mesh):
    """A direction may have no layer at all, or none with experts."""
    check(with_schedule(config, name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name"),
    [(UNEVEN, "dualpipe"), (UNEVEN, "zb_h1"), (FEW, "dualpipev")],
    ids=["7 on 4, dualpipe", "7 on 4, zb_h1", "6 on 8, dualpipev"],
)
def test_uneven_layers(config, name):
    """7 layers on 4 ranks; 6 on the 8 stages of a V, two of them empty.

    Kinds differ between stages. Every layer runs: each has its gradient.
    """
    check(with_schedule(config, name), (1, 2, 4))


@pytest.mark.parametrize("fill", [np.nan])
def test_bubbles_hold_nothing_that_counts(fill):
    """Buffers and idle results full of NaN change no loss, count or gradient."""
    check(with_schedule(CONFIG, "dualpipe"), (1, 2, 2), fill=fill)


@pytest.mark.parametrize(
    "name", ["dualpipe", pytest.param("zb_h1", marks=pytest.mark.slow)]
)
def test_steps_may_be_chosen_by_a_switch(name):
    """As on TPU and GPU, also with NaN wherever nothing was made."""
    check(with_schedule(CONFIG, name), (1, 1, 4), loops=False, fill=np.nan)


def test_taking_turns_changes_no_number():
    """The order that `alternating` gives to forward and backward is only an order."""
    alternating = with_schedule(CONFIG, "dualpipe", order="alternating")
    check(alternating, (1, 2, 2), loops=False)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["exchange", "full", "dots"])
def test_with_recomputation(remat):
    check(with_schedule(changed(CONFIG, model={"remat": remat}), "dualpipe"), (1, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dualpipe", "zb_h1"])
def test_backwards_that_are_not_split(name):
    """Nothing waits for a W, and the numbers are the same."""
    setup = check(with_schedule(CONFIG, name, split_backward=False), (1, 1, 4))
    assert setup.pipelined.table.slots.deferred == 0


def test_of_a_layer_only_its_input_may_be_kept():
    """With remat 'exchange' and whole backwards, what waits is no larger than an input
    per layer."""

    def waiting(**model):
        config = changed(CONFIG, model={"layer_pattern": "moe", **model})
        config = with_schedule(config, "dualpipe", split_backward=False)
        setup = Setup(config, helpers.mesh_of(1, 2, 2), 264)
        setup.traced_step()
        (_, programs), *_ = setup.pipelined.traced.stages
        assert programs.saved
        return sum(math.prod(shape.shape) for shape in programs.saved)

    of_inputs = 2 * math.prod(
        (CONFIG.data.batch_size // 8, CONFIG.model.sequence_length, CONFIG.model.width)
    )
    assert waiting(remat="exchange") == of_inputs < waiting(remat="full")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train": {"accumulation": 2}}, id="accumulation"),
        pytest.param(
            {"pipeline": {"schedule": "1f1b", "microbatches": 8}}, id="8 microbatches"
        ),
        pytest.param(
            {"model": {"tie_embeddings": False, "share_layers": True}},
            id="shared layers, a head of its own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"moe": {"router": "balanced", "capacity_factor": None}},
            id="balanced",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"moe": {"input_jitter": 0.1}}, id="jitter", marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "moe": {
                    "router": "grouped_sigmoid",
                    "num_groups": 2,
                    "num_shared_experts": 1,
                }
            },
            id="router bias, shared expert",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model": {"layer_pattern": "dense"}}, id="dense", marks=pytest.mark.slow
        ),
    ],
)
def test_other_configurations(changes):
    """Accumulation around the pipeline, more microbatches, shared layers, routers."""
    check(
        changed(CONFIG, **{"pipeline": {"schedule": "dualpipe"}, **changes}), (2, 1, 2)
    )
