# SPDX-License-Identifier: Apache-2.0
"""docs/pipeline.md shows what is computed: its tables, its timeline, its rules."""

import pytest

from jaxmoe.pipeline import draw
from jaxmoe.pipeline.lower import lower
from jaxmoe.pipeline.schedule import SCHEDULES
from jaxmoe.pipeline.simulate import simulate
from tests.pipeline.cases import OVERLAPPED, UNIT, build
from tests.test_docs import read, table

PAGE = read("docs/pipeline.md")
MOST_RANKS = 8  # of the rows that are computed again


def test_table_of_schedules():
    rows = table(PAGE, "Schedules")
    assert [row[0].strip("`") for row in rows] == list(SCHEDULES)
    for name, ranks, makespan, bubble, _, peak, copies in rows:
        schedule = build(name.strip("`"), int(ranks), 32)
        timeline = simulate(schedule, UNIT)
        assert schedule.num_stages == 8
        assert (timeline.makespan, timeline.bubble) == (float(makespan), float(bubble))
        assert max(timeline.peak_activations) == int(peak)
        assert (schedule.layout == "both_ways") == (copies == "2")


def test_timeline():
    timeline = simulate(build("dualpipe", 4, 8), UNIT)
    assert draw.text(timeline) in PAGE


def test_losses_of_lock_step():
    rows = table(PAGE, "What lock-step costs")
    assert {row[0].strip("`") for row in rows} == set(SCHEDULES)
    for name, ranks, *cells in rows:
        if int(ranks) > MOST_RANKS:
            continue
        kinds = [
            (times, costs) for costs in (UNIT, OVERLAPPED) for times in (2, 3, 4, 8)
        ]
        for (times, costs), cell in zip(kinds, cells, strict=True):
            schedule = build(name.strip("`"), int(ranks), times * int(ranks))
            ideal = simulate(schedule, costs).makespan
            loss = lower(schedule, costs).lockstep_makespan / ideal - 1
            assert float(cell.removesuffix(" %")) == pytest.approx(
                100 * loss, abs=0.006
            )


def test_sizes_of_tables():
    rows = table(PAGE, "Size of the tables")
    for name, ranks, *numbers in rows:
        if int(ranks) > MOST_RANKS:
            continue
        found = lower(build(name.strip("`"), int(ranks), 4 * int(ranks)), UNIT)
        slots = found.slots
        assert [int(number) for number in numbers] == [
            *(found.ticks, len(found.branches), slots.activations, slots.gradients),
            *(slots.stash, slots.deferred),
        ]
