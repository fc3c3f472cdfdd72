# SPDX-License-Identifier: Apache-2.0
"""Floor 0. A pipeline schedule is a value: per rank, its operations in order.

    F    forward of a stage for one microbatch
    Bi   backward for the stage's input: what the stage before waits for
    W    backward for the stage's weights, any time after its Bi
    B    Bi and W as one operation
    F&B  a forward of one microbatch overlapped with a B of another

Nothing here has a duration: `simulate` gives operations times, `lower` makes a program
of them. A stage is a run of layers; microbatches pass the stages in rising order, their
gradients in falling order. A direction is the way a microbatch travels over the ranks:
0 is from rank r to r + 1, 1 is from rank r to r - 1.

Legend: R ranks, M microbatches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from jaxmoe.config_base import choice, mistake, nearest

KINDS = ("F", "B", "Bi", "W", "F&B")
LAYOUTS = ("one_way", "both_ways", "v")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a rank does at one time.

    Attributes:
      kind: One of `KINDS`.
      direction: 0 or 1; of an F&B, that of its forward, as in the next two.
      stage: From 0 on; the last one ends with the loss.
      microbatch: From 0 on, counted over both directions.
      backward: The B inside an F&B, else None.
    """

    kind: str
    direction: int
    stage: int
    microbatch: int
    backward: Operation | None = None

    @property
    def parts(self) -> tuple[Operation, ...]:
        """The F and the B of an F&B; of anything else, the operation itself."""
        if self.backward is None:
            return (self,)
        return (dataclasses.replace(self, kind="F", backward=None), self.backward)

    def __str__(self) -> str:
        """Stage, kind, microbatch, as in a file: '0F5', '3Bi2' or '0F5&7B2'."""
        return "&".join(f"{p.stage}{p.kind}{p.microbatch}" for p in self.parts)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The operations of every rank.

    Attributes:
      name: As in `SCHEDULES`, or the name of a file.
      layout: Which stages a rank r holds. 'one_way': stage r. 'both_ways': stage r for
        direction 0 and stage R-1-r for direction 1, so that every stage has two copies;
        the first half of the microbatches takes direction 0, the second half takes
        direction 1. 'v': stage r, which microbatches pass in direction 0, and stage
        2R-1-r, which the same microbatches pass on their way back, in direction 1.
      num_microbatches: M.
      ranks: Per rank its operations, in the order in which it starts them.
    """

    name: str
    layout: str
    num_microbatches: int
    ranks: tuple[tuple[Operation, ...], ...]

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """R, or 2R in a V."""
        return self.num_ranks * (2 if self.layout == "v" else 1)

    @property
    def num_directions(self) -> int:
        """1 if all microbatches enter at rank 0 and leave at the last one, else 2."""
        return 1 if self.layout == "one_way" else 2

    def stage_of(self, rank: int, direction: int) -> int:
        """The stage that a rank holds for a direction."""
        return _stage_of(self.layout, self.num_ranks, rank, direction)

    def rank_of(self, stage: int, direction: int) -> int:
        """The rank that holds a stage for a direction; in a V the stage tells both."""
        if self.layout == "v":
            return min(stage, self.num_stages - 1 - stage)
        return self.num_ranks - 1 - stage if direction else stage

    def direction_of(self, stage: int, microbatch: int) -> int:
        """The direction in which a microbatch passes a stage."""
        if self.layout == "v":
            return int(stage >= self.num_ranks)
        return int(self.layout != "one_way" and 2 * microbatch >= self.num_microbatches)


def build(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule by its name.

    Args:
      name: A key of `SCHEDULES`.
      ranks: R, devices along the pipeline.
      microbatches: M, over both directions.

    Raises:
      ConfigError: for an unknown name, or numbers the schedule cannot take; the message
        names numbers it can.
    """
    if name not in SCHEDULES:
        best = nearest(name, SCHEDULES) or "dualpipe"
        raise mistake(
            f"schedule {name!r} is unknown",
            f"it must be {choice(SCHEDULES)}, or a CSV file",
            f"Name {best!r}",
        )
    check_numbers(name, ranks, microbatches)
    return SCHEDULES[name](ranks, microbatches)


