# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Which ticks a schedule is cut into: a beam search over their lengths.

The rules of a tick are those of `lower`. The search knows no slots: forwards and
backwards keep the order of the schedule, so that no rank ever stashes more activations
than the schedule does.

Legend: R ranks, N operations of the longest line but for W, S states of the search.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxmoe.pipeline.schedule import Operation, Schedule
from jaxmoe.pipeline.simulate import Costs, inputs, outputs, simulate

_BEAM = 64  # states kept per tick; more change nothing up to 16 ranks
_MOST_DELAY = 4  # W that may wait on a rank beyond those of the schedule
_TINY = 1e-6  # below this, times are equal


def best_ticks(schedule: Schedule, costs: Costs) -> list[States]:
    """The shortest sequence of ticks that is found.

    W may wait for longer than in the schedule only where that saves time.

    Returns:
      What is done before the first tick, and after each: one state per entry.

    Raises:
      ConfigError: if the schedule has a deadlock.
    """
    ideal = simulate(schedule, costs).makespan
    lines = _Lines.of(schedule, costs)
    lengths = _lengths(costs)
    best: list[States] = []
    for delay in range(_MOST_DELAY + 1 if lines.bi_RN.any() else 1):
        found = _search(lines, lengths, delay, costs.W)
        if not best or found[-1].elapsed_S[0] < best[-1].elapsed_S[0] - _TINY:
            best = found
        if best[-1].elapsed_S[0] <= ideal + _TINY:
            break
    return best


