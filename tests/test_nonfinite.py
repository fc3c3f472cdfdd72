# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite change nothing, and what was the first is named; spikes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import parts
from jaxmoe.nonfinite import SPIKE_LEAST, SPIKE_WINDOW, FirstNonFinite, SpikeRule
from jaxmoe.optim import updates_done
from tests import helpers

CONFIG = helpers.exacting_config()
DEEP = helpers.tiny_config(
    model={"num_layers": 6, "layer_pattern": "dense,moe", "norm_position": "post"}
)


def first_of(setup, state, metrics, batch):
    return FirstNonFinite(setup)(jax.device_get(metrics), 1, state, batch)


@pytest.mark.parametrize("config", [CONFIG, DEEP], ids=["pre-norm", "post-norm"])
def test_every_part_has_a_name_and_is_counted_alone(config):
    """One NaN in one layer of one parameter is counted in one part, whose name tells
    the parameter and the number of the layer in the model."""
    params = helpers.setup_of(config).abstract_params
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params)
    names = [name for _, name in parts.part_names(params, config.model)]
    assert len(set(names)) == len(names) == parts.nonfinite_parts(zeros).size
    router = zeros["moe"]["moe"]["router"]["router_kernel"]
    for row in range(len(router)):
        router[row, 3, 5] = np.nan
        bad = np.flatnonzero(np.asarray(parts.nonfinite_parts(zeros)))
        layer = 2 * row + 1
        assert [names[i] for i in bad] == [
            f"moe/router/router_kernel of layer {layer} (moe)"
        ]
        router[row, 3, 5] = 0
    zeros["embedder"]["token"][:] = np.inf
    counts = dict(zip(names, np.asarray(parts.nonfinite_parts(zeros)), strict=True))
    assert counts.pop("embedder/token") == zeros["embedder"]["token"].size
    assert not any(counts.values())


def test_parts_are_sorted_as_a_forward_pass_meets_them():
    """Embedding, layers from the first to the last, final norm; inside a layer the norm
    before attention, or after it."""
    for config, norm_first in ((CONFIG, True), (DEEP, False)):
        params = helpers.setup_of(config).abstract_params
        found = sorted(parts.part_names(params, config.model))
        names = [name for _, name in found]
        assert names[0].startswith("embedder/patch/patch_kernel")
        assert names[-1].startswith("final_norm/")
        layers = [n.split(" of layer ")[1] for n in names if " of layer " in n]
        assert layers == sorted(layers)
        at = lambda word, names=names: next(  # noqa: E731
            i for i, n in enumerate(names) if n.startswith(word) and "layer 1" in n
        )
        assert (at("attention_norm/") < at("attention/qkv_kernel")) == norm_first
        assert (at("ffn_norm/") < at("moe/router/")) == norm_first
        assert at("attention/qkv_kernel") < at("attention/out_kernel")
        assert at("moe/router/") < at("moe/experts/up") < at("moe/experts/down")


def test_shared_layers_have_one_name():
    config = helpers.tiny_config(
        model={"num_layers": 4, "layer_pattern": "moe", "share_layers": True}
    )
    params = helpers.setup_of(config).abstract_params
    names = [name for _, name in parts.part_names(params, config.model)]
    assert "moe/router/router_kernel of every layer (moe)" in names


@pytest.mark.parametrize("where", ["patches", "parameter"])
def test_a_step_that_is_not_finite_changes_nothing_but_its_number(where):
    """NaN in the input, or infinity in a parameter: parameters, optimizer and buffers
    stay bitwise as they were, and what was first is named."""
    setup, step = helpers.setup_of(CONFIG), helpers.step_of(CONFIG)
    state, batch = helpers.initial_state(CONFIG), dict(helpers.batches(CONFIG)[0])
    if where == "patches":
        batch["patches"] = np.full_like(batch["patches"], np.nan)
        want = "the patches of the batch in microbatch 0"
    else:
        kernel = np.array(state.params["moe"]["attention"]["out_kernel"])
        kernel[0, 1, 2, 3] = np.inf
        layout = setup.state_sharding.params["moe"]["attention"]["out_kernel"]
        state.params["moe"]["attention"]["out_kernel"] = jax.device_put(kernel, layout)
        want = "the parameter attention/out_kernel of layer 1 (moe)"
    before = helpers.host(state)
    after, metrics = step(state, batch)
    assert not math.isfinite(float(metrics.grad_norm))
    assert int(after.step) == 1
    assert updates_done(after.optimizer) == 0
    helpers.assert_same(dataclasses.replace(after, step=before.step), before)
    assert first_of(setup, after, metrics, batch) == want


