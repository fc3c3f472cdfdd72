# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The collectives of a scheduled program, whichever way they are written.

A collective stands as one instruction (synchronous), as a pair of `-start` and `-done`,
inside a computation that `async-start` runs, or, on TPU, in fusions: one holds it and a
custom call `AsyncCollectiveStart`, others carry it along beside their own work, a last
one has `AsyncCollectiveDone`. Between slices it is a `send` and a `recv` by way of the
hosts, which know by an attribute what they are part of.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jaxmoe.aot.network import Network, axis_of
from jaxmoe.aot.program import Instruction, Program

KINDS = (
    *("all-to-all", "ragged-all-to-all", "all-gather", "all-reduce"),
    *("reduce-scatter", "collective-permute", "collective-broadcast"),
)


_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a computation.

    Attributes:
      kind: out of `KINDS`.
      axis: mesh axes along which its members differ, 'data,expert'.
      bytes: the larger of what a device gives and what it gets. Of a ragged exchange,
        the smaller of its two buffers: one has just what there is, the other has room
        for all that could come.
      seconds: how long it takes by itself.
      scope: where in the traced program it comes from.
      begin, end: places in the order of the computation: where it is started, and where
        it is waited for. The same for a synchronous one.
    """

    kind: str
    axis: str
    bytes: int
    seconds: float
    scope: str
    begin: int
    end: int

    @property
    def is_async(self) -> bool:
        return self.end > self.begin


def collectives_of(
    program: Program, computation: str, network: Network, mesh: dict[str, int]
) -> list[Collective]:
    """Those of one computation; not those of what its loops and branches run.

    Args:
      program: the program.
      computation: its name.
      network: where the devices are.
      mesh: axis -> devices along it.
    """
    instructions = program.computations[computation]
    sizes = {i.name: sum(a.bytes for a in i.results) for i in instructions}
    found: list[Collective] = []
    flying: dict[str, tuple[int, Instruction, dict[str, int]]] = {}

    def add(inside: Instruction, sizes: dict[str, int], begin: int, end: int):
        found.append(_collective(inside, sizes, network, mesh, begin, end))

    for place, instruction in enumerate(instructions):
        opcode = instruction.opcode
        begins, ends = _way(program, instruction)
        if begins is not None:
            inside, inner = begins
            flying[instruction.name] = (place, inside, inner or sizes)
        elif ends:
            for begin, inside, inner in _landing(instruction, flying):
                add(inside, inner, begin, place)
        elif opcode in KINDS:
            add(instruction, sizes, place, place)
        else:
            _pass_on(instruction, flying)
    return [*found, *_between_slices(instructions, network, mesh)]


def _between_slices(
    instructions: Sequence[Instruction], network: Network, mesh: dict[str, int]
) -> Iterator[Collective]:
    """What goes from slice to slice, from each `send` to the end of its `recv`."""
    sent: dict[str, tuple[int, Instruction]] = {}
    received = {i.name: i for i in instructions if i.opcode == "recv"}
    for place, instruction in enumerate(instructions):
        meeting = _MEETING.search(instruction.text)
        if instruction.opcode == "send" and meeting:
            sent[meeting[1]] = place, instruction
    for place, instruction in enumerate(instructions):
        recv = received.get((instruction.operands or [""])[0])
        if instruction.opcode != "recv-done" or recv is None:
            continue
        kind, meeting = _BETWEEN.search(recv.text), _MEETING.search(recv.text)
        if not kind or not meeting or meeting[1] not in sent:
            continue
        begin, send = sent[meeting[1]]
        name = kind[1].lower().replace("_", "-")
        name = name if name in KINDS else "collective-permute"
        size = max(send.results[0].bytes, recv.results[0].bytes)
        groups = network.across_slices()
        seconds = (
            network.permute([(groups[0][0], groups[0][1])], size)
            if name == "collective-permute"
            else _seconds(name, network, groups, size)
        )
        axis = axis_of(groups, mesh)
        yield Collective(name, axis, size, seconds, send.scope, begin, place)


Start = tuple[Instruction, dict[str, int] | None]


def _way(program: Program, instruction: Instruction) -> tuple[Start | None, bool]:
    """(what is started here, whether something is waited for)."""
    opcode = instruction.opcode
    if opcode.endswith("-start") and opcode.removesuffix("-start") in KINDS:
        return (instruction, None), False
    if opcode.endswith("-done") and opcode.removesuffix("-done") in KINDS:
        return None, True
    if opcode not in ("fusion", "async-start", "async-done", "async-update"):
        return None, False
    inner = [i for name in instruction.called for i in program.computations[name]]
    inside = [i for i in inner if i.opcode in KINDS]
    targets = {i.target for i in inner if i.opcode == "custom-call"}
    if opcode == "async-done" or "AsyncCollectiveDone" in targets:
        return None, opcode == "async-done" or bool(inside)
    if inside and (opcode == "async-start" or "AsyncCollectiveStart" in targets):
        sizes = {i.name: sum(a.bytes for a in i.results) for i in inner}
        return (inside[0], sizes), False
    return None, False


def _landing(instruction: Instruction, flying: dict) -> list[tuple]:
    """What was started and is waited for by this instruction."""
    found = [flying[name] for name in instruction.operands if name in flying]
    landed = {id(entry[1]): entry for entry in found}
    for name in [n for n, entry in flying.items() if id(entry[1]) in landed]:
        del flying[name]
    return list(landed.values())


def _pass_on(instruction: Instruction, flying: dict) -> None:
    """A tuple's element, or a fusion that carries a collective along, stands for it."""
    if instruction.opcode not in ("get-tuple-element", "fusion", "tuple", "bitcast"):
        return
    for name in instruction.operands:
        if name in flying:
            flying[instruction.name] = flying[name]
            return


def _collective(
    instruction: Instruction,
    sizes: dict[str, int],
    network: Network,
    mesh: dict[str, int],
    begin: int,
    end: int,
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    results = [array.bytes for array in instruction.results]
    given = [sizes.get(name, 0) for name in instruction.operands]
    if kind == "ragged-all-to-all":
        size = min(given[:2])
    elif instruction.opcode.endswith("-start") and kind != "all-reduce":
        # The result of a start holds its operands, and small flags, too.
        size = max(sum(given), max(results))
    else:
        size = max(sum(given), sum(results))
    groups, pairs = instruction.groups, instruction.pairs
    if kind == "collective-permute":
        axis = axis_of([pairs[0]] if pairs else [[0]], mesh)
        seconds = network.permute(pairs, size)
    else:
        groups = groups or [list(range(len(network.slices)))]
        axis = axis_of(groups, mesh)
        seconds = _seconds(kind, network, groups, size)
    return Collective(kind, axis, size, seconds, instruction.scope, begin, end)


def _seconds(
    kind: str, network: Network, groups: Sequence[Sequence[int]], size: int
) -> float:
    if kind in ("all-to-all", "ragged-all-to-all"):
        return network.exchange(groups, size)
    times = 2 if kind == "all-reduce" else 1
    return times * network.gather(groups, size)
