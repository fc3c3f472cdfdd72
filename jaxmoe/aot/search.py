# SPDX-License-Identifier: Apache-2.0
"""Floor 7. Which mesh and how many microbatches are best, by compiling each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from jaxmoe import config_checks
from jaxmoe.aot.chips import GIB
from jaxmoe.aot.estimate import Estimate, estimate
from jaxmoe.aot.report import figures
from jaxmoe.aot.topology import Topology
from jaxmoe.config import Config, ConfigError
from jaxmoe.mesh import resolve_sizes


def search(config: Config, topology: Topology, *, as_json: bool = False) -> int:
    """Compiles every candidate, and prints them from the fastest that fits on.

    Args:
      config: the configuration. Sizes of its mesh that are given are kept, and so is
        a number of microbatches.
      topology: the machine.
      as_json: prints the ranking as one JSON object as the last line.

    Returns:
      The exit code, 0.
    """
    found = []
    for candidate in candidates(config, len(topology.devices)):
        result = estimate(candidate, topology)
        found.append(result)
        print(_line(result), flush=True)
    found.sort(key=_rank)
    print("\nfrom the fastest that fits:")
    for result in found:
        print(_line(result))
    if as_json:
        print(json.dumps({"ranking": [figures(result) for result in found]}))
    return 0


def candidates(config: Config, devices: int) -> Iterator[Config]:
    """Configurations with all three sizes, that the model and the batch allow."""
    given = config.mesh
    powers = [2**n for n in range(devices.bit_length())]
    for pipe in powers if given.pipe == "auto" else [given.pipe]:
        for expert in powers if given.expert == "auto" else [given.expert]:
            data, rest = divmod(devices, pipe * expert)
            if rest or (given.data != "auto" and given.data != data):
                continue
            mesh = dataclasses.replace(given, data=data, expert=expert, pipe=pipe)
            for microbatches in _microbatches(config, pipe):
                pipeline = dataclasses.replace(
                    config.pipeline, microbatches=microbatches
                )
                candidate = dataclasses.replace(config, mesh=mesh, pipeline=pipeline)
                try:
                    config_checks.check(candidate)
                    resolve_sizes(candidate, devices)
                except ConfigError:
                    continue
                yield candidate


def _microbatches(config: Config, pipe: int) -> list:
    given = config.pipeline.microbatches
    if pipe == 1 or given != "auto":
        return [given]
    return [2 * pipe, 4 * pipe]


def _rank(result: Estimate) -> tuple[bool, float]:
    seconds = result.timed.seconds if result.timed else float("inf")
    return not result.fits, seconds


def _line(result: Estimate) -> str:
    step = f"{result.timed.seconds:.4g} s" if result.timed else "not compiled"
    return (
        f"{result.sizes!s:36} {result.microbatches:4} microbatches"
        f" {result.bytes / GIB:7.2f} GiB {'fits' if result.fits else 'too big':8}"
        f" {step:12} MFU {result.mfu:.1%}"
    )
