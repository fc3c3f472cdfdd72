# SPDX-License-Identifier: Apache-2.0
"""The lowering to ticks: tables that are right, as short as promised, and few slots."""

import time

import numpy as np
import pytest
from hypothesis import given

from jaxmoe.config_base import ConfigError
from jaxmoe.pipeline.lower import COLUMNS, lower
from jaxmoe.pipeline.schedule_file import from_csv
from jaxmoe.pipeline.simulate import Costs, simulate
from tests.pipeline.cases import OVERLAPPED, UNIT, build, costs, schedules
from tests.pipeline.replay import replay


def complete(schedule):
    """The counts of a step: one F, Bi and W per stage and microbatch."""
    return {
        (kind, stage, microbatch): 1
        for kind in ("F", "Bi", "W")
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }


@given(schedules(), costs())
def test_a_table_does_what_the_schedule_says(schedule, costs):
    """Every F, Bi and W is done once; each reads the value that it needs from the slot
    in which it stands; nothing is overwritten while it is needed, nothing is left."""
    assert replay(lower(schedule, costs)) == complete(schedule)


@given(schedules(), costs())
def test_no_rank_holds_more_than_the_schedule_promises(schedule, costs):
    """Activations that live in a tick: at most those of the simulation, on each rank;
    stash slots: no more than that."""
    table, timeline = lower(schedule, costs), simulate(schedule, costs)
    pairs = zip(table.peak_activations, timeline.peak_activations, strict=True)
    assert all(here <= promised for here, promised in pairs)
    assert table.slots.stash <= max(timeline.peak_activations)


@given(schedules(), costs())
def test_branches_are_few(schedule, costs):
    """At most one forward, one backward and one W each: 12 sets, whatever the size."""
    table = lower(schedule, costs)
    assert len(set(table.branches)) == len(table.branches) <= 12
    for names in table.branches:
        assert sum(name == "F" for name in names) <= 1
        assert sum(name in ("B", "Bi") for name in names) <= 1
        assert sum(name == "W" for name in names) <= 1
    used = np.unique(table.columns["branch"])
    np.testing.assert_array_equal(used, np.arange(len(table.branches)))


@pytest.mark.parametrize(
    ("name", "ranks", "times"),
    [
        (name, ranks, times)
        for name, most in (("dualpipe", 16), ("dualpipev", 8))
        for ranks in (2, 4, 8, 16)[: 4 if most == 16 else 3]
        for times in (2, 3, 4, 8)
    ],
)
@pytest.mark.parametrize("costs", [UNIT, OVERLAPPED], ids=["FB=3", "FB=2.4"])
def test_lock_step_costs_at_most_one_per_cent(name, ranks, times, costs):
    """Makespan in lock-step over that of ranks which wait for their inputs only: at
    most 1.011; the search takes less than 10 s."""
    schedule = build(name, ranks, times * ranks)
    start = time.monotonic()
    table = lower(schedule, costs)
    assert time.monotonic() - start < 10
    ideal = simulate(schedule, costs).makespan
    assert ideal - 1e-6 <= table.lockstep_makespan <= 1.011 * ideal
    assert len(table.branches) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", [UNIT, OVERLAPPED], ids=["FB=3", "FB=2.4"])
def test_lock_step_of_a_long_v(times, costs):
    """32 stages in a V."""
    schedule = build("dualpipev", 16, times * 16)
    table = lower(schedule, costs)
    assert table.lockstep_makespan <= 1.011 * simulate(schedule, costs).makespan
    assert replay(table) == complete(schedule)


@pytest.mark.parametrize(
    ("name", "ranks", "promised"),
    [("dualpipe", 4, 5), ("dualpipe", 8, 9), ("dualpipev", 4, 9), ("1f1b", 4, 4)],
)
def test_peak_activations(name, ranks, promised):
    """DualPipe's stages + 1, and as many stash slots."""
    table = lower(build(name, ranks, 4 * ranks), UNIT)
    assert max(table.peak_activations) == promised
    assert table.slots.stash in (promised - 1, promised)


def test_zero_bubble_loses_nothing_and_one_f_one_b_much():
    """What lock-step costs depends on the schedule: ZB-H1 nothing, 1F1B a fifth."""
    for name, low, high in (("zb_h1", 0, 0), ("1f1b", 0.15, 0.25)):
        schedule = build(name, 8, 16)
        ideal = simulate(schedule, UNIT).makespan
        assert low <= lower(schedule, UNIT).lockstep_makespan / ideal - 1 <= high


def test_a_table_by_hand():
    """GPipe, 2 ranks, 1 microbatch: F on rank 0, F on rank 1, B there, B on rank 0."""
    table = lower(build("gpipe", 2, 1), Costs(1.0, 1.0, 0.5))
    assert table.lengths == (1.0, 1.0, 1.5, 1.5)
    assert table.lockstep_makespan == 5.0
    assert table.branches == ((), ("F",), ("B",))
    expected = {name: [[-1, -1]] * 4 for name in COLUMNS}
    expected["branch"] = [[1, 0], [0, 1], [0, 2], [2, 0]]
    for letter, first in (("f", (0, 1)), ("b", (3, 2))):
        for rank, tick in enumerate(first):
            for name, value in (("direction", 0), ("stage", rank), ("microbatch", 0)):
                rows = [list(row) for row in expected[f"{letter}_{name}"]]
                rows[tick][rank] = value
                expected[f"{letter}_{name}"] = rows
    expected["f_stash"] = [[0, -1], [-1, 0], [-1, -1], [-1, -1]]
    expected["b_stash"] = [[-1, -1], [-1, -1], [-1, 0], [0, -1]]
    expected["a_right"] = [[-1, 0], [-1, -1], [-1, -1], [-1, -1]]
    expected["f_inbox"] = [[-1, -1], [-1, 0], [-1, -1], [-1, -1]]
    expected["g_left"] = [[-1, -1], [-1, -1], [0, -1], [-1, -1]]
    expected["b_inbox"] = [[-1, -1], [-1, -1], [-1, -1], [0, -1]]
    for name, rows in expected.items():
        np.testing.assert_array_equal(table.columns[name], rows, err_msg=name)


def test_the_turn_of_a_v_stays_on_its_rank():
    """On the last rank of a V the output of stage R-1 goes into its own inbox, and the
    gradient comes back the same way; no other rank does that."""
    table = lower(build("dualpipev", 4, 8), UNIT)
    for letter, stage in (("f", 3), ("b", 4)):
        local = table.columns[f"{letter}_local"] >= 0
        np.testing.assert_array_equal(local, table.columns[f"{letter}_stage"] == stage)
        assert not local[:, :3].any()
    columns = ("a_right", "a_left", "g_right", "g_left")
    arrives = {name: (table.columns[name] >= 0).any(0).tolist() for name in columns}
    assert arrives["a_right"] == arrives["g_right"] == [False, True, True, True]
    assert arrives["a_left"] == arrives["g_left"] == [True, True, True, False]


def test_a_table_is_a_value_and_is_kept():
    """The same arguments give the same table without a second search; its arrays
    cannot be written to."""
    table = lower(build("dualpipe", 4, 8), UNIT)
    assert lower(build("dualpipe", 4, 8), UNIT) is table
    assert set(table.columns) == set(COLUMNS)
    for column in table.columns.values():
        assert column.shape == (table.ticks, 4)
        assert column.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            column[0, 0] = 1


def test_a_deadlock_is_told():
    schedule = from_csv("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n", "file.csv")
    with pytest.raises(ConfigError, match="stands still"):
        lower(schedule, UNIT)
