# SPDX-License-Identifier: Apache-2.0
"""What is told, and what refused, when a run goes on with another configuration."""

import pytest

from jaxmoe import gin_config
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config_changes import COURSE, DATA, MODEL, NO_EFFECT, SAFE, changes
from jaxmoe.config_changes import refuse_another_model as refuse
from jaxmoe.config_values import FIELDS
from jaxmoe.data.loader import Loader
from tests import helpers

CONFIG = helpers.run_config()


def between(*bindings):
    texts = [gin_config.to_gin(gin_config.load((), b).config) for b in ((), bindings)]
    return changes(*texts)


def test_every_field_that_differs_is_named_with_both_values():
    found = between("MoE.num_experts=16", "Optimizer.name='sgd'")
    assert list(map(str, found)) == [
        "MoE.num_experts was 8 and is 16",
        "Optimizer.name was 'adamw' and is 'sgd'",
    ]
    assert between() == []


@pytest.mark.parametrize(
    ("binding", "consequence"),
    [
        ("Mesh.data=2", SAFE),
        ("Pipeline.schedule='gpipe'", SAFE),
        ("Checkpoint.keep=9", SAFE),
        ("Train.log_every=7", SAFE),
        ("Train.seed=5", NO_EFFECT),
        ("Train.steps=9", COURSE),
        ("Optimizer.learning_rate=0.5", COURSE),
        ("MoE.capacity_factor=1.25", COURSE),
        ("Data.seed=3", DATA),
        ("Data.num_threads=3", SAFE),
        ("Model.norm_position='post'", MODEL),
        ("MoE.top_k=1", MODEL),
    ],
)
def test_what_a_change_means(binding, consequence):
    (change,) = between(binding)
    assert change.consequence == consequence
    if consequence != MODEL:
        refuse(3, [change])


def test_every_field_has_a_consequence_on_purpose():
    """A section that is new must be put into the table."""
    from jaxmoe import config_changes

    assert {name.partition(".")[0] for name in FIELDS} == set(config_changes._SECTIONS)
    assert set(config_changes._FIELDS) <= set(FIELDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of which there is the first state alone, as if it was saved at step 0."""
    folder = tmp_path_factory.mktemp("changes") / "run"
    loader = Loader(CONFIG.data, model=CONFIG.model, microbatches=1)
    with Checkpointer(folder / "checkpoints") as checkpoints:
        state = helpers.initial_state(CONFIG, 4, 2)
        notes = {"data": loader.state()}
        checkpoints.save(0, state, notes, gin_config.to_gin(CONFIG))
    loader.close()
    return folder


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"moe": {"num_experts": 16}}, ["MoE.num_experts was 8 and is 16", "arrays"]),
        (
            {"optimizer": {"name": "sgd"}},
            ["Optimizer.name was 'adamw' and is 'sgd'", "optimizer/0/mu"],
        ),
        ({"data": {"seed": 4}}, ["Data.seed was 0 and is 4", "the data differs"]),
        (
            {"model": {"norm_position": "post"}, "moe": {"top_k": 3}},
            [
                "Model.norm_position was 'pre' and is 'post'",
                "MoE.top_k was 2 and is 3",
                "Train.init_from",
            ],
        ),
    ],
)
def test_a_run_is_not_gone_on_with_as_another_one(run, capsys, change, parts):
    """Exit code 2 before anything is compiled or written, each field with both values,
    also where every array would have fitted."""
    before = helpers.contents(run)
    config = helpers.changed(CONFIG, **change)
    command = ["train", f"--workdir={run}", *helpers.arguments(config)]
    with helpers.compilations() as compiled:
        helpers.assert_told(command, parts, capsys)
    assert not compiled
    assert helpers.contents(run) == before
