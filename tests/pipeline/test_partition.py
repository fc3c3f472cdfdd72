# SPDX-License-Identifier: Apache-2.0
"""Layers on stages, stages on ranks: all of them, in order, as evenly as they go."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.pipeline.partition import partition
from jaxmoe.pipeline.schedule import build

SCHEDULES = ("1f1b", "dualpipe", "dualpipev")


@given(
    kinds=st.lists(st.sampled_from(("dense", "moe")), min_size=1, max_size=20),
    name=st.sampled_from(SCHEDULES),
    ranks=st.sampled_from((2, 4)),
)
def test_every_layer_is_on_one_stage(kinds, name, ranks):
    """Stage after stage, the layers are those of the model; sizes differ by one."""
    schedule = build(name, ranks, 2 * ranks)
    stages = partition(tuple(kinds), schedule, shared=False).stages
    assert len(stages) == schedule.num_stages
    assert [layer.kind for stage in stages for layer in stage] == kinds
    for kind in ("dense", "moe"):
        places = [la.place for stage in stages for la in stage if la.kind == kind]
        assert places == list(range(kinds.count(kind)))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_layer_is_held_where_its_stage_is(name):
    """7 layers on 4 ranks: each rank's rows are those of its stages, filled up."""
    schedule = build(name, 4, 8)
    found = partition(("moe",) * 7, schedule, shared=False)
    for direction in range(schedule.num_directions):
        for rank, row in enumerate(found.held(direction, "moe")):
            stage = found.stages[schedule.stage_of(rank, direction)]
            assert tuple(layer for layer in row if layer) == stage
            assert len(row) == max(map(len, found.held(direction, "moe")))
            assert None not in row[: len(stage)]


def test_seven_layers_on_four_ranks():
    """2, 2, 2 and 1; the first layers are 0, 2, 4 and 6."""
    found = partition(("moe",) * 7, build("1f1b", 4, 4), shared=False)
    assert [len(stage) for stage in found.stages] == [2, 2, 2, 1]
    assert found.first_layers() == (0, 2, 4, 6)


def test_a_v_may_have_empty_stages():
    """6 layers on 8 stages of 4 ranks: the last two, of ranks 1 and 0, are empty."""
    found = partition(("dense", "moe") * 3, build("dualpipev", 4, 8), shared=False)
    assert [len(stage) for stage in found.stages] == [1] * 6 + [0, 0]
    assert found.kinds(0) == ("dense",)
    assert found.kinds(7) == ()


def test_shared_layers_have_one_place():
    """All layers of a kind are the stored one; their ordinals still tell them apart."""
    found = partition(("dense", "moe") * 2, build("1f1b", 2, 2), shared=True)
    layers = list(itertools.chain(*found.stages))
    assert [layer.place for layer in layers] == [0] * 4
    assert [layer.ordinal for layer in layers] == [0, 0, 1, 1]
