# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe schedule`: times, bubble, memory and timeline of a schedule.

    jaxmoe schedule NAME --ranks=R --microbatches=M [--costs=F=1,Bi=1,W=1,FB=3]
                    [--figure=FILE] [--csv=FILE] [--json]

NAME is a built-in schedule, or a CSV file as --csv writes it, which needs no numbers.
Nothing of JAX is imported.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from jaxmoe.config_base import mistake, read_text, shown_path
from jaxmoe.pipeline import draw, schedule_file
from jaxmoe.pipeline.lower import TickTable, lower
from jaxmoe.pipeline.schedule import KINDS, SCHEDULES, Schedule, build, check_numbers
from jaxmoe.pipeline.simulate import Timeline, parse_costs, simulate

_MOST_OPERATIONS = 100_000  # ranks x microbatches; more takes minutes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("name")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--costs", default="")
    parser.add_argument("--figure", default="")
    parser.add_argument("--csv", default="")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints figures and timeline, writes the files that were asked for.

    Returns:
      The exit code, 0.

    Raises:
      ConfigError: for a mistake in the options or in a CSV file.
    """
    costs = parse_costs(options.costs)
    if options.figure:
        draw.check_figure(options.figure)
    schedule = _schedule(options)
    timeline = simulate(schedule, costs)
    table = lower(schedule, costs)
    if options.csv:
        _write(options.csv, schedule_file.to_csv(schedule))
    if options.figure:
        draw.write_figure(timeline, options.figure)
    width = shutil.get_terminal_size((100, 0)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(draw.text(timeline, width=width, colour=colour))
    figures = _figures(timeline, table)
    _print_figures(timeline, figures)
    if options.json:
        print(json.dumps(figures))
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    """The schedule that is named."""
    name, ranks, microbatches = options.name, options.ranks, options.microbatches
    if name not in SCHEDULES and (name.endswith(".csv") or os.path.isfile(name)):
        rule = "a schedule is one of the built-in ones or a CSV file"
        text = read_text(name, rule, "Name a file that exists, or dualpipe")
        schedule = schedule_file.from_csv(text, shown_path(name))
        for option, given, there in (
            ("--ranks", ranks, schedule.num_ranks),
            ("--microbatches", microbatches, schedule.num_microbatches),
        ):
            if given not in (None, there):
                raise mistake(
                    f"{option}={given} does not fit {shown_path(name)}",
                    f"the file has {there}",
                    f"Set {option}={there}, or leave it out",
                )
        return schedule
    if name not in SCHEDULES:
        return build(name, 1, 1)  # tells that there is none
    rule = f"{name} is built for a number of ranks and of microbatches"
    if ranks is None:
        remedy = "Set --ranks=8 --microbatches=20"
        raise mistake("--ranks is missing", rule, remedy)
    if microbatches is None:
        enough = 4 * max(ranks, 1)
        check_numbers(name, ranks, enough)
        raise mistake("--microbatches is missing", rule, f"Set --microbatches={enough}")
    if ranks * microbatches > _MOST_OPERATIONS:
        raise mistake(
            f"--ranks={ranks} x --microbatches={microbatches} is too large",
            f"their product is at most {_MOST_OPERATIONS}",
            "Set --ranks=16 --microbatches=128",
        )
    return build(name, ranks, microbatches)


def _figures(timeline: Timeline, table: TickTable) -> dict[str, Any]:
    """What --json prints."""
    operations = [
        collections.Counter(operation.kind for operation in line)
        for line in timeline.schedule.ranks
    ]
    return {
        "makespan": timeline.makespan,
        "bubble": round(timeline.bubble, 9),
        "peak_activations": max(timeline.peak_activations),
        "ticks": table.ticks,
        "lockstep_makespan": table.lockstep_makespan,
        "operations": [
            {kind: counts[kind] for kind in KINDS if counts[kind]}
            for counts in operations
        ],
    }


def _print_figures(timeline: Timeline, figures: dict[str, Any]) -> None:
    makespan, bubble = figures["makespan"], figures["bubble"]
    lockstep = figures["lockstep_makespan"]
    print(f"{'makespan':20} {makespan:g}")
    print(f"{'bubble':20} {bubble:g} ({bubble / makespan:.1%} of the makespan)")
    print(f"{'peak activations':20} {figures['peak_activations']}")
    print(f"{'ticks in lock-step':20} {figures['ticks']}")
    print(f"{'lock-step makespan':20} {lockstep:g} ({lockstep / makespan - 1:+.2%})")
    print("operations per rank")
    for rank, counts in enumerate(figures["operations"]):
        words = "  ".join(f"{kind} {number}" for kind, number in counts.items())
        print(f"  {f'rank {rank}':18} {words}")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise mistake(
            f"{shown_path(path)} cannot be written ({error.strerror})",
            "--csv names a file in a folder that exists and can be written",
            "Name another file",
        ) from error
