# SPDX-License-Identifier: Apache-2.0
"""Floor 7. The train step, compiled for a machine that is not there, and measured.

  Config, topology --Setup--> the step that training jits --trace, lower, compile-->
  scheduled program --memory, FLOPs, collectives, times--> Estimate

Nothing is run and no array is made: the state and the batch are shapes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from typing import Any

import numpy as np

from jaxmoe.aot.collectives import Collective
from jaxmoe.aot.flops import model_flops, step_flops
from jaxmoe.aot.program import Program, read_program
from jaxmoe.aot.timing import Machine, Timed, add_up
from jaxmoe.aot.topology import Topology, without_cache
from jaxmoe.config import Config
from jaxmoe.data.records import vocab_size
from jaxmoe.mesh import Sizes, resolve_sizes
from jaxmoe.pipeline.works import Work, parts_of_ticks
from jaxmoe.train_step import Setup

EXCHANGES = ("all-to-all", "ragged-all-to-all")
# Both ways in which libtpu says that a program needs too much memory.
_FULL = re.compile(
    r"(?:Used |HLO temporaries \()([\d.]+)([GMK])\)? (?:of|exceeds available)"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of a step that are alike, on a mean device.

    Attributes:
      kind, axis, asynchronous: see `Collective`.
      inside: the operation in which they stand: F, Bi, W, F&B, head, optimizer, ...
      bytes: of all of them in a step.
      count: how many, in a step.
      seconds: what they take, one after the other.
      hidden: of that, what has computation scheduled beside it.
    """

    kind: str
    axis: str
    asynchronous: bool
    inside: str
    bytes: float
    count: float
    seconds: float
    hidden: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What is known of a step before it runs.

    Attributes:
      topology: for which machine.
      sizes: the mesh.
      microbatches: of a step.
      compile_s: seconds of compilation here.
      bytes: of one device: arguments, temporaries and what is not given back in place.
      flops: operations of one device in a step.
      recomputed: share of them that the backward pass computes again.
      model_flops: operations that the model needs in a step, on all devices.
      timed: the step.
      rows: its collectives.
      kinds: operation of the pipeline -> (one run of it, runs in a step on a rank).
      assumed: what the times rest on.
    """

    topology: Topology
    sizes: Sizes
    microbatches: int
    tokens: int
    compile_s: float
    bytes: int
    flops: float = 0.0
    recomputed: float = 0.0
    model_flops: float = 0.0
    timed: Timed | None = None
    rows: tuple[Row, ...] = ()
    kinds: dict[str, tuple[Timed, float]] = dataclasses.field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    @property
    def chips(self) -> int:
        return len(self.topology.devices)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.topology.chip.memory

    @property
    def mfu(self) -> float:
        """Share of the peak rate that the model's own operations take."""
        peak = self.topology.chip.flops * self.chips
        return self.model_flops / (peak * self.timed.seconds) if self.timed else 0.0

    def hidden_fraction(self) -> dict[str, float]:
        """By operation, the share of the exchange of tokens that is hidden."""
        found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for row in self.rows:
            if row.kind in EXCHANGES and row.axis == "expert":
                for key in (row.inside, "step"):
                    found[key][0] += row.hidden
                    found[key][1] += row.seconds
        return {key: h / s for key, (h, s) in found.items() if s}


def estimate(config: Config, topology: Topology) -> Estimate:
    """Compiles the train step of a configuration for a machine, and measures it.

    Args:
      config: the configuration.
      topology: the machine.

    Raises:
      ConfigError: if the model does not fit the mesh.
    """
    sizes = resolve_sizes(config, len(topology.devices))
    mesh = topology.mesh(sizes)
    setup = Setup(config, mesh, vocab_size(config.data, config.model))
    traced = setup.traced_step()
    lowered = traced.lower()
    model = config.model
    known: dict[str, Any] = {
        "topology": topology,
        "sizes": sizes,
        "microbatches": setup.microbatches,
        "tokens": config.data.batch_size * model.sequence_length,
    }
    before = time.perf_counter()
    try:
        with without_cache():
            compiled = lowered.compile()
    except Exception as error:
        if found := _FULL.search(str(error)):
            known["bytes"] = int(float(found[1]) * _UNITS[found[2]])
            known["compile_s"] = time.perf_counter() - before
            return Estimate(**known)
        raise
    known["compile_s"] = time.perf_counter() - before
    known["bytes"] = _bytes(compiled.memory_analysis())
    known["model_flops"] = model_flops(config, setup.vocab_size)
    known["flops"] = _flops(setup, traced.jaxpr.jaxpr)
    if model.remat != "none":
        known["recomputed"] = 1 - _flops_without_remat(setup) / known["flops"]
    program = read_program(compiled.as_text() or "")
    return Estimate(**known, **_times(setup, topology, program))


def _bytes(memory: Any) -> int:
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def even_rows(setup: Setup) -> int:
    """Rows of a microbatch that the experts of a device get when all get as many."""
    config, mesh = setup.config, setup.mesh.shape
    tokens = config.data.batch_size * config.model.sequence_length
    tokens //= setup.microbatches * mesh["data"] * mesh["expert"]
    return tokens * config.moe.top_k