@dataclasses.dataclass(frozen=True, eq=False)
class _Lines:
    """A schedule as arrays, without its W; column N stands for the end of a line.

    Attributes:
      cost_RN: Of an operation.
      need_rank_3RN: Whose operations it waits for, up to three.
      need_index_3RN: How many operations of those ranks must be done.
      forward_RN: Direction of its F, -1 without one.
      backward_RN: Direction of its B or Bi, -1 without one.
      bi_RN: The number of Bi before it.
      limit_R: The most W that wait at one time in the schedule.
      tail_RN: The shortest time from its start to the end of all.
      work_RN: What the rank has to do from it on.
      ways: 1 if a forward and a backward of one tick may have the same direction, 2
        if they must differ.
    """

    cost_RN: np.ndarray
    need_rank_3RN: np.ndarray
    need_index_3RN: np.ndarray
    forward_RN: np.ndarray
    backward_RN: np.ndarray
    bi_RN: np.ndarray
    limit_R: np.ndarray
    tail_RN: np.ndarray
    work_RN: np.ndarray
    ways: int

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> _Lines:
        kept = [[o for o in line if o.kind != "W"] for line in schedule.ranks]
        shape = (schedule.num_ranks, max(map(len, kept)) + 1)
        cost, tail, work = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        need_rank, need_index = np.zeros((2, 3, *shape), np.int32)
        forward, backward = np.full((2, *shape), -1, np.int32)
        bi = np.zeros(shape, np.int32)
        where = {
            key: (rank, i)
            for rank, line in enumerate(kept)
            for i, operation in enumerate(line)
            for key in outputs(operation)
        }
        users: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, line in enumerate(kept):
            for i, operation in enumerate(line):
                cost[rank, i] = costs.of(operation.kind)
                bi[rank, i + 1 :] += operation.kind == "Bi"
                for part in operation.parts:
                    column = forward if part.kind == "F" else backward
                    column[rank, i] = part.direction
                for n, key in enumerate(inputs(operation, schedule.num_stages)):
                    need_rank[n, rank, i], index = where[key]
                    need_index[n, rank, i] = index + 1
                    users.setdefault(where[key], []).append((rank, i))
            for i in reversed(range(len(line))):
                work[rank, i] = work[rank, i + 1] + cost[rank, i]
        for rank, i in _last_first(schedule, costs):
            later = [tail[user] for user in users.get((rank, i), ())]
            tail[rank, i] = cost[rank, i] + max([tail[rank, i + 1], *later])
        limit = np.asarray([_most_waiting(line) for line in schedule.ranks])
        ways = schedule.num_directions
        return cls(
            *(cost, need_rank, need_index, forward, backward, bi, limit, tail, work),
            ways,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """States after so many ticks.

    Attributes:
      done_SR: Operations done per rank, W not counted.
      weights_SR: W done per rank.
      elapsed_S: Duration so far.
      parent_S: The state one tick before.
      length_S: The duration of the last tick.
    """

    done_SR: np.ndarray
    weights_SR: np.ndarray
    elapsed_S: np.ndarray
    parent_S: np.ndarray
    length_S: np.ndarray

    def states(self, which: Sequence[int] | np.ndarray) -> States:
        """Some of the states."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return States(*(array[which] for array in fields))


def _search(
    lines: _Lines, lengths: np.ndarray, delay: int, w_cost: float
) -> list[States]:
    """Beam search over the lengths of ticks.

    States are ranked by the time at which all could end: what has elapsed and, of the
    worst rank, the longest chain that is left or the work that is left.

    Args:
      lines: The schedule.
      lengths: Those a tick may have.
      delay: W that may wait on a rank beyond those of the schedule.
      w_cost: Of a W.

    Returns:
      Layers of one state each, from before the first tick to the end.
    """
    R = len(lines.limit_R)
    rank_R = np.arange(R)
    all_bi_R = lines.bi_RN[:, -1]
    none, zero = np.zeros((1, R), np.int32), np.zeros(1)
    layers = [States(none, none, zero, zero.astype(np.int64), zero)]
    best, path = np.inf, layers
    while True:
        last = layers[-1]
        parent_S = np.repeat(np.arange(len(last.elapsed_S)), len(lengths))
        length_S = np.tile(lengths, len(last.elapsed_S))
        before = last.done_SR[parent_S], last.weights_SR[parent_S]
        done_SR, weights_SR = _tick(
            lines, *before, length_S, lines.limit_R + delay, w_cost
        )
        elapsed_S = np.round(last.elapsed_S[parent_S] + length_S, 9)
        left_SR = (all_bi_R - weights_SR) * w_cost + lines.work_RN[rank_R, done_SR]
        chain_SR = np.maximum(lines.tail_RN[rank_R, done_SR], left_SR)
        bound_S = np.round(elapsed_S + chain_SR.max(1), 6)
        ended_S = ~left_SR.any(1)
        moved_S = ((done_SR != before[0]) | (weights_SR != before[1])).any(1)
        found = States(done_SR, weights_SR, elapsed_S, parent_S, length_S)
        if ended_S.any():
            first = int(np.argmin(np.where(ended_S, elapsed_S, np.inf)))
            if elapsed_S[first] < best - _TINY:
                best, path = elapsed_S[first], _path([*layers, found], first)
        # A state that cannot be better than the best end is of no use.
        left = np.flatnonzero(moved_S & ~ended_S & (bound_S < best - _TINY))
        if not len(left):
            assert best < np.inf, "no rank can go on"
            return path
        idle_S = elapsed_S * R + left_SR.sum(1)
        order = left[np.lexsort((idle_S[left], bound_S[left]))]
        states = np.concatenate([done_SR[order], weights_SR[order]], axis=1)
        _, unique = np.unique(states, axis=0, return_index=True)
        kept = order[np.sort(unique)][:_BEAM]
        layers.append(found.states(kept))


def _path(layers: list[States], state: int) -> list[States]:
    """The states that led to one of the last layer, a layer for each."""
    path = []
    for layer in reversed(layers):
        path.append(layer.states([state]))
        state = int(layer.parent_S[state])
    return path[::-1]


def _tick(
    lines: _Lines,
    start_SR: np.ndarray,
    weights_SR: np.ndarray,
    length_S: np.ndarray,
    limit_R: np.ndarray,
    w_cost: float,
) -> tuple[np.ndarray, np.ndarray]:
    """What every rank has done after a tick of a given length, per state.

    A W comes first where no more may wait, and else takes the room that is left.
    """
    rows, ranks = np.ogrid[: len(start_SR), : start_SR.shape[1]]
    room = np.broadcast_to(length_S[:, None] + _TINY, start_SR.shape).copy()
    waiting = lines.bi_RN[ranks, start_SR] - weights_SR
    pressed = (waiting >= limit_R) & (waiting > 0) & (room >= w_cost)
    weights_SR = weights_SR + pressed
    room -= pressed * w_cost
    done_SR = start_SR.copy()
    forward = np.full(start_SR.shape, -1)
    backward = np.full(start_SR.shape, -1)
    goes_on = np.ones(start_SR.shape, bool)
    for _ in range(2):  # an F&B, or a forward and then a backward, or one of them
        cost = lines.cost_RN[ranks, done_SR]
        its_f = lines.forward_RN[ranks, done_SR]
        its_b = lines.backward_RN[ranks, done_SR]
        goes_on &= cost <= room
        for need_rank, need_index in zip(
            lines.need_rank_3RN, lines.need_index_3RN, strict=True
        ):
            there = start_SR[rows, need_rank[ranks, done_SR]]
            goes_on &= there >= need_index[ranks, done_SR]
        goes_on &= ((forward < 0) | (its_f < 0)) & (backward < 0)
        if lines.ways == 2:
            goes_on &= (forward < 0) | (forward != its_b)
        after = np.minimum(done_SR + 1, lines.bi_RN.shape[1] - 1)
        is_bi = lines.bi_RN[ranks, after] > lines.bi_RN[ranks, done_SR]
        waiting = lines.bi_RN[ranks, done_SR] - weights_SR
        goes_on &= ~is_bi | (waiting < limit_R)
        forward = np.where(goes_on & (its_f >= 0), its_f, forward)
        backward = np.where(goes_on & (its_b >= 0), its_b, backward)
        room -= np.where(goes_on, cost, 0)
        done_SR = done_SR + goes_on
    waiting = lines.bi_RN[ranks, done_SR] - weights_SR
    weights_SR = weights_SR + (~pressed & (waiting > 0) & (room >= w_cost))
    return done_SR, weights_SR


def _lengths(costs: Costs) -> np.ndarray:
    """Every duration that what a rank may do in a tick can have."""
    backward = (0.0, costs.Bi, costs.of("B"))
    pairs = {f + b for f in (0.0, costs.F) for b in backward} | {costs.of("F&B")}
    sums = {round(pair + w, 9) for pair in pairs for w in (0.0, costs.W)}
    return np.asarray(sorted(sums - {0.0}))


def _last_first(schedule: Schedule, costs: Costs) -> list[tuple[int, int]]:
    """Rank and place of every operation but W, what depends on others before them."""
    starts: list[tuple[float, int, int]] = []
    times = simulate(schedule, costs).times
    for rank, (line, spans) in enumerate(zip(schedule.ranks, times, strict=True)):
        pairs = zip(line, spans, strict=True)
        kept = [start for operation, (start, _) in pairs if operation.kind != "W"]
        starts += [(start, rank, i) for i, start in enumerate(kept)]
    return [(rank, i) for _, rank, i in sorted(starts, reverse=True)]


def _most_waiting(line: Sequence[Operation]) -> int:
    """The most Bi of a rank that wait for their W at one time."""
    change = {"Bi": 1, "W": -1}
    waiting = itertools.accumulate(change.get(o.kind, 0) for o in line)
    return max(waiting, default=0)
