# SPDX-License-Identifier: Apache-2.0
"""Floor 0. A schedule becomes a table of ticks, which all ranks run in lock-step.

In one SPMD program a tick lasts as long as its slowest rank, and messages travel
between ticks only. `lower` chooses ticks of such lengths, and packs so much into each,
that this costs next to nothing (docs/pipeline.md has the figures).

What a rank does in a tick: at most one forward, one backward (Bi or B) and one W. It
reads first and writes last: nothing in a tick depends on anything else in it, so their
order does not matter, and a forward and a backward of one tick are an F&B wherever they
come from. Where microbatches travel in both directions, the two go in different ones.
Forwards and backwards keep the order of the schedule, and a forward that comes after a
backward there waits for the next tick, so that no rank ever holds more activations than
the schedule promises. A W runs wherever there is room for it after its Bi, oldest
first; in the tick of its Bi the two become a B. A W may so wait for longer than in the
schedule, which `Slots.deferred` counts.

The columns of a table are int32 arrays [ticks, ranks]. -1 is nothing.

    branch          what the rank runs, an index into `TickTable.branches`
    f_direction     of the forward: 0 or 1, which of the rank's stages
    f_stage         its stage; 0 has no inbox and starts from the microbatch itself
    f_microbatch
    f_inbox         slot of the activation inbox that holds its input
    f_stash         stash slot into which it writes what its backward needs
    f_local         activation slot into which its output goes if the next stage is on
                    the same rank (the turn of a V)
    b_direction, b_stage, b_microbatch    of the Bi or B; the last stage has no inbox
                    and starts from the loss
    b_inbox         slot of the gradient inbox that holds the gradient of its output
    b_stash         stash slot that it reads
    b_deferred      deferred slot into which a Bi writes what its W needs; -1 for a B
    b_local         gradient slot into which the gradient of its input goes if the stage
                    before is on the same rank
    w_direction, w_stage, w_microbatch    of the W
    w_deferred      deferred slot that it reads
    a_right         activation slot for what comes from rank r - 1 when the tick ends
    a_left          the same from rank r + 1
    g_right         gradient slot for what comes from rank r - 1 when the tick ends
    g_left          the same from rank r + 1

After each tick, the output of a forward goes to r + 1 if its direction is 0, else to
r - 1, and the gradient of a backward the other way; what arrives is kept where one of
the last four columns says so, and is otherwise nothing. All slots are written at the
end of a tick, when it has read its own: a slot read for the last time can be written in
the same tick.

The search for the ticks is in `search`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxmoe.pipeline.schedule import Operation, Schedule
from jaxmoe.pipeline.search import States, best_ticks
from jaxmoe.pipeline.simulate import Costs, outputs

COLUMNS = (
    "branch",
    *("f_direction", "f_stage", "f_microbatch", "f_inbox", "f_stash", "f_local"),
    *("b_direction", "b_stage", "b_microbatch", "b_inbox", "b_stash", "b_deferred"),
    *("b_local", "w_direction", "w_stage", "w_microbatch", "w_deferred"),
    *("a_right", "a_left", "g_right", "g_left"),
)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Sizes of the buffers of a rank, the largest over ranks.

    Attributes:
      activations: Inbox for inputs of forwards.
      gradients: Inbox for gradients of outputs.
      stash: What forwards leave for their backwards.
      deferred: What Bi leave for their W.
    """

    activations: int
    gradients: int
    stash: int
    deferred: int


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """A program of ticks.

    Attributes:
      schedule: What it carries out.
      costs: For which its ticks were chosen.
      lengths: Per tick its duration, in the unit of the costs.
      branches: The distinct sets of operations, each a tuple out of F, then Bi or B,
        then W; () is idle. At most 12.
      columns: Arrays [ticks, ranks] by the names of `COLUMNS`.
      slots: Sizes of the buffers.
      peak_activations: Per rank, the most activations that live in one tick: those
        stashed before it and that of its own forward.
    """

    schedule: Schedule
    costs: Costs
    lengths: tuple[float, ...]
    branches: tuple[tuple[str, ...], ...]
    columns: Mapping[str, np.ndarray]
    slots: Slots
    peak_activations: tuple[int, ...]

    @property
    def ticks(self) -> int:
        """Their number."""
        return len(self.lengths)

    @property
    def lockstep_makespan(self) -> float:
        """The duration of all ticks."""
        return round(sum(self.lengths), 9)


@functools.lru_cache(maxsize=64)
def lower(schedule: Schedule, costs: Costs) -> TickTable:
    """The table of ticks with the smallest duration that a beam search finds.

    Raises:
      ConfigError: if the schedule has a deadlock.
    """
    return _table(schedule, costs, best_ticks(schedule, costs))


@dataclasses.dataclass(frozen=True)
class _Value:
    """Something that waits in a buffer of a rank.

    Attributes:
      rank: Whose buffer.
      buffer: A field of `Slots`.
      written: The tick at whose end it comes.
      read: The tick that needs it.
      writer: The column that names the slot where it is written.
      reader: The column that names the slot where it is read.
    """

    rank: int
    buffer: str
    written: int
    read: int
    writer: str
    reader: str


