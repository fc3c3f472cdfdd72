# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe doctor`: versions, devices, flags, disk, and what is wrong.

jaxmoe doctor [--workdir=DIR] [--timeout=SECONDS] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxmoe import __version__, doctor
from jaxmoe.config_base import mistake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--workdir", default=".")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Prints what there is, then what is wrong, in words.

    Returns:
      The exit code, 0, also if something is wrong.

    Raises:
      ConfigError: for a mistake in the options.
    """
    if not options.timeout > 0:
        raise mistake(
            f"--timeout={options.timeout:g}",
            "it is the time in seconds that JAX has to find its devices",
            "Set --timeout=60",
        )
    machine = doctor.this_machine(Path(options.workdir), options.timeout)
    found = {"jaxmoe": __version__, **doctor.examine(machine)}
    _print(found)
    if options.json:
        print(json.dumps(found))
    return 0


def _print(found: dict[str, Any]) -> None:
    _row("jaxmoe", found["jaxmoe"])
    _row("python", found["python"])
    for name, version in found["versions"].items():
        _row(name, version)
    _row("platform", found["platform"] or "none found")
    for device in found["devices"]:
        memory = device["memory"]
        size = f", {memory / 1e9:.1f} GB" if memory else ""
        _row(f"device {device['id']}", f"{device['kind']}{size}")
    here = len(found["devices"])
    _row("devices", f"{found['device_count']}, of which {here} here")
    _row("processes", found["processes"])
    for name, value in found["environment"].items():
        _row(name, value or "not set")
    if found["host_memory"]:
        _row("memory of the host", f"{found['host_memory'] / 1e9:.1f} GB")
    _row("processors", found["processors"])
    _row("free disk", f"{found['free_bytes'] / 1e9:.1f} GB in {found['folder']}")
    for problem in found["problems"]:
        print(f"\nproblem: {problem}")
    if not found["problems"]:
        print("\nno problem found")


def _row(name: str, value: object) -> None:
    print(f"{name:20} {value}")
