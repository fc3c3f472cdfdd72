# SPDX-License-Identifier: Apache-2.0
"""Programs compiled for TPU slices that are not there, and what is in them."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import pytest
from jax.sharding import Mesh

from jaxmoe.aot.topology import topology, without_cache
from jaxmoe.config import Config
from jaxmoe.mesh import Sizes
from jaxmoe.train_step import Setup

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)


class Collective(NamedTuple):
    """One collective of a compiled program."""

    kind: str
    dtype: str  # of its first result, as HLO writes it
    dims: tuple[int, ...]
    starts: bool  # asynchronous: its end is another instruction
    groups: str  # numbers of the devices that take part, as HLO writes them


@functools.lru_cache
def topology_mesh(name: str, data: int, expert: int, pipe: int = 1) -> Mesh:
    """A mesh over the chips of a slice such as 'v5e:2x4'; skips without libtpu."""
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    return topology(name).mesh(Sizes(data, expert, pipe, ""))


@functools.lru_cache
def compiled_step(config: Config, mesh: Mesh, vocab_size: int) -> str:
    """The scheduled program of the train step."""
    setup = Setup(config, mesh, vocab_size)
    with without_cache():
        return setup.traced_step().lower().compile().as_text()


def collectives(text: str) -> list[Collective]:
    """Every collective of a program; a start and its done are one."""
    found = []
    pattern = r"= \(*(\w+)\[([\d,]*)\].*? (" + "|".join(KINDS) + r")(-start)?\("
    for line in text.splitlines():
        if match := re.search(pattern, line):
            dims = tuple(int(n) for n in match[2].split(",") if n)
            groups = re.search(r"replica_groups=(\S+?}}|\S+?\]),", line)
            start, text = bool(match[4]), groups[1] if groups else ""
            found.append(Collective(match[3], match[1], dims, start, text))
    return found
