# SPDX-License-Identifier: Apache-2.0
"""Floor 0. When what happens, by the schedule of a compiled program.

A device computes one instruction after the other; beside them collectives are under
way, one at a time along each set of mesh axes. Where one is waited for and has not
arrived, the device waits. Times of instructions are the compiler's own estimates
(cycles), or bytes and operations over published rates where it makes none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxmoe.aot.chips import Chip
from jaxmoe.aot.collectives import Collective, collectives_of
from jaxmoe.aot.network import Network
from jaxmoe.aot.program import Instruction, Program

# Operations that only name what is there, or that the compiler counts elsewhere.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "partition-id", "replica-id", "opt-barrier", "copy-start"),
        *("copy-done", "slice-start", "slice-done", "async-start", "async-update"),
        *("async-done", "send", "recv"),
    )
)


class Event(NamedTuple):
    """Something that takes time, in seconds from the start of its computation."""

    lane: str  # 'compute', 'wait', or the axes of a collective
    begin: float
    end: float
    label: str


@dataclasses.dataclass(frozen=True)
class Timed:
    """One run of a computation.

    Attributes:
      seconds: from its start to its end.
      compute: seconds of that in which it computes.
      transfers: (collective, seconds hidden, times it runs) of all that it runs.
      events: of its own instructions, in order.
    """

    seconds: float
    compute: float
    transfers: tuple[tuple[Collective, float, float], ...]
    events: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """On what a program is timed.

    Attributes:
      program: the program.
      network: where its devices are.
      mesh: axis -> devices along it.
      even_rows: rows that the experts of a device get when the load is even: kernels
        over ragged rows are timed with so many, whatever room there is.
      ticks: number of branches of a tick; a loop around such a conditional is timed by
        `of_ticks`.
      parts: named scopes of what runs beside the branch in some ticks only.
      of_ticks: (the loop's body timed without its branches and parts, the branches, the
        parts by name) -> all ticks.
    """

    program: Program
    network: Network
    mesh: dict[str, int]
    even_rows: int
    ticks: int = 0
    parts: Collection[str] = ()
    of_ticks: Callable[[Timed, list[Timed], dict[str, Timed]], Timed] | None = None

    @property
    def chip(self) -> Chip:
        return self.network.chip

    @functools.cache  # noqa: B019  a machine lives for one report
    def time(self, computation: str, inside_ticks: bool = False) -> Timed:
        """Times one run of a computation.

        Args:
          computation: its name.
          inside_ticks: leaves out the branches of a tick and its parts.
        """
        instructions = self.program.computations[computation]
        found = collectives_of(self.program, computation, self.network, self.mesh)
        clock = _Clock()
        for place, instruction in enumerate(instructions):
            here = [c for c in found if c.begin == place and c.is_async]
            for c in here:
                clock.start(c)
            for c in (c for c in found if c.end == place):
                clock.wait(c) if c.is_async else clock.exchange(c)
            inner, turns = self._inner(instruction, inside_ticks)
            if inner:
                clock.run(inner, turns, instruction)
            elif not here:
                label = instruction.scope or instruction.name
                clock.compute(self.seconds_of(instruction), label)
        return clock.result()

    def _inner(self, instruction: Instruction, inside_ticks: bool):
        """(the time of what an instruction runs, how often), if it runs something."""
        if inside_ticks and self._apart(instruction):
            return None, 1
        if instruction.opcode == "while":
            body = instruction.computation("body")
            if switch := self._switch(body):
                return self._all_ticks(body, switch), 1
            return self.time(body), self.program.turns(instruction) or 1
        if instruction.opcode == "call":
            return self.time(instruction.called[0]), 1
        if instruction.opcode == "conditional":
            branches = [self.time(name) for name in instruction.called]
            return max(branches, key=lambda timed: timed.seconds), 1
        return None, 1

    def _apart(self, instruction: Instruction) -> str:
        """The part that an instruction of a tick is, 'branch' if it is the switch; or
        ''."""
        if (
            instruction.opcode == "conditional"
            and len(instruction.called) == self.ticks
        ):
            return "branch"
        if instruction.opcode not in ("conditional", "while"):
            return ""
        return next((s for s in instruction.scope.split("/") if s in self.parts), "")

    def _switch(self, body: str) -> Instruction | None:
        """The conditional that chooses between the branches of a tick, if a computation
        is the body of the loop over ticks."""
        for instruction in self.program.computations[body] if self.ticks else ():
            if self._apart(instruction) == "branch":
                return instruction
        return None

    def _all_ticks(self, body: str, switch: Instruction) -> Timed:
        parts: dict[str, list[tuple[Timed, float]]] = collections.defaultdict(list)
        for instruction in self.program.computations[body]:
            name = self._apart(instruction)
            inner, turns = self._inner(instruction, False)
            if name and inner and instruction is not switch:
                parts[name].append((inner, turns))
        branches = [self.time(name) for name in switch.called]
        assert self.of_ticks is not None
        timed = {name: add_up(runs) for name, runs in parts.items()}
        return self.of_ticks(self.time(body, True), branches, timed)

    def seconds_of(self, instruction: Instruction) -> float:
        """How long one instruction computes."""
        if cycles := instruction.cycles:
            return self._worked(instruction) * cycles / self.chip.clock
        if instruction.opcode in _FREE or "-done" in instruction.opcode:
            return 0.0
        if instruction.target == "tpu_custom_call":
            return self._kernel(instruction)
        if instruction.opcode in ("while", "conditional"):
            return 0.0
        if instruction.opcode == "custom-call" and "gemm" not in instruction.target:
            return 0.0
        made = sum(array.bytes for array in instruction.results)
        if self.chip.clock:  # products have estimates; what has none moves bytes
            return 2 * made / self.chip.memory_rate
        products = sum(map(self._product, self._products(instruction)))
        given = sum(
            array.bytes
            for name in instruction.operands
            for array in self._results.get(name, ())
        )
        return max(products / self.chip.flops, (given + made) / self.chip.memory_rate)

    def _products(self, instruction: Instruction) -> list[Instruction]:
        """The matrix products that one instruction is made of."""
        if instruction.opcode in ("custom-call", "dot"):
            return [instruction]
        if instruction.opcode != "fusion":
            return []
        called = instruction.called
        return [
            i
            for name in called
            for i in self.program.reached(name)
            if i.opcode == "dot"
        ]

    def _product(self, product: Instruction) -> float:
        """Operations of [.., m, k] x [.., k, n] -> [.., m, n], in any order."""
        shapes = [
            array.shape
            for name in product.operands[:2]
            for array in self._results.get(name, ())[:1]
        ]
        shapes += [product.results[0].shape] if product.results else []
        if len(shapes) < 3:
            return 0.0
        batch = shapes[0][0] if all(len(shape) > 2 for shape in shapes) else 1
        if any(shape[0] != batch for shape in shapes):
            batch = 1
        size = math.prod(math.sqrt(math.prod(shape)) for shape in shapes)
        return 2.0 * size / math.sqrt(batch)

    def _worked(self, instruction: Instruction) -> float:
        """Share of the estimated work that is done: a masked product skips the blocks
        whose rows belong to another expert, or to none, and the estimate has them."""
        if "iteration_skipper_mode" not in instruction.text:
            return 1.0
        for name in instruction.operands:
            for array in self._results.get(name, ()):
                if array.dtype == "pred" and len(array.shape) == 2:
                    return min(1.0, self.even_rows / math.prod(array.shape))
        return 1.0

    def _kernel(self, instruction: Instruction) -> float:
        """A product of ragged rows with the weights of experts."""
        if "ragged" not in instruction.name or "metadata" in instruction.name:
            return 0.0
        shapes = [a.shape for a in self._float_operands(instruction)]
        shapes += [a.shape for a in instruction.results]
        weights = next((s for s in shapes if len(s) == 3), None)
        rows = max((s[0] for s in shapes if len(s) == 2), default=0)
        if weights is None or not rows:
            return 0.0
        rows = min(rows, self.even_rows)
        _, K, N = weights
        moved = 2 * (math.prod(weights) + rows * (K + N))
        return max(2.0 * rows * K * N / self.chip.flops, moved / self.chip.memory_rate)

    def _float_operands(self, instruction: Instruction):
        results = self._results
        for name in instruction.operands:
            for array in results.get(name, ()):
                if array.dtype in ("bf16", "f32"):
                    yield array

    @functools.cached_property
    def _results(self):
        return {
            i.name: i.results
            for instructions in self.program.computations.values()
            for i in instructions
        }

    def __hash__(self) -> int:
        return id(self)


class _Clock:
    """Time as it passes in one computation."""

    def __init__(self):
        self._now = self._computed = 0.0
        self._free: dict[str, float] = {}  # axes -> when their links are free
        self._flying: dict[int, tuple[float, float]] = {}
        self._transfers: list[tuple[Collective, float, float]] = []
        self._events: list[Event] = []

    def compute(self, seconds: float, label: str) -> None:
        if seconds:
            self._events.append(Event("compute", self._now, self._now + seconds, label))
        self._now += seconds
        self._computed += seconds

    def start(self, collective: Collective) -> None:
        begin = max(self._now, self._free.get(collective.axis, 0.0))
        arrives = begin + collective.seconds
        self._free[collective.axis] = arrives
        self._flying[id(collective)] = arrives, self._computed
        self._events.append(Event(collective.axis, begin, arrives, collective.kind))

    def wait(self, collective: Collective) -> None:
        arrives, computed = self._flying.pop(id(collective))
        hidden = min(collective.seconds, self._computed - computed)
        self._transfers.append((collective, hidden, 1.0))
        self._wait_until(arrives)

    def exchange(self, collective: Collective) -> None:
        """A synchronous one: nothing else happens."""
        self.start(collective)
        self.wait(collective)

    def run(self, timed: Timed, turns: int, instruction: Instruction) -> None:
        begin = self._now
        self._now += turns * timed.seconds
        self._computed += turns * timed.compute
        self._transfers += [(c, h, n * turns) for c, h, n in timed.transfers]
        label = f"{instruction.opcode} x{turns}"
        self._events.append(Event("compute", begin, self._now, label))

    def _wait_until(self, arrives: float) -> None:
        if arrives > self._now:
            self._events.append(Event("wait", self._now, arrives, "waits"))
            self._now = arrives

    def result(self) -> Timed:
        return Timed(
            self._now, self._computed, tuple(self._transfers), tuple(self._events)
        )


def add_up(parts: Sequence[tuple[Timed, float]], seconds: float | None = None) -> Timed:
    """Several runs as one: (timed, how often); `seconds` where they overlap."""
    return Timed(
        sum(t.seconds * n for t, n in parts) if seconds is None else seconds,
        sum(t.compute * n for t, n in parts),
        tuple((c, h, m * n) for t, n in parts for c, h, m in t.transfers),
    )