def _table(schedule: Schedule, costs: Costs, path: list[States]) -> TickTable:
    """Writes down what the states of a path did between one another."""
    done = _carried_out(schedule, path)
    shape = (len(path) - 1, schedule.num_ranks)
    columns = {name: np.full(shape, -1, np.int32) for name in COLUMNS}
    kinds: dict[tuple[int, int], list[str]] = {place: [] for place in np.ndindex(shape)}
    when: dict[tuple[str, int, int], tuple[int, int]] = {}
    for tick, rank, operation in done:
        kinds[tick, rank].append(operation.kind)
        letter = {"F": "f", "W": "w"}.get(operation.kind, "b")
        columns[f"{letter}_direction"][tick, rank] = operation.direction
        columns[f"{letter}_stage"][tick, rank] = operation.stage
        columns[f"{letter}_microbatch"][tick, rank] = operation.microbatch
        when |= dict.fromkeys(outputs(operation), (tick, rank))
    branches = sorted({tuple(names) for names in kinds.values()}, key=_branch_order)
    for place, names in kinds.items():
        columns["branch"][place] = branches.index(tuple(names))
    sizes = dict.fromkeys([field.name for field in dataclasses.fields(Slots)], 0)
    values = _values(schedule, done, when)
    for (_, buffer), group in itertools.groupby(
        sorted(values, key=lambda v: (v.rank, v.buffer, v.written, v.read)),
        key=lambda v: (v.rank, v.buffer),
    ):
        sizes[buffer] = max(sizes[buffer], _give_slots(list(group), columns))
    live = np.cumsum(columns["f_stash"] >= 0, 0) - np.cumsum(columns["b_stash"] >= 0, 0)
    peak = live + (columns["b_stash"] >= 0)  # a tick's backward reads before it ends
    for column in columns.values():
        column.setflags(write=False)
    return TickTable(
        schedule=schedule,
        costs=costs,
        lengths=tuple(float(layer.length_S[0]) for layer in path[1:]),
        branches=tuple(branches),
        columns=MappingProxyType(columns),
        slots=Slots(**sizes),
        peak_activations=tuple(peak.max(0).tolist()),
    )


def _carried_out(
    schedule: Schedule, path: list[States]
) -> list[tuple[int, int, Operation]]:
    """(tick, rank, operation) for every F, Bi, B and W, in this order within a tick."""
    kept = [[o for o in line if o.kind != "W"] for line in schedule.ranks]
    split = [[o for o in line if o.kind == "Bi"] for line in kept]
    found: list[tuple[int, int, Operation]] = []
    for tick, (before, after) in enumerate(itertools.pairwise(path)):
        for rank in range(schedule.num_ranks):
            first, last = before.done_SR[0, rank], after.done_SR[0, rank]
            parts = [part for o in kept[rank][first:last] for part in o.parts]
            w_first, w_last = before.weights_SR[0, rank], after.weights_SR[0, rank]
            for bi in split[rank][w_first:w_last]:
                if bi in parts:  # a Bi and its own W are a B
                    parts[parts.index(bi)] = dataclasses.replace(bi, kind="B")
                else:
                    parts.append(dataclasses.replace(bi, kind="W"))
            parts.sort(key=lambda part: ("F", "Bi", "B", "W").index(part.kind))
            found += [(tick, rank, part) for part in parts]
    return found


def _values(
    schedule: Schedule,
    done: list[tuple[int, int, Operation]],
    when: Mapping[tuple[str, int, int], tuple[int, int]],
) -> list[_Value]:
    """Everything that one operation leaves for another."""
    found: list[_Value] = []
    for tick, rank, operation in done:
        stage, microbatch = operation.stage, operation.microbatch
        if operation.kind == "W":
            written, _ = when["Bi", stage, microbatch]
            columns = "b_deferred", "w_deferred"
            found.append(_Value(rank, "deferred", written, tick, *columns))
            continue
        forward = operation.kind == "F"
        if not forward:
            written, _ = when["F", stage, microbatch]
            found.append(_Value(rank, "stash", written, tick, "f_stash", "b_stash"))
        source = stage - 1 if forward else stage + 1
        if not 0 <= source < schedule.num_stages:
            continue
        written, sender = when["F" if forward else "Bi", source, microbatch]
        if sender == rank:
            column = "f_local" if forward else "b_local"
        else:
            way = "right" if sender < rank else "left"
            column = f"{'a' if forward else 'g'}_{way}"
        buffer = "activations" if forward else "gradients"
        reader = "f_inbox" if forward else "b_inbox"
        found.append(_Value(rank, buffer, written, tick, column, reader))
    return found


def _give_slots(values: list[_Value], columns: dict[str, np.ndarray]) -> int:
    """Gives the values of one buffer slots, and writes them into the columns.

    They come in the order in which they are written, so that the lowest free slot makes
    the fewest slots (colouring of intervals).

    Returns:
      The number of slots.
    """
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # (last read, slot)
    size = 0
    for value in values:
        while taken and taken[0][0] <= value.written:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            free, size = [size], size + 1
        slot = heapq.heappop(free)
        heapq.heappush(taken, (value.read, slot))
        columns[value.writer][value.written, value.rank] = slot
        columns[value.reader][value.read, value.rank] = slot
    return size


def _branch_order(names: tuple[str, ...]) -> tuple[int, list[int]]:
    return len(names), [("F", "Bi", "B", "W").index(name) for name in names]
