# SPDX-License-Identifier: Apache-2.0
"""Starting from the weights of another run; Pseudo-to-Real's delink.

Legend: L layers of a kind.
"""

import re

import jax
import numpy as np
import pytest

from jaxmoe import cli, tree_names
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import ConfigError
from jaxmoe.warm_start import load_weights
from tests import helpers
from tests.helpers import tiny_config
from tests.oracle import assert_close

SHARED = tiny_config(
    model={"layer_pattern": "moe", "share_layers": True},
    moe={"router": "grouped_sigmoid", "bias_update_rate": 0.01},
)
REAL = helpers.changed(SHARED, model={"share_layers": False})


def save(config, folder):
    """Saves a state of `config` as a run would at step 7, with all numbers moved from
    their initial values; returns it, on the host."""
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: np.asarray(
            leaf + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype
        ),
        helpers.host(helpers.initial_state(config, 1, 1)),
    )
    with Checkpointer(folder / "checkpoints") as checkpoints:
        layout = helpers.setup_of(config, 4, 2).state_sharding
        checkpoints.save(7, jax.device_put(state, layout))
    return state


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """(folder, state) of a run of SHARED."""
    folder = tmp_path_factory.mktemp("shared")
    return str(folder), save(SHARED, folder)


def abstract(config, data=4, expert=2):
    return helpers.setup_of(config, data, expert).abstract_state


def test_weights_alone_are_loaded(shared_run):
    """The same model gets bitwise the same parameters and buffers, in the layout asked
    for, on another mesh too; nothing of the optimizer or of the step."""
    folder, saved = shared_run
    for mesh in ((4, 2), (1, 8), (1, 1)):
        own = abstract(SHARED, *mesh)
        weights = load_weights(folder, own)
        assert set(weights) == {"params", "buffers"}
        helpers.assert_same(weights["params"], saved.params)
        helpers.assert_same(weights["buffers"], saved.buffers)
        layouts = jax.tree.map(
            lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim),
            weights["params"],
            own.params,
        )
        assert all(jax.tree.leaves(layouts))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(saved.buffers))


def test_delink_copies_the_shared_weights_to_every_layer(shared_run):
    """w[l] = shared w for every layer l, bitwise, router biases included; what no layer
    shares is loaded as it is. The master layout is that of the new model."""
    folder, saved = shared_run
    own = abstract(REAL)
    weights = load_weights(folder, own)
    before = tree_names.named_leaves({"params": saved.params, "buffers": saved.buffers})
    stacked = 0
    for name, leaf in tree_names.named_leaves(weights).items():
        old = before[name]
        layered = name.split("/")[1] == "moe"
        stacked += layered
        want = np.broadcast_to(old, (2, *old.shape[1:])) if layered else old
        helpers.assert_same({name: leaf}, {name: want})
    assert stacked > 10
    same = jax.tree.map(
        lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim),
        weights["params"],
        own.params,
    )
    assert all(jax.tree.leaves(same))


def test_the_first_loss_is_that_of_the_shared_run_evaluated(shared_run):
    """loss(delinked, batch) = loss(shared state, batch): the function is unchanged, and
    the layers' gradients add up to the shared one's."""
    folder, saved = shared_run
    batch = helpers.batches(SHARED)[0]
    want, before = helpers.gradients_of(SHARED, 4, 2)(
        *jax.device_put((saved.params, saved.buffers), layouts(SHARED)), batch
    )
    weights = load_weights(folder, abstract(REAL))
    got, after = helpers.gradients_of(REAL, 4, 2)(
        weights["params"], weights["buffers"], batch
    )
    assert helpers.loss_of(after) == pytest.approx(helpers.loss_of(before), rel=1e-6)
    assert_close(after.stats, before.stats, relative=1e-6)
    summed = {
        name: np.sum(leaf, 0, keepdims=True) if name.split("/")[0] == "moe" else leaf
        for name, leaf in tree_names.named_leaves(helpers.host(got)).items()
    }
    assert_close(summed, tree_names.named_leaves(helpers.host(want)))


def layouts(config):
    state = helpers.setup_of(config, 4, 2).state_sharding
    return state.params, state.buffers


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            {"model": {"ffn_width": 64}},
            ("params/moe/moe/experts/up: saved float32[1, 8, 16, 32]",),
        ),
        ({"model": {"use_bias": False}}, ("params/final_norm/bias",)),
        (
            {"model": {"tie_embeddings": False}},
            ("params/head: saved absent, now float32[264, 16]",),
        ),
        (
            {"moe": {"num_experts": 16}},
            ("router_kernel: saved float32[1, 16, 8], now float32[2, 16, 16]",),
        ),
    ],
)
def test_what_does_not_fit_is_named(shared_run, change, names):
    """A model of another shape is refused with every array that differs; nothing is
    cut, filled, or left at random."""
    folder, _ = shared_run
    with pytest.raises(ConfigError) as error:
        load_weights(folder, abstract(helpers.changed(REAL, **change)))
    for name in names:
        assert name in str(error.value)


def test_several_layers_do_not_become_shared_ones(tmp_path):
    """There is no way back from own weights per layer to shared ones."""
    save(REAL, tmp_path)
    with pytest.raises(ConfigError, match=re.escape("saved float32[2, 8, 16, 32]")):
        load_weights(str(tmp_path), abstract(SHARED))


@pytest.mark.slow
def test_pseudo_to_real_as_two_runs(tmp_path):
    """A run with shared layers, then one without that starts from it: its first loss is
    the shared run's last state evaluated on that batch; then its layers part."""
    shared = helpers.changed(helpers.run_config(), model={"num_layers": 4})
    real = helpers.changed(shared, train={"init_from": str(tmp_path / "shared")})
    shared = helpers.changed(shared, model={"share_layers": True})
    for name, config in (("shared", shared), ("real", real)):
        command = ["train", f"--workdir={tmp_path / name}"]
        assert cli.main([*command, *helpers.arguments(config)]) == 0
    weights = load_weights(str(tmp_path / "shared"), abstract(shared))
    _, metrics = helpers.gradients_of(shared, 4, 2)(
        weights["params"], weights["buffers"], helpers.batches(shared)[0]
    )
    lines = helpers.metrics_of(tmp_path / "real")
    assert lines[0]["loss"] == pytest.approx(helpers.loss_of(metrics), rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"]
    last = load_weights(str(tmp_path / "real"), abstract(real))
    up = np.asarray(last["params"]["moe"]["moe"]["experts"]["up"])
    assert up.shape[0] == 4
    assert np.abs(up[0] - up[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_a_folder_without_a_checkpoint(tmp_path, name):
    """The message names the folder; nothing is created in it."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint") as error:
        load_weights(str(tmp_path / name), abstract(SHARED))
    assert str(tmp_path / name) in str(error.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