def check_numbers(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    ranks_name: str = "--ranks",
    microbatches_name: str = "--microbatches",
    other: str = "use dualpipev",
    passes: Callable[[str, int], bool] = lambda label, value: True,
) -> None:
    """Checks that a schedule exists for so many ranks and microbatches.

    Args:
      name: A key of `SCHEDULES`.
      ranks: R.
      microbatches: M.
      ranks_name: What messages call the number of ranks.
      microbatches_name: What messages call the number of microbatches.
      other: What messages propose where R is odd; '' for nothing.
      passes: (name of a number, value) -> whether all else would be right with it.
        Messages propose such values where there are any near.

    Raises:
      ConfigError: naming numbers that work.
    """
    two_ways = name in ("dualpipe", "dualpipev")
    step = 2 if name == "dualpipe" else 1

    def first(label: str, values: Iterable[int]) -> list[int]:
        near = itertools.islice(values, 200)
        return [value for value in near if passes(label, value)][:1]

    for label, value in ((ranks_name, ranks), (microbatches_name, microbatches)):
        if value < 1:
            least = {ranks_name: 2, microbatches_name: 2 * max(2, ranks)}[label]
            raise mistake(
                f"{label}={value} is too small",
                "it must be at least 1",
                f"Set {label}={least if two_ways else 1}",
            )
    if ranks % step:
        around = [n for n in (ranks - 1, ranks + 1) if n]
        fits = [n for n in around if passes(ranks_name, n)] or around
        raise mistake(
            f"{ranks_name}={ranks} is odd",
            "dualpipe pairs rank r with rank R-1-r, so the number must be even",
            f"Set {ranks_name}={choice(fits)}" + (f", or {other}" if other else ""),
        )
    least = 2 * ranks
    if two_ways and microbatches < least:
        best = first(microbatches_name, range(least, 2 * least, step)) or [least]
        most = 0 if microbatches % step else microbatches // 2 // step * step
        fewer = first(ranks_name, range(most, 1, -step))
        raise mistake(
            f"{microbatches_name}={microbatches} is too small for {ranks_name}={ranks}",
            f"{name} needs at least two microbatches per rank, {least}",
            f"Set {microbatches_name}={best[0]}"
            + (f", or {ranks_name}={fewer[0]}" if fewer else ""),
        )
    if microbatches % step:
        below = range(microbatches - 1, least - 1, -step)
        above = range(microbatches + 1, 2 * microbatches, step)
        fits = first(microbatches_name, below) + first(microbatches_name, above)
        raise mistake(
            f"{microbatches_name}={microbatches} is odd",
            "dualpipe feeds one half of the microbatches at each end, and needs at"
            f" least {least} for {ranks_name}={ranks}",
            f"Set {microbatches_name}={choice(fits or [microbatches - 1])}",
        )


def without_splits(schedule: Schedule) -> Schedule:
    """The same with a B for every Bi: nothing waits, but bubbles are larger."""

    def whole(line: tuple[Operation, ...]) -> tuple[Operation, ...]:
        kept = (o for o in line if o.kind != "W")
        return tuple(
            dataclasses.replace(o, kind="B") if o.kind == "Bi" else o for o in kept
        )

    return dataclasses.replace(schedule, ranks=tuple(map(whole, schedule.ranks)))


# Builders -----------------------------------------------------------------------------


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, oldest first.

    Source: GPipe, arXiv 1811.06965.
    """
    lines = []
    for rank in range(ranks):
        line = _Line("one_way", ranks, microbatches, rank)
        for kind in ("F", "B"):
            for _ in range(microbatches):
                line.add(kind, 0)
        lines.append(line.done())
    return Schedule("gpipe", "one_way", microbatches, tuple(lines))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """R-1-r forwards on rank r, then forwards and backwards in turns.

    Source: PipeDream-Flush, arXiv 2006.09503.
    """
    lines = []
    for rank in range(ranks):
        line = _Line("one_way", ranks, microbatches, rank)
        warmup = min(ranks - 1 - rank, microbatches)
        for _ in range(warmup):
            line.add("F", 0)
        for i in range(microbatches):
            if warmup + i < microbatches:
                line.add("F", 0)
            line.add("B", 0)
        lines.append(line.done())
    return Schedule("1f1b", "one_way", microbatches, tuple(lines))


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward split: rank r does a W r microbatches after its Bi.

    The later ranks thereby send gradients at once and use the W to fill the time in
    which 1F1B waits; no rank holds more activations than in 1F1B.

    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, schedule ZB-H1.
    """
    lines = []
    for rank in range(ranks):
        line = _Line("one_way", ranks, microbatches, rank)
        warmup = min(ranks - 1 - rank, microbatches)
        for _ in range(warmup):
            line.add("F", 0)
        for i in range(microbatches):
            if warmup + i < microbatches:
                line.add("F", 0)
            line.add("Bi", 0)
            if i >= rank:
                line.weights()
        lines.append(line.done())
    return Schedule("zb_h1", "one_way", microbatches, tuple(lines))


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: microbatches enter at both ends, forwards overlap with backwards.

    Direction 0 takes the microbatches 0 to M/2-1, direction 1 takes M/2 to M-1.
    R must be even, M even and at least 2R.

    Source: deepseek-ai/DualPipe@3da1bbe dualpipe/dualpipe.py:355-425.
    """
    half = ranks // 2
    lines = []
    for rank in range(ranks):
        line = _Line("both_ways", ranks, microbatches, rank)
        depth = min(rank, ranks - 1 - rank)
        main = microbatches // 2 - ranks + depth + 1
        lines.append(_eight_steps(line, half, depth, main, rank >= half))
    return Schedule("dualpipe", "both_ways", microbatches, tuple(lines))


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: the V of half of DualPipe, without the second copy of each stage.

    Rank r holds stage r (direction 0, away from rank 0) and stage 2R-1-r (direction 1,
    back to rank 0, where the loss is). Every microbatch passes both. M is at least 2R.

    Source: deepseek-ai/DualPipe@3da1bbe dualpipe/dualpipev.py; the same eight steps.
    """
    lines = []
    for rank in range(ranks):
        line = _Line("v", ranks, microbatches, rank)
        main = microbatches - 2 * ranks + rank + 1
        lines.append(_eight_steps(line, ranks, rank, main, False))
    return Schedule("dualpipev", "v", microbatches, tuple(lines))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


