# SPDX-License-Identifier: Apache-2.0
"""Floor 0. How long a schedule takes where every rank waits for its inputs only.

A rank does its operations in order, one at a time, and starts each as soon as the one
before has ended and its inputs are there. Sending takes no time. This is the ideal that
a program in lock-step is measured against.

What an operation waits for, s a stage and m a microbatch:

    F(s, m)         F(s-1, m)
    B, Bi(s, m)     F(s, m), and B or Bi(s+1, m)
    W(s, m)         Bi(s, m)
    F&B             what its F and its B wait for; both end with it
"""

from __future__ import annotations

import dataclasses
import re

from jaxmoe.config import Pipeline
from jaxmoe.config_base import mistake, nearest
from jaxmoe.config_derived import pipeline_microbatches
from jaxmoe.pipeline.schedule import Operation, Schedule, build, without_splits

# Times are rounded to 9 decimals, so that sums in another order give equal times.
_DECIMALS = 9
_SHORTEST, _LONGEST = 1e-3, 1e4

Key = tuple[str, int, int]  # F, Bi or W; stage; microbatch


@dataclasses.dataclass(frozen=True)
class Costs:
    """What operations cost, in any one unit of time.

    Attributes:
      F: A forward.
      Bi: A backward for inputs.
      W: A backward for weights.
      FB: A forward overlapped with a whole backward; None: F + Bi + W, no gain.
    """

    F: float = 1.0
    Bi: float = 1.0
    W: float = 1.0
    FB: float | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not (_SHORTEST <= value <= _LONGEST):
                raise mistake(
                    f"cost {field.name}={value:g} is no duration",
                    f"it must be from {_SHORTEST:g} to {_LONGEST:g}, in any unit",
                    f"Set {field.name}=1",
                )

    def of(self, kind: str) -> float:
        """The cost of an operation of a kind."""
        if kind == "F&B":
            return self.F + self.Bi + self.W if self.FB is None else self.FB
        return {"F": self.F, "Bi": self.Bi, "W": self.W, "B": self.Bi + self.W}[kind]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with times.

    Attributes:
      schedule: What was simulated.
      times: Per rank and operation, its start and its end, in the unit of the costs.
      makespan: The end of the last operation.
      busy: Per rank, the time in which it does something.
      peak_activations: Per rank, the most activations that live at one time. One lives
        from the start of its F to the end of its B or Bi; an F that starts at such an
        end takes over the place. What a Bi leaves for its W is not counted.
    """

    schedule: Schedule
    times: tuple[tuple[tuple[float, float], ...], ...]
    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The idle time of the rank that idles most."""
        return round(self.makespan - min(self.busy), _DECIMALS)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Gives every operation the earliest time at which it can run.

    Raises:
      ConfigError: for a deadlock, naming the ranks that wait and what for.
    """
    done: dict[Key, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for line, spans in zip(schedule.ranks, times, strict=True):
            while len(spans) < len(line):
                operation = line[len(spans)]
                needs = inputs(operation, schedule.num_stages)
                if any(key not in done for key in needs):
                    break
                ready = spans[-1][1] if spans else 0.0
                start = max([ready, *(done[key] for key in needs)])
                spans.append(
                    (start, round(start + costs.of(operation.kind), _DECIMALS))
                )
                done |= dict.fromkeys(outputs(operation), spans[-1][1])
                moved = True
    _check_done(schedule, done, [len(spans) for spans in times])
    return Timeline(
        schedule=schedule,
        times=tuple(map(tuple, times)),
        makespan=max(spans[-1][1] for spans in times),
        busy=tuple(
            round(sum(costs.of(o.kind) for o in line), _DECIMALS)
            for line in schedule.ranks
        ),
        peak_activations=tuple(map(_peak, schedule.ranks, times)),
    )


def inputs(operation: Operation, num_stages: int) -> tuple[Key, ...]:
    """What must be done before an operation starts."""
    found: list[Key] = []
    for part in operation.parts:
        stage, microbatch = part.stage, part.microbatch
        if part.kind == "F":
            found += [("F", stage - 1, microbatch)] if stage else []
        elif part.kind == "W":
            found.append(("Bi", stage, microbatch))
        else:
            found.append(("F", stage, microbatch))
            found += [("Bi", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return tuple(found)


def outputs(operation: Operation) -> tuple[Key, ...]:
    """What is done when an operation ends; a B is a Bi and a W."""
    return tuple(
        (kind, part.stage, part.microbatch)
        for part in operation.parts
        for kind in (("Bi", "W") if part.kind == "B" else (part.kind,))
    )


def parse_costs(text: str, *, name: str = "--costs") -> Costs:
    """Reads costs such as 'F=1,Bi=1.5,W=1,FB=3'; what is not named is 1, FB the sum.

    Args:
      text: The costs.
      name: What messages call it.

    Raises:
      ConfigError: for another name, or a value that is no duration.
    """
    known = [field.name for field in dataclasses.fields(Costs)]
    values: dict[str, float] = {}
    for item in text.split(",") if text else ():
        cost, _, value = (part.strip() for part in item.partition("="))
        if cost not in known:
            best = nearest(cost, known) or "F"
            raise mistake(
                f"{name} names {cost!r}",
                f"costs are those of {', '.join(known)}",
                f"Write it like {best}=1",
            )
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)", value):
            raise mistake(
                f"{name} has {item.strip()!r}",
                "a cost is a number above 0",
                f"Write it like {cost}=1.5",
            )
        values[cost] = float(value)
    return Costs(**values)


def of_config(pipeline: Pipeline, ranks: int) -> tuple[Schedule, Costs]:
    """The schedule of a configuration on so many ranks, and what operations cost."""
    count = pipeline_microbatches(pipeline, ranks)
    schedule = build(pipeline.schedule, ranks, count)
    if not pipeline.split_backward:
        schedule = without_splits(schedule)
    return schedule, parse_costs(pipeline.costs)


def _check_done(schedule: Schedule, done: dict[Key, float], counts: list[int]) -> None:
    """Raises a ConfigError if ranks wait for one another for ever."""
    waits = []
    for rank, (line, count) in enumerate(zip(schedule.ranks, counts, strict=True)):
        if count < len(line):
            needs = inputs(line[count], schedule.num_stages)
            kind, stage, microbatch = next(key for key in needs if key not in done)
            waits.append(f"rank {rank} at {line[count]} for {stage}{kind}{microbatch}")
    if waits:
        more = f" and {len(waits) - 8} more" if len(waits) > 8 else ""
        raise mistake(
            f"{schedule.name} stands still: {', '.join(waits[:8])}{more} wait",
            "what a rank waits for must come earlier on its own rank or on another",
            "Change the order of these operations",
        )


def _peak(line: tuple[Operation, ...], spans: list[tuple[float, float]]) -> int:
    """The most activations of a rank that live at one time."""
    changes: list[tuple[float, int]] = []
    for operation, (start, end) in zip(line, spans, strict=True):
        for part in operation.parts:
            if part.kind == "F":
                changes.append((start, 1))
            elif part.kind in ("B", "Bi"):
                changes.append((end, -1))
    live = peak = 0
    for _, change in sorted(changes):  # of one time, ends come first
        live += change
        peak = max(peak, live)
    return peak
