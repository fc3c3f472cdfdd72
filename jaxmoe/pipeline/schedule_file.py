# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Schedules in CSV files: one line per rank, one cell per operation.

    0F5        forward of microbatch 5 in stage 0; the kinds are F, B, Bi and W
    0F5&7B2    that forward overlapped with a backward

The notation is torchtitan's, but for the last.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re

from jaxmoe.config_base import ConfigError, mistake
from jaxmoe.pipeline.schedule import Operation, Schedule


def to_csv(schedule: Schedule) -> str:
    """One line per rank, one cell per operation: stage, kind, microbatch.

    '0F5' is the forward of microbatch 5 in stage 0, '0F5&7B2' an F&B. `from_csv` reads
    it back to an equal value.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.ranks)
    return text.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """Reads what `to_csv` writes, and checks it.

    Empty cells are passed over, and I stands for Bi, so that files of torchtitan's
    unidirectional schedules can be read. The layout follows from the stages that the
    ranks hold.

    Args:
      text: The content of the file.
      name: Of the schedule, also in messages.

    Raises:
      ConfigError: for a cell that is no operation, stages that fit no layout, or an
        operation that is missing, double, or on a rank which does not hold its stage.
    """
    rows = [
        [cell.strip() for cell in row if cell.strip()]
        for row in csv.reader(io.StringIO(text))
    ]
    parsed = [[_parts(cell, name) for cell in row] for row in rows if row]
    found = {part for row in parsed for cell in row for part in cell}
    if not found:
        raise mistake(
            f"{name} has no operations",
            "a schedule has one line per rank, such as 0F0,0F1,0B0,0B1",
            "`jaxmoe schedule 1f1b --ranks=2 --microbatches=4 --csv=FILE` writes one",
        )
    stages = max(stage for _, stage, _ in found) + 1
    microbatches = max(microbatch for _, _, microbatch in found) + 1
    first = {stage for cell in parsed[0] for _, stage, _ in cell}
    layout = "one_way" if len(first) == 1 else "both_ways"
    if stages == 2 * len(parsed):
        layout = "v"
    shape = Schedule(name, layout, microbatches, tuple(() for _ in parsed))
    if stages != shape.num_stages:
        raise mistake(
            f"{name} has {stages} stages on {len(parsed)} ranks",
            "a pipeline has one stage per rank, or two in a V",
            f"Give it {stages} lines, one per rank",
        )
    ranks = tuple(tuple(_operation(cell, shape) for cell in row) for row in parsed)
    schedule = dataclasses.replace(shape, ranks=ranks)
    check_complete(schedule)
    return schedule


def check_complete(schedule: Schedule) -> None:
    """Checks that every stage has one F, one Bi and one W per microbatch, in its place.

    A B counts as both backwards. Order is not looked at: `simulate` tells a deadlock.

    Raises:
      ConfigError: naming the first operation that is missing, double or misplaced.
    """
    left = {
        (kind, stage, microbatch): 1
        for kind in ("F", "Bi", "W")
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    for rank, line in enumerate(schedule.ranks):
        for operation in line:
            ways = [part.direction for part in operation.parts]
            if schedule.num_directions == 2 and ways in ([0, 0], [1, 1]):
                rule = "an F&B overlaps one direction with the other"
                raise _wrong(schedule, str(operation), rule)
        for part in (part for operation in line for part in operation.parts):
            home = schedule.rank_of(part.stage, part.direction)
            if home != rank:
                raise _wrong(
                    schedule, f"{part} on rank {rank}", f"it belongs to rank {home}"
                )
            for kind in ("Bi", "W") if part.kind == "B" else (part.kind,):
                key = (kind, part.stage, part.microbatch)
                if left[key] == 0:
                    raise _wrong(
                        schedule, f"a second {kind} in {part}", "each is done once"
                    )
                left[key] = 0
    for (kind, stage, microbatch), missing in left.items():
        if missing:
            raise _wrong(
                schedule,
                f"no {stage}{kind}{microbatch}",
                "every stage has one F, one Bi and one W (or one B) per microbatch",
            )


def _wrong(schedule: Schedule, fact: str, rule: str) -> ConfigError:
    return mistake(
        f"{schedule.name} has {fact}", rule, "Correct the file, or name a built-in one"
    )


def _parts(cell: str, name: str) -> tuple[tuple[str, int, int], ...]:
    """The (kind, stage, microbatch) of a cell."""
    found = [re.fullmatch(r"(\d+)(F|Bi|I|B|W)(\d+)", part) for part in cell.split("&")]
    parts = tuple(
        ("Bi" if match[2] == "I" else match[2], int(match[1]), int(match[3]))
        for match in found
        if match
    )
    kinds = tuple(kind for kind, _, _ in parts)
    if len(parts) < len(found) or (len(parts) > 1 and kinds != ("F", "B")):
        raise mistake(
            f"{name}: {cell!r} is no operation",
            "a cell is stage, kind and microbatch, with the kinds F, B, Bi and W, or a"
            " forward and a backward joined by &",
            "Write it like 0F5, 3Bi2 or 0F5&7B2",
        )
    return parts


def _operation(parts: tuple[tuple[str, int, int], ...], shape: Schedule) -> Operation:
    first, *second = (
        Operation(kind, shape.direction_of(stage, microbatch), stage, microbatch)
        for kind, stage, microbatch in parts
    )
    if not second:
        return first
    return dataclasses.replace(first, kind="F&B", backward=second[0])
