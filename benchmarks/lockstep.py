# SPDX-License-Identifier: Apache-2.0
"""What lock-step costs: tables of ticks against ranks that wait for their inputs only.

    python benchmarks/lockstep.py [--ranks 2,4,8,16]

F = Bi = W = 1, with F&B = 3 and F&B = 2.4; no device is used. First come the two tables
of docs/pipeline.md. The last line is JSON:
  loss         F&B -> schedule -> ranks -> microbatches -> makespan in lock-step over
               the simulated one, less 1
  lower_s      seconds of the slowest lowering
  branches     the most distinct branches of a table
"""

import json
import sys
import time

from jaxmoe.pipeline.lower import TickTable, lower
from jaxmoe.pipeline.schedule import SCHEDULES, build
from jaxmoe.pipeline.simulate import Costs, simulate

TIMES = (2, 3, 4, 8)  # microbatches per rank
OVERLAPS = (3.0, 2.4)


def main() -> None:
    arguments = sys.argv[1:]
    ranks = [2, 4, 8, 16]
    if arguments[:1] == ["--ranks"]:
        ranks = [int(number) for number in arguments[1].split(",")]
    tables, slowest_s = lowered(ranks)
    print(loss_table(ranks, tables))
    print()
    print(size_table(ranks, tables))
    losses: dict = {}
    for (name, count, times, overlap), table in tables.items():
        by_ranks = losses.setdefault(f"{overlap:g}", {}).setdefault(name, {})
        by_ranks.setdefault(count, {})[times * count] = round(loss(table), 4)
    branches = max(len(table.branches) for table in tables.values())
    figures = {"loss": losses, "lower_s": round(slowest_s, 2), "branches": branches}
    print(json.dumps(figures))


def lowered(ranks: list[int]) -> tuple[dict, float]:
    """Tables by (schedule, ranks, microbatches per rank, F&B); the longest seconds."""
    tables, slowest_s = {}, 0.0
    for overlap in OVERLAPS:
        for name in SCHEDULES:
            for count in ranks:
                for times in TIMES:
                    schedule = build(name, count, times * count)
                    before_s = time.perf_counter()
                    table = lower(schedule, Costs(FB=overlap))
                    slowest_s = max(slowest_s, time.perf_counter() - before_s)
                    tables[name, count, times, overlap] = table
    return tables, slowest_s


def loss(table: TickTable) -> float:
    """Makespan in lock-step over the simulated one, less 1."""
    ideal = simulate(table.schedule, table.costs).makespan
    return table.lockstep_makespan / ideal - 1


def loss_table(ranks: list[int], tables: dict) -> str:
    heads = [f"M={times}R" for times in TIMES]
    more = [f"{head}, F&B={OVERLAPS[1]:g}" for head in heads]
    rows = [["schedule", "R", *heads, *more]]
    for name in SCHEDULES:
        for count in ranks:
            cells = [
                f"{100 * loss(tables[name, count, times, overlap]):.2f} %"
                for overlap in OVERLAPS
                for times in TIMES
            ]
            rows.append([f"`{name}`", str(count), *cells])
    return markdown(rows)


def size_table(ranks: list[int], tables: dict) -> str:
    """Of M = 4R and F&B = 3."""
    heads = ("ticks", "branches", "activations", "gradients", "stash", "deferred")
    rows = [["schedule", "R", *heads]]
    for name in SCHEDULES:
        for count in ranks:
            table = tables[name, count, 4, 3.0]
            slots = table.slots
            sizes = (slots.activations, slots.gradients, slots.stash, slots.deferred)
            numbers = [count, table.ticks, len(table.branches), *sizes]
            rows.append([f"`{name}`", *map(str, numbers)])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


if __name__ == "__main__":
    main()