@pytest.mark.slow
def test_the_first_activation_is_named():
    """Weights that are finite but overflow: in the output of the first layer, or in the
    router's logits of the second."""
    setup, step = helpers.setup_of(CONFIG), helpers.step_of(CONFIG)
    batch = helpers.batches(CONFIG)[0]
    for path, want in (
        (("dense", "mlp", "down"), "the output of layer 0 (dense)"),
        (
            ("moe", "moe", "router", "router_kernel"),
            "the router logits of layer 1 (moe)",
        ),
    ):
        state = helpers.initial_state(CONFIG)
        *path, last = path
        node = state.params
        for key in path:
            node = node[key]
        large = np.full(node[last].shape, 3e38, np.float32)
        large[..., ::2] *= -1
        node[last] = jax.device_put(large, node[last].sharding)
        state, metrics = step(state, batch)
        assert first_of(setup, state, metrics, batch) == f"{want} in microbatch 0"


@pytest.mark.slow
def test_a_pipeline_finds_it_too():
    """Two ranks: infinity in a router weight of the last layer."""
    config = helpers.tiny_config(pipeline={"microbatches": 4})
    setup = helpers.setup_of(config, 2, 1, 2)
    step = helpers.quickly(
        setup.train_step(), setup.abstract_state, setup.abstract_batch(), pipelined=True
    )
    state = jax.device_put(helpers._initial_state(config), setup.state_sharding)
    router = state.params["moe"]["moe"]["router"]
    kernel = np.array(router["router_kernel"])
    kernel[0, 0, 0] = np.nan
    router["router_kernel"] = jax.device_put(kernel, router["router_kernel"].sharding)
    before = helpers.host(state)
    batch = helpers.batches(config)[0]
    batch = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[2:]), batch)
    after, metrics = step(state, batch)
    helpers.assert_same(dataclasses.replace(after, step=before.step), before)
    name = "the parameter moe/router/router_kernel of layer 1 (moe)"
    assert first_of(setup, after, metrics, batch) == name


def test_a_state_that_is_not_finite_is_found_before_it_is_saved():
    setup, state = helpers.setup_of(CONFIG), helpers.initial_state(CONFIG)
    finite = FirstNonFinite(setup)
    assert finite.of_state(state) == ""
    bias = state.params["final_norm"]["bias"]
    state.params["final_norm"]["bias"] = bias.at[3].set(jnp.inf)
    assert finite.of_state(state) == "params/final_norm/bias"


def test_a_spike_is_far_above_the_median_of_the_window():
    """Noise and a falling loss are none; a jump of half the loss is one; a window that
    goes on elsewhere gives the same answers."""
    rng = np.random.default_rng(0)
    losses = 6 - 2 * np.linspace(0, 1, 500) + 0.05 * rng.standard_normal(500)
    rule = SpikeRule()
    assert [rule(loss) for loss in losses] == [None] * 500
    again = SpikeRule(list(rule.window))
    for either in (rule, again):
        median = either(float(losses[-1]) + 2)
        assert median == pytest.approx(np.median(losses[-SPIKE_WINDOW:]))
        assert either(float(losses[-1])) is None
    young = SpikeRule([5.0] * (SPIKE_LEAST - 1))
    assert young(50.0) is None, "too few losses to judge by"
    assert SpikeRule([5.0] * SPIKE_LEAST)(5.4) is None, "less than a tenth above"
    assert SpikeRule([5.0] * SPIKE_LEAST)(5.6) == 5.0