def _eight_steps(
    line: _Line, half: int, depth: int, main: int, mirrored: bool
) -> tuple[Operation, ...]:
    """One rank of DualPipe, with the step numbers of the reference.

    Args:
      line: Takes the operations.
      half: Ranks from an end to the middle, H.
      depth: Ranks between this one and its end, h.
      main: Repeats of step 4.
      mirrored: On the second half of the ranks, phase 0 of the reference is
        direction 1; elsewhere it is direction 0.
    """
    zero, one = (1, 0) if mirrored else (0, 1)
    outer = half - depth - 1
    for _ in range(2 * outer):  # step 1: F0
        line.add("F", zero)
    for _ in range(depth + 1):  # step 2: F0 F1
        line.add("F", zero)
        line.add("F", one)
    for _ in range(outer):  # step 3: Bi1 W F1
        line.add("Bi", one)
        line.weights()
        line.add("F", one)
    for i in range(main):  # step 4: F0&B1 F1&B0
        if i == 0 and outer == 0:
            # In the middle the next rank waits for this F: the first pair is not
            # overlapped, which makes the bubble smaller.
            line.add("F", zero)
            line.add("B", one)
        else:
            line.overlap(zero, one)
        line.overlap(one, zero)
    for _ in range(outer):  # step 5: B1 F1&B0
        line.add("B", one)
        line.overlap(one, zero)
    for i in range(depth + 1):  # step 6: B1 B0, in its second half Bi1 Bi0
        middle = (depth + 1) // 2
        line.add("Bi" if i > middle or (i == middle and depth % 2) else "B", one)
        line.add("Bi" if i >= middle else "B", zero)
    for _ in range(outer):  # step 7: W Bi0
        line.weights()
        line.add("Bi", zero)
    for _ in range(depth + 1):  # step 8: W
        line.weights()
    return line.done()


class _Line:
    """Collects the operations of a rank; each kind takes microbatches in order."""

    def __init__(self, layout: str, ranks: int, microbatches: int, rank: int):
        second = microbatches // 2 if layout == "both_ways" else 0
        self._next = {
            (kind, direction): (0, second)[direction]
            for kind in ("F", "B")
            for direction in (0, 1)
        }
        self._stages = [_stage_of(layout, ranks, rank, way) for way in (0, 1)]
        self._deferred: list[Operation] = []
        self._operations: list[Operation] = []

    def add(self, kind: str, direction: int) -> None:
        """The next F, B or Bi of a direction."""
        self._operations.append(self._take(kind, direction))

    def overlap(self, forward: int, backward: int) -> None:
        """The next F of one direction with the next B of the other."""
        self._operations.append(
            dataclasses.replace(
                self._take("F", forward),
                kind="F&B",
                backward=self._take("B", backward),
            )
        )

    def weights(self) -> None:
        """The W that waits for longest."""
        self._operations.append(self._deferred.pop(0))

    def done(self) -> tuple[Operation, ...]:
        """All operations, with the W that still wait at the end."""
        return (*self._operations, *self._deferred)

    def _take(self, kind: str, direction: int) -> Operation:
        counter = ("F" if kind == "F" else "B", direction)
        microbatch = self._next[counter]
        self._next[counter] += 1
        taken = Operation(kind, direction, self._stages[direction], microbatch)
        if kind == "Bi":
            self._deferred.append(dataclasses.replace(taken, kind="W"))
        return taken


def _stage_of(layout: str, ranks: int, rank: int, direction: int) -> int:
    if direction == 0:
        return rank
    return (2 * ranks if layout == "v" else ranks) - 1 - rank
