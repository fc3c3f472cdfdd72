# SPDX-License-Identifier: Apache-2.0
"""Runs with a balancer: resumed under the same and under another placement."""

import dataclasses
import json

import numpy as np
import pytest

from jaxmoe import gin_config
from jaxmoe.config import Balancer, ConfigError
from jaxmoe.config_checks import check
from jaxmoe.trainer import Trainer, evaluate_run
from tests import helpers

CONFIG = helpers.changed(
    helpers.run_config(),
    moe={"num_experts": 8, "balance_loss": 0.0},
    mesh={"data": 2, "expert": 4, "pipe": 1},
    balancer={"interval": 5, "num_replicas": 12, "threshold": 1.0},
)


def train(config, folder):
    trainer = Trainer(config, folder, gin_config.to_gin(config, {}))
    trainer.run()
    return trainer


def losses(folder):
    return {row["step"]: row["loss"] for row in helpers.metrics_of(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced") / "run"
    trainer = train(CONFIG, folder)
    assert trainer.rebalancer._rebalance._cache_size() == 1
    return folder


@pytest.mark.slow
def test_a_run_logs_what_it_rebalances(whole):
    rows = helpers.metrics_of(whole)
    assert [row["rebalance_step"] for row in rows if "rebalance_step" in row] == [
        5,
        10,
        15,
        20,
    ]
    assert all(row["device_load_max_over_mean"] >= 1 for row in rows)
    assert all(len(row["device_load"][0]) == 4 for row in rows)
    assert any(row.get("rebalance_copies") for row in rows)
    assert (whole / "plots" / "device_load.png").is_file()


@pytest.mark.slow
def test_the_losses_are_those_without_a_balancer(whole, tmp_path):
    train(helpers.changed(CONFIG, balancer=vars(Balancer())), tmp_path / "run")
    want = losses(tmp_path / "run")
    got = losses(whole)
    assert want.keys() == got.keys()
    np.testing.assert_allclose([*got.values()], [*want.values()], atol=1e-5)


OTHERS = [
    pytest.param({}, 0.0, id="the same"),
    pytest.param({"mesh": {"data": 4, "expert": 2}}, 1e-5, id="expert 2"),
    pytest.param({"balancer": {"num_replicas": 16}}, 1e-5, id="other spares"),
    pytest.param({"balancer": {"interval": 0}}, 1e-5, id="off"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "within"), OTHERS)
def test_resumes_under_any_placement(whole, tmp_path, changes, within):
    """From step 20, right after a rebalance; bitwise under the same placement."""
    run = helpers.rewound(whole, tmp_path / "again")
    config = helpers.changed(CONFIG, **changes)
    train(config, run)
    np.testing.assert_allclose(losses(run)[21], losses(whole)[21], rtol=0, atol=within)


@pytest.mark.slow
def test_a_balancer_begins_in_a_run_without(whole, tmp_path):
    off = helpers.changed(CONFIG, balancer=vars(Balancer()))
    train(off, tmp_path / "run")
    run = helpers.rewound(tmp_path / "run", tmp_path / "again")
    train(CONFIG, run)
    np.testing.assert_allclose(losses(run)[21], losses(whole)[21], atol=1e-5)


@pytest.mark.slow
def test_a_run_is_evaluated_in_logical_order(whole):
    summary = json.loads((whole / "summary.json").read_text())
    figures = evaluate_run(CONFIG, whole)
    assert figures["eval_loss_lm"] == pytest.approx(summary["eval_loss_lm"], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_replicas": 10}, ["Balancer.num_replicas=10", "Mesh.expert=4", "12"]),
        ({"num_replicas": 6}, ["Balancer.num_replicas=6", "8 experts"]),
        ({"nodes": 3}, ["Balancer.nodes=3", "Mesh.expert=4"]),
    ],
)
def test_sizes_that_do_not_fit_are_told(changes, words):
    with pytest.raises(ConfigError) as mistake:
        check(helpers.changed(CONFIG, balancer=changes))
    assert all(word in str(mistake.value) for word in words), mistake.value


def test_a_balancer_without_experts_is_told():
    model = dataclasses.replace(CONFIG.model, layer_pattern="dense")
    with pytest.raises(ConfigError, match=r"Balancer\.interval=5"):
        check(dataclasses.replace(CONFIG, model=model))