def _flops(setup: Setup, jaxpr: Any) -> float:
    pipelined = setup.pipelined
    heads, choices = 0, None
    if pipelined and pipelined.traced:
        choices = pipelined.traced.choices()
        heads = pipelined.table.schedule.num_microbatches
    return step_flops(
        jaxpr,
        devices=setup.mesh.size,
        even_rows=even_rows(setup),
        choices=choices,
        heads=heads,
    )


def _flops_without_remat(setup: Setup) -> float:
    config = setup.config
    model = dataclasses.replace(config.model, remat="none")
    other = Setup(
        dataclasses.replace(config, model=model), setup.mesh, setup.vocab_size
    )
    return _flops(other, other.traced_step().jaxpr.jaxpr)


def _times(setup: Setup, topology: Topology, program: Program) -> dict[str, Any]:
    network = topology.network(setup.mesh)
    kinds: dict[str, tuple[Timed, float]] = {}
    machine = Machine(program, network, dict(setup.mesh.shape), even_rows(setup))
    if setup.pipelined and setup.pipelined.traced:
        choices = setup.pipelined.traced.choices()
        ((_, works, work_of),) = choices  # a switch
        when = parts_of_ticks(setup.pipelined.table, choices)

        def of_ticks(outside: Timed, branches: list[Timed], parts: dict[str, Timed]):
            kinds.update(_by_kind(works, work_of, branches))
            if "head" in parts:
                kinds["head"] = parts["head"], float(when["head"].sum(0).mean())
            pairs = [(timed, when[name]) for name, timed in parts.items()]
            pairs += [(timed, work_of == i) for i, timed in enumerate(branches)]
            return _lock_step(outside, pairs)

        machine = dataclasses.replace(
            machine, ticks=len(works), parts=tuple(when), of_ticks=of_ticks
        )
    timed = machine.time(program.entry)
    of_branch = {
        id(c): kind for kind, (run, _) in kinds.items() for c, _, _ in run.transfers
    }
    return {
        "timed": timed,
        "rows": _rows(timed, of_branch),
        "kinds": kinds,
        "assumed": _assumptions(topology, setup),
    }


def _lock_step(outside: Timed, runs: list[tuple[Timed, np.ndarray]]) -> Timed:
    """All ticks: each lasts as long as its slowest rank; the rest is of a mean rank.

    Args:
      outside: what every tick runs on every rank.
      runs: what else is run, and where, [ticks, ranks].
    """
    seconds = sum(timed.seconds * where for timed, where in runs)
    parts = [(timed, float(where.sum(0).mean())) for timed, where in runs]
    ticks = len(runs[0][1])
    of_ranks = float(np.max(seconds, axis=1).sum())
    parts.append((outside, float(ticks)))
    return add_up(parts, ticks * outside.seconds + of_ranks)


def _by_kind(
    works: list[Work], work_of: np.ndarray, branches: list[Timed]
) -> dict[str, tuple[Timed, float]]:
    """Operation -> (a mean run, runs in a step on a mean rank)."""
    counts = np.bincount(work_of.ravel(), minlength=len(works))
    found: dict[str, list[tuple[Timed, float]]] = collections.defaultdict(list)
    for work, branch, count in zip(works, branches, counts.tolist(), strict=True):
        if work.kinds:
            found["&".join(work.kinds)].append((branch, float(count)))
    ranks = work_of.shape[1]
    result = {}
    for kind, runs in found.items():
        total = sum(n for _, n in runs)
        mean = add_up([(timed, n / total) for timed, n in runs])
        most = max(runs, key=lambda run: run[1])[0]
        result[kind] = dataclasses.replace(mean, events=most.events), total / ranks
    return result


def _rows(timed: Timed, of_branch: dict[int, str]) -> tuple[Row, ...]:
    found: dict[tuple, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    for c, hidden, times in timed.transfers:
        inside = of_branch.get(id(c)) or _operation(c)
        row = found[(c.kind, c.axis, c.is_async, inside)]
        for i, amount in enumerate((c.bytes, 1, c.seconds, hidden)):
            row[i] += amount * times
    rows = [Row(*key, *amounts) for key, amounts in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _operation(collective: Collective) -> str:
    """Where in the step a collective outside of the ticks stands, by its scopes."""
    scopes = collective.scope.split("/")
    for name in ("optimizer", "move", "head", "weights", "gradients", "ticks"):
        if name in scopes:
            return name
    if any("transpose" in scope for scope in scopes):
        return "B"
    return "F" if any("jvp" in scope for scope in scopes) else "other"


def _assumptions(topology: Topology, setup: Setup) -> tuple[str, ...]:
    chip = topology.chip
    found = [
        f"peak {chip.flops / 1e12:.0f} TFLOP/s, memory {chip.memory_rate / 1e9:.0f}"
        f" GB/s, a link {chip.link_rate / 1e9:.0f} GB/s in each direction, between"
        f" slices or hosts {chip.slice_rate / 1e9:.1f} GB/s per device (published)",
    ]
    if chip.clock:
        found.append(
            "computation takes the compiler's own estimates of cycles, at"
            f" {chip.clock / 1e9:.2f} GHz; products of ragged rows the peak rate, or"
            " the memory's if that is slower"
        )
    else:
        found.append(
            "computation takes its operations over the peak rate or its bytes over the"
            " memory's, whichever is slower; no kernel was run or tuned"
        )
    found.append(
        f"experts are loaded evenly: {even_rows(setup)} rows per device and microbatch"
    )
    found.append("collectives have no latency; loops that data end turn once")
    return tuple(found)
