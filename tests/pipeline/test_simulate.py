# SPDX-License-Identifier: Apache-2.0
"""The simulation: bubbles and activations as published, by hand, and deadlocks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config_base import ConfigError
from jaxmoe.pipeline.schedule import SCHEDULES, build
from jaxmoe.pipeline.schedule_file import from_csv
from jaxmoe.pipeline.simulate import Costs, parse_costs, simulate
from tests.pipeline.cases import UNIT, costs, schedules


def formula(name, ranks, costs):
    """The published bubble; B is a whole backward. DualPipe@3da1bbe README.md."""
    f, b, w, both = costs.F, costs.Bi + costs.W, costs.W, costs.of("F&B")
    stages = 2 * ranks if name == "dualpipev" else ranks
    return {
        "gpipe": (ranks - 1) * (f + b),
        "1f1b": (ranks - 1) * (f + b),
        "zb_h1": (ranks - 1) * (f + b - 2 * w),
        "dualpipe": (stages / 2 - 1) * (both + b - 3 * w),
        "dualpipev": (stages / 2 - 1) * (both + b - 3 * w),
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("times", [2, 3, 8])
@pytest.mark.parametrize(
    "costs", [UNIT, Costs(FB=2.4), Costs(1.0, 1.0, 0.5, 2.25)], ids=str
)
def test_bubble_is_the_published_formula(name, ranks, times, costs):
    """Exact for every schedule where F = Bi and W is no longer than they."""
    timeline = simulate(build(name, ranks, times * ranks), costs)
    assert timeline.bubble == pytest.approx(formula(name, ranks, costs))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "costs",
    [Costs(1.0, 1.5, 0.5), Costs(1.0, 1.66, 0.98), Costs(2.0, 1.5, 1.0)],
    ids=str,
)
def test_bubble_of_one_way_schedules_with_other_costs(name, ranks, costs):
    timeline = simulate(build(name, ranks, 3 * ranks), costs)
    assert timeline.bubble == pytest.approx(formula(name, ranks, costs))


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "costs", [Costs(1.0, 1.66, 0.98, 3.0), Costs(1.0, 2.0, 1.0), Costs(0.5, 1.0, 0.5)]
)
def test_with_a_longer_bi_the_formula_is_an_upper_value(name, ranks, costs):
    """The first costs are those of DeepSeek's trace: F : Bi : W = 1 : 1.66 : 0.98."""
    bubble = simulate(build(name, ranks, 4 * ranks), costs).bubble
    assert bubble <= formula(name, ranks, costs) + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("costs", [UNIT, Costs(FB=2.4)], ids=str)
def test_peak_activations_are_the_published_ones(ranks, costs):
    """DualPipe and DualPipeV: stages + 1 on every rank. 1F1B and ZB-H1: R - r on rank
    r. GPipe: all microbatches."""
    M = 3 * ranks

    def peak(name):
        return simulate(build(name, ranks, M), costs).peak_activations

    assert peak("dualpipe") == (ranks + 1,) * ranks
    assert peak("dualpipev") == (2 * ranks + 1,) * ranks
    falling = tuple(range(ranks, 0, -1))
    assert peak("1f1b") == peak("zb_h1") == falling
    assert peak("gpipe") == (M,) * ranks


def test_times_by_hand():
    """1F1B of 2 ranks and 2 microbatches: F 1, B 2."""
    timeline = simulate(build("1f1b", 2, 2), Costs())
    # 0F0 0F1 . 0B0 0B1 / . 1F0 1B0 1F1 1B1
    assert timeline.times[0] == ((0, 1), (1, 2), (4, 6), (7, 9))
    assert timeline.times[1] == ((1, 2), (2, 4), (4, 5), (5, 7))
    assert (timeline.makespan, timeline.bubble) == (9, 3)
    assert timeline.busy == (6, 6)


@given(schedules(), costs())
def test_times_are_consistent(schedule, costs):
    """Operations of a rank do not overlap and last as long as they cost; the makespan
    is the last end, and no rank is busier than it."""
    timeline = simulate(schedule, costs)
    ends = []
    for line, spans in zip(schedule.ranks, timeline.times, strict=True):
        clock = 0.0
        for operation, (start, end) in zip(line, spans, strict=True):
            assert start >= clock
            assert end - start == pytest.approx(costs.of(operation.kind))
            clock = end
        ends.append(clock)
    assert timeline.makespan == max(ends)
    assert timeline.bubble >= 0
    assert max(timeline.busy) <= timeline.makespan + 1e-9


@given(schedules(), st.floats(0.25, 4.0))
def test_scaling_costs_scales_times(schedule, factor):
    costs = Costs(1.0, 1.5, 0.5, 2.75)
    scaled = Costs(*(factor * value for value in dataclasses.astuple(costs)))
    one, other = simulate(schedule, costs), simulate(schedule, scaled)
    assert other.makespan == pytest.approx(factor * one.makespan)
    assert other.peak_activations == one.peak_activations


def test_a_deadlock_names_ranks_and_operations():
    """Rank 0 wants the gradient of microbatch 1 first, rank 1 gives that of 0 first
    and then waits for a forward that rank 0 has put last."""
    text = "0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n"
    with pytest.raises(ConfigError) as error:
        simulate(from_csv(text, "file.csv"), Costs())
    message = str(error.value)
    assert "file.csv stands still" in message
    assert "rank 0 at 0B1 for 0F1" in message
    assert "rank 1 at 1F1 for 0F1" in message


def test_an_operation_that_is_not_there_is_named():
    schedule = build("1f1b", 2, 2)
    cut = dataclasses.replace(
        schedule, ranks=(schedule.ranks[0][1:], schedule.ranks[1])
    )
    with pytest.raises(ConfigError, match="rank 1 at 1F0 for 0F0"):
        simulate(cut, Costs())


def test_many_waiting_ranks_are_counted():
    schedule = build("gpipe", 12, 1)
    cut = dataclasses.replace(
        schedule, ranks=(schedule.ranks[0][1:], *schedule.ranks[1:])
    )
    with pytest.raises(ConfigError, match="and 4 more wait"):
        simulate(cut, Costs())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Costs(1, 1, 1, None)),
        ("F=1,Bi=1,W=1,FB=3", Costs(1, 1, 1, 3)),
        ("FB=2.4", Costs(1, 1, 1, 2.4)),
        (" W = .5 , F=2.", Costs(2, 1, 0.5)),
    ],
)
def test_costs_from_text(text, expected):
    assert parse_costs(text) == expected


def test_cost_of_an_overlap_is_the_sum_by_default():
    assert Costs(1, 2, 3).of("F&B") == 6
    assert Costs(1, 2, 3).of("B") == 5


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("B=2", "'B'"),
        ("bi=2", "Bi=1"),
        ("F", "'F'"),
        ("F=x", "'F=x'"),
        ("F=1e3", "'F=1e3'"),
        ("F=-1", "'F=-1'"),
        ("F=nan", "'F=nan'"),
        ("F=0", "F=0 is no duration"),
        ("W=99999999", "from 0.001 to 10000"),
    ],
)
def test_costs_with_mistakes(text, part):
    with pytest.raises(ConfigError) as error:
        parse_costs(text)
    assert part in str(error.value)
