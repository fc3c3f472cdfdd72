# SPDX-License-Identifier: Apache-2.0
"""Floor 0. A compiled program, read from its scheduled HLO text.

Instructions of a computation stand in the order in which the device starts them, since
the text is that of a scheduled module.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERATION = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(true|false)_computation=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[^\s]*)[, ]")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of a result."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _BYTES.get(self.dtype, 4) * math.prod(self.shape)


class Instruction:
    """One line of a computation.

    Attributes:
      name: without '%'.
      opcode: as HLO writes it, 'fusion', 'all-to-all-start', ...
      results: the arrays of its result, a tuple's in order.
      operands: names of the instructions that it reads.
      text: the line behind its operands: attributes.
    """

    __slots__ = ("name", "opcode", "operands", "results", "text")

    def __init__(self, name: str, line: str):
        shape, rest = _split_shape(line)
        operation = _OPERATION.match(rest)
        self.name = name
        self.opcode = operation[1] if operation else ""
        inside, self.text = _split_call(rest[operation.end() :] if operation else "")
        self.operands = _NAME.findall(inside)
        if not self.operands and self.opcode not in ("constant", "parameter"):
            self.operands = re.findall(r"[\w.\-]+", inside)
        self.results = [
            Array(dtype, tuple(int(n) for n in dims.split(",") if n))
            for dtype, dims in _ARRAY.findall(shape)
        ]

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it makes none."""
        found = _CYCLES.search(self.text)
        return int(found[1]) if found else 0

    @property
    def scope(self) -> str:
        """Where in the traced program it comes from."""
        found = _SCOPE.search(self.text)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = _TARGET.search(self.text)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; of a conditional, in order."""
        if branches := _BRANCHES.search(self.text):
            return re.findall(r"[\w.\-]+", branches[1])
        if two := dict(_TWO_BRANCHES.findall(self.text)):
            return [two["false"], two["true"]]
        return _CALLED.findall(self.text)

    def computation(self, role: str) -> str:
        """Name of the one computation that it runs as its 'body' or 'condition'."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.text)
        return found[1] if found else ""

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the devices of every group that exchanges; [] for all in one."""
        found = _GROUPS.search(self.text + " ")
        return read_groups(found[1]) if found else []

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(from, to) of a permute."""
        found = _PAIRS.search(self.text)
        pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
        return [(int(a), int(b)) for a, b in pairs]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a module.

    Attributes:
      computations: name -> instructions in the order of the schedule.
      entry: name of the first one.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def turns(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; None where the data decide."""
        if known := _TURNS.search(loop.text):
            return int(known[1])
        limits = self._constants(loop.computation("condition"))
        return max(limits) if limits else None

    def _constants(self, computation: str) -> list[int]:
        found = []
        for instruction in self.computations.get(computation, ()):
            if instruction.opcode == "constant" and instruction.text.isdigit():
                found.append(int(instruction.text))
            for called in instruction.called:
                found += self._constants(called)
        return found

    def reached(self, computation: str) -> Iterator[Instruction]:
        """Every instruction of a computation and of what it runs."""
        for instruction in self.computations.get(computation, ()):
            yield instruction
            for called in instruction.called:
                yield from self.reached(called)


def read_program(text: str) -> Program:
    """Reads a module.

    Args:
      text: what `compiled.as_text()` gives.

    Raises:
      ValueError: if it is not an HLO module.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is None:
            if head := _HEAD.match(line):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            current.append(Instruction(found[2], line[found.end() :]))
    if not entry:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return Program(computations, entry)


def read_groups(text: str) -> list[list[int]]:
    """`{{0,1},{2,3}}` or `[2,2]<=[4]` -> groups of device numbers."""
    if text.startswith("{"):
        return [
            [int(n) for n in group.split(",")]
            for group in re.findall(r"\{([\d,]+)\}", text)
        ]
    found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"not groups of devices: {text[:80]!r}")
    shape, source, order = found.groups()
    numbers = lambda part: [int(n) for n in part.split(",")]  # noqa: E731
    grid = np.arange(math.prod(numbers(source))).reshape(numbers(source))
    if order:
        grid = grid.transpose(numbers(order))
    return grid.reshape(numbers(shape)).tolist()


def _split_shape(line: str) -> tuple[str, str]:
    """The type of a result, and the rest of the line."""
    if not line.startswith("("):
        shape, _, rest = line.partition(" ")
        return shape, rest
    end = _closing(line)
    return line[:end], line[end:]


def _split_call(rest: str) -> tuple[str, str]:
    """What stands between the parentheses of an operation, and what follows."""
    end = _closing("(" + rest) - 2
    inside, after = rest[:end], rest[end + 1 :]
    return ("", inside) if inside.isdigit() else (inside, after)


def _closing(text: str) -> int:
    """The place behind the parenthesis that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)
