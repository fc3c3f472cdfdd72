# SPDX-License-Identifier: Apache-2.0
"""Schedules: complete, in an order that can run, as published; files; mistakes."""

import collections
import dataclasses

import pytest
from hypothesis import given

from jaxmoe.config_base import ConfigError
from jaxmoe.pipeline.schedule import (
    SCHEDULES,
    Operation,
    build,
    check_numbers,
    without_splits,
)
from jaxmoe.pipeline.schedule_file import check_complete, from_csv, to_csv
from jaxmoe.pipeline.simulate import Costs, simulate
from tests.pipeline.cases import schedules


@given(schedules())
def test_every_stage_does_every_microbatch_once(schedule):
    """Each (stage, microbatch) has exactly one F, one Bi and one W, where a B counts as
    both backwards; each on the rank that holds the stage in that direction."""
    counts = collections.Counter()
    for rank, line in enumerate(schedule.ranks):
        for part in (part for operation in line for part in operation.parts):
            assert schedule.stage_of(rank, part.direction) == part.stage
            assert schedule.rank_of(part.stage, part.direction) == rank
            way = schedule.direction_of(part.stage, part.microbatch)
            assert way == part.direction
            kinds = ("Bi", "W") if part.kind == "B" else (part.kind,)
            counts.update((kind, part.stage, part.microbatch) for kind in kinds)
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * schedule.num_stages * schedule.num_microbatches
    check_complete(schedule)


@given(schedules())
def test_order_on_a_rank(schedule):
    """On its rank F comes before B or Bi, and Bi before W, for each microbatch of each
    stage; forwards come in the order of microbatches, backwards too."""
    for line in schedule.ranks:
        parts = [part for operation in line for part in operation.parts]
        place = {(p.kind, p.stage, p.microbatch): i for i, p in enumerate(parts)}
        for (kind, stage, microbatch), i in place.items():
            if kind in ("B", "Bi"):
                assert place["F", stage, microbatch] < i
            if kind == "W":
                assert place["Bi", stage, microbatch] < i
        for kinds in (("F",), ("B", "Bi"), ("W",)):
            for direction in (0, 1):
                taken = [
                    p.microbatch
                    for p in parts
                    if p.kind in kinds and p.direction == direction
                ]
                assert taken == sorted(taken)


@given(schedules())
def test_no_deadlock(schedule):
    """With any costs every operation gets a time; an input comes before its use."""
    timeline = simulate(schedule, Costs(1.0, 1.5, 0.5))
    ends = {}
    for line, spans in zip(schedule.ranks, timeline.times, strict=True):
        for operation, span in zip(line, spans, strict=True):
            for part in operation.parts:
                kind = "B" if part.kind == "Bi" else part.kind
                ends[kind, part.stage, part.microbatch] = span
    for (kind, stage, microbatch), (start, _) in ends.items():
        if kind == "F" and stage:
            assert ends["F", stage - 1, microbatch][1] <= start
        if kind == "B" and stage + 1 < schedule.num_stages:
            assert ends["B", stage + 1, microbatch][1] <= start


@given(schedules())
def test_a_schedule_is_a_value(schedule):
    """Building is a pure function: equal arguments give equal, hashable values."""
    again = SCHEDULES[schedule.name](schedule.num_ranks, schedule.num_microbatches)
    assert again == schedule
    assert hash(again) == hash(schedule)


def counts(schedule, rank):
    """F, Bi, W, F&B and B of a rank."""
    found = collections.Counter(o.kind for o in schedule.ranks[rank])
    return tuple(found[kind] for kind in ("F", "Bi", "W", "F&B", "B"))


@given(schedules())
def test_without_splits_every_backward_is_whole(schedule):
    """The same F and F&B; a B for every Bi, and no W."""
    whole = without_splits(schedule)
    for rank in range(schedule.num_ranks):
        f, bi, w, pairs, b = counts(schedule, rank)
        assert bi == w
        assert counts(whole, rank) == (f, 0, 0, pairs, b + bi)
    assert simulate(whole, Costs()).makespan >= simulate(schedule, Costs()).makespan


def test_operations_per_rank_of_dualpipe():
    """R=8, M=20, the case of the published figure; ranks 4 to 7 mirror 0 to 3."""
    schedule = build("dualpipe", 8, 20)
    published = [
        (11, 7, 7, 9, 4),
        (10, 6, 6, 10, 4),
        (9, 5, 5, 11, 4),
        (9, 4, 4, 11, 5),
    ]
    found = [counts(schedule, rank) for rank in range(8)]
    assert found == published + published[::-1]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 9), (8, 20)])
def test_dualpipev_is_one_half_of_dualpipe(ranks, microbatches):
    """Rank r of DualPipeV does what rank r of DualPipe with 2R ranks does, with 2M
    microbatches, those of direction 1 with other numbers."""
    whole = build("dualpipe", 2 * ranks, 2 * microbatches)
    half = build("dualpipev", ranks, microbatches)

    def renumbered(operation):
        parts = [
            (p.kind, p.direction, p.stage, p.microbatch - p.direction * microbatches)
            for p in operation.parts
        ]
        return [operation.kind, *parts]

    for rank in range(ranks):
        found = [
            [o.kind, *((p.kind, p.direction, p.stage, p.microbatch) for p in o.parts)]
            for o in half.ranks[rank]
        ]
        assert found == [renumbered(o) for o in whole.ranks[rank]]


