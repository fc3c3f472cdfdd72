# SPDX-License-Identifier: Apache-2.0
"""Where the train step keeps its state, and what its compiled program communicates."""

import math
import re

import jax
import pytest

from tests import helpers
from tests.helpers import MESHES, tiny_config

EIGHT = [mesh for mesh in MESHES if mesh != (1, 1)]
OPTIMIZERS = {
    "adamw": tiny_config(),
    "adafactor": tiny_config(  # large enough for factored second moments
        model={"width": 256, "ffn_width": 512},
        optimizer={"name": "adafactor"},
    ),
}


def bytes_per_device(tree):
    """Bytes of the shards on each device, counted from the arrays themselves."""
    found = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def total_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mesh", EIGHT)
def test_masters_and_optimizer_state_are_split_over_all_devices(mesh):
    """ZeRO-1: on every device lie total / 8 bytes of the masters and of the optimizer
    state, within 5 %."""
    state = helpers.initial_state(tiny_config(), *mesh)
    for tree in (state.params, state.optimizer):
        share = total_bytes(tree) / 8
        for device, held in bytes_per_device(tree).items():
            assert held == pytest.approx(share, rel=0.05), device


def test_the_state_is_split_after_a_step_too():
    """The step gives the state back in the layout in which it took it, leaf by leaf."""
    config = helpers.exacting_config()
    state = helpers.initial_state(config)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    after, _ = helpers.step_of(config)(state, helpers.batches(config)[0])
    same = jax.tree.map(
        lambda old, leaf: leaf.sharding.is_equivalent_to(old, leaf.ndim), before, after
    )
    assert all(jax.tree.leaves(same))
    share = total_bytes(after.optimizer) / 8
    for held in bytes_per_device(after.optimizer).values():
        assert held == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("mesh", EIGHT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_layout_of_every_optimizer_splits_its_state(name, mesh):
    """The same claim from the layouts alone, for AdamW and for Adafactor, of which the
    state is much smaller than two copies of the parameters."""
    state = helpers.setup_of(OPTIMIZERS[name], *mesh).abstract_state
    leaves = jax.tree.leaves(state.optimizer)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
    )
    assert held == pytest.approx(total / 8, rel=0.05)
    params = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(state.params))
    assert (total > 1.9 * params) == (name == "adamw")


def collectives(text, name):
    """Elements of the result of every collective of this kind in a compiled program."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) {name}(-start)?\(", line)
        if match:
            shapes = re.findall(r"[a-z]+\d*\[([\d,]*)\]", match[1])
            found += [math.prod(int(n) for n in s.split(",") if n) for s in shapes]
    return found


def compiled_text(config, mesh):
    setup = helpers.setup_of(config, *mesh)
    batch = helpers.batches(config)[0]
    return setup.train_step().lower(setup.abstract_state, batch).compile().as_text()


def check_collectives(text, config, mesh):
    """Every gradient goes through a reduce-scatter: their results together are an
    eighth of all parameters. What is all-reduced are sums and counts, no array above
    100 elements. The weights are gathered once. Tokens are exchanged if experts are
    split."""
    params = helpers.setup_of(config, *mesh).abstract_params
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    experts = sum(math.prod(leaf.shape) for leaf in expert_leaves(params))
    scattered = sum(collectives(text, "reduce-scatter"))
    gathered = sum(collectives(text, "all-gather"))
    if mesh == (1, 8):  # experts lie on one device each: nothing to sum or gather
        assert scattered == (total - experts) // 8
        assert gathered == total - experts
    else:
        assert scattered == total // 8
        assert gathered == total - experts + experts // mesh[1]
    assert max(collectives(text, "all-reduce")) <= 100
    assert bool(collectives(text, "all-to-all")) == (mesh[1] > 1)


@pytest.mark.parametrize(("data", "expert", "microbatches"), [(8, 1, 1), (2, 4, 4)])
def test_gradients_reach_the_masters_by_reduce_scatter(data, expert, microbatches):
    """The claim of `check_collectives`, without and with accumulation."""
    config = helpers.exacting_config()
    config = helpers.changed(config, train={"accumulation": microbatches})
    text = helpers.step_of(config, data, expert).as_text()
    check_collectives(text, config, (data, expert))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EIGHT)
def test_gradients_reach_the_masters_by_reduce_scatter_as_compiled_for_a_run(mesh):
    """The same with the compiler options of a run, on every mesh."""
    config = tiny_config()
    check_collectives(compiled_text(config, mesh), config, mesh)


def expert_leaves(params):
    return jax.tree.leaves(params["moe"]["moe"]["experts"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"train": {"accumulation": 4}},
        {"optimizer": {"name": "adafactor"}},
        {"model": {"compute_dtype": "bfloat16"}},
        {"model": {"remat": "full"}},
    ],
)
def test_no_option_brings_the_all_reduce_back(change):
    """The same with accumulation, Adafactor, bfloat16 and remat."""
    config = tiny_config(**change)
    check_collectives(compiled_text(config, (4, 2)), config, (4, 2))