@pytest.mark.parametrize("rank", range(8))
def test_the_second_half_of_dualpipe_mirrors_the_first(rank):
    """Rank R-1-r does what rank r does with directions exchanged."""
    schedule = build("dualpipe", 8, 20)
    for one, other in zip(schedule.ranks[rank], schedule.ranks[7 - rank], strict=True):
        for p, q in zip(one.parts, other.parts, strict=True):
            assert (p.kind, p.direction, p.stage) == (q.kind, 1 - q.direction, q.stage)
            assert p.microbatch % 10 == q.microbatch % 10


GOLDEN = {  # read beside the figures
    ("gpipe", 2, 2): "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
    ("1f1b", 2, 3): "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    ("zb_h1", 2, 3): (
        "0F0,0F1,0Bi0,0W0,0F2,0Bi1,0W1,0Bi2,0W2\n"
        "1F0,1Bi0,1F1,1Bi1,1W0,1F2,1Bi2,1W1,1W2\n"
    ),
    ("dualpipe", 2, 4): (
        "0F0,1F2,0F1,1B2,1F3&0B0,1B3,0Bi1,0W1\n0F2,1F0,0F3,1B0,1F1&0B2,1B1,0Bi3,0W3\n"
    ),
    ("dualpipev", 1, 2): "0F0,1F0,0F1,1B0,1F1&0B0,1B1,0Bi1,0W1\n",
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_small_schedules_in_full(case):
    assert to_csv(build(*case)) == GOLDEN[case]


@given(schedules())
def test_files_round_trip(schedule):
    """What is read from a file is equal to what was written, layout included."""
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_files_of_others():
    """torchtitan writes I for Bi and empty cells for idle time; spaces are let be."""
    text = "0F0,0F1,,0I0,0W0, 0I1 ,0W1\n\n,1F0,1F1,1I0,1I1,1W0,1W1\n"
    schedule = from_csv(text, "file.csv")
    assert [str(o) for o in schedule.ranks[0]][2:4] == ["0Bi0", "0W0"]
    assert schedule.layout == "one_way"
    assert schedule.ranks[1][0] == Operation("F", 0, 1, 0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("no operations", "--csv")),
        ("0F0,0X0\n", ("'0X0'", "3Bi2")),
        ("0F0,F0\n", ("'F0'",)),
        ("0B0&0F0\n", ("'0B0&0F0'", "0F5&7B2")),
        ("0F0&0B0&0W0\n", ("no operation",)),
        ("0F0,0B0\n0F1,0B1\n0F2,3B2\n", ("4 stages on 3 ranks", "4 lines")),
        ("0F0,0B0\n1F0\n", ("no 1Bi0",)),
        ("0F0,0B0\n1F0,1Bi0\n", ("no 1W0",)),
        ("0F0,0B0\n1F0,1B0,1W0\n", ("a second W in 1W0",)),
        ("1F0,1B0\n0F0,0B0\n", ("1F0 on rank 0", "rank 1")),
        ("0F0,0F2,0B2,0B0\n1F0,1F2,1B0,1B2\n", ("no 0F1",)),
        (
            "0F0,0F1&0B0,0B1,1F2,1F3,1B2,1B3\n1F0,1F1,1B0,1B1,0F2,0F3,0B2,0B3\n",
            ("0F1&0B0", "one direction with the other"),
        ),
    ],
)
def test_files_with_mistakes(text, parts):
    with pytest.raises(ConfigError) as error:
        from_csv(text, "file.csv")
    assert str(error.value).startswith("file.csv")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "parts"),
    [
        ("dualpipe", 3, 8, ("ranks=3 is odd", "even", "ranks=2 or 4")),
        ("dualpipe", 1, 8, ("ranks=1 is odd", "ranks=2,")),
        ("dualpipe", 4, 6, ("microbatches=6", "ranks=4", "microbatches=8", "ranks=2")),
        ("dualpipe", 4, 7, ("microbatches=7", "ranks=4", "microbatches=8")),
        ("dualpipe", 4, 9, ("microbatches=9 is odd", "microbatches=8 or 10")),
        ("dualpipev", 4, 7, ("microbatches=7", "microbatches=8", "ranks=3")),
        ("dualpipev", 0, 7, ("ranks=0", "at least 1", "ranks=2")),
        ("gpipe", 0, 1, ("ranks=0", "ranks=1")),
        ("1f1b", 1, 0, ("microbatches=0", "microbatches=1")),
        ("zb_h1", 2, -3, ("microbatches=-3", "microbatches=1")),
        ("dualpip", 4, 8, ("'dualpip'", "'dualpipe'", "zb_h1")),
    ],
)
def test_numbers_that_do_not_work(name, ranks, microbatches, parts):
    """The message names the number, the rule and numbers that work."""
    with pytest.raises(ConfigError) as error:
        build(name, ranks, microbatches)
    for part in parts:
        assert part in str(error.value)


def test_numbers_go_by_the_names_of_their_fields():
    with pytest.raises(
        ConfigError, match=r"Mesh\.pipe=3 is odd.*Set Mesh\.pipe=2 or 4"
    ):
        check_numbers("dualpipe", 3, 8, ranks_name="Mesh.pipe")


def test_an_f_and_b_has_parts():
    forward = Operation("F", 0, 2, 5)
    backward = Operation("B", 1, 3, 1)
    both = dataclasses.replace(forward, kind="F&B", backward=backward)
    assert both.parts == (forward, backward)
    assert forward.parts == (forward,)
    assert str(both) == "2F5&3B1"
