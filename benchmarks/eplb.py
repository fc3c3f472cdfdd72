# SPDX-License-Identifier: Apache-2.0
"""Times the planning of expert placement, and measures its quality, on CPU.

    python benchmarks/eplb.py [--repetitions 20] [--quick] [--golden]

Loads are lognormal with sigma 1 in the logarithm. Compiled, with the load and the plan
before on the device; a figure is the median over the repetitions. --golden prints the
table of docs/eplb.md instead: the plans of `tests/golden/eplb.json` that are not as
good as the best known. The last line is JSON, times in ms:

  reference_hierarchical_ms
                  58 layers x 256 experts, 288 slots on 32 devices, 8 groups, 4 nodes;
                  claimed: at most 3
  reference_global_ms
                  320 slots on 64 devices; claimed: at most 6
  swap_ms         the slower of `swap_hierarchical_ms` and `swap_global_ms`, at the same
                  sizes; claimed: at most 20
  incremental_ms  288 slots on 32 devices, one group and node, after one step of a
                  drift (AR(1) of the logarithm, rho 0.95); claimed: at most 20
  incremental_moved, incremental_max_over_mean
                  share of the slots moved per rebalance, and the largest max/mean of a
                  layer, over 8 rebalances under this drift; claimed: at most 0.12 and
                  1.02
  swap_max_over_mean_hierarchical, swap_max_over_mean_global
                  mean over the layers
  rebalance_over_step
                  a rebalance (plan and move, to a load that was never seen) over a
                  training step of the default run, on 8 simulated devices with 4 spare
                  slots, medians taken in turns; claimed: less than 1
  reference_ms_by_layers
                  layers -> ms, 256 experts, 288 slots on 32 devices
  reference_ms_by_experts
                  experts -> ms, 58 layers, an eighth more slots, 32 devices
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import gin_config
from jaxmoe.data.loader import Loader
from jaxmoe.data.records import vocab_size
from jaxmoe.eplb.plan import max_over_mean, moved, rebalance_experts
from jaxmoe.mesh import make_mesh, resolve_sizes
from jaxmoe.model import placement_of, with_placement
from jaxmoe.rebalance import Rebalancer
from jaxmoe.train_step import Setup

DEFAULT_RUN = Path(__file__).parents[1] / "configs" / "m6_digits.gin"
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "eplb.json"
RHO = 0.95
REBALANCES = 8


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it")
    parser.add_argument("--golden", action="store_true", help="quality, golden loads")
    options = parser.parse_args()
    if options.golden:
        print(json.dumps(gaps()))
        return
    figures: dict[str, Any] = {}
    jax.config.update("jax_num_cpu_devices", 8)  # of which plans use one
    for part in (of_policies, of_incremental, of_run, by_layers, by_experts):
        found = part(options.quick, options.repetitions)
        print(found, flush=True)
        figures |= found
    print(json.dumps(figures))


def of_policies(quick: bool, repetitions: int) -> dict[str, Any]:
    layers, experts = (4, 32) if quick else (58, 256)
    hierarchical = (36, 8, 2, 4) if quick else (288, 8, 4, 32)
    everywhere = (40, 1, 1, 8) if quick else (320, 1, 1, 64)
    load_LE = next(drift(layers, experts))
    figures: dict[str, Any] = {}
    for name, sizes in (("hierarchical", hierarchical), ("global", everywhere)):
        for policy in ("reference", "swap"):
            plan = compiled(partial(rebalance_experts, policy=policy), sizes, load_LE)
            figures[f"{policy}_{name}_ms"] = median_ms(plan, (load_LE,), repetitions)
        found = plan(load_LE).physical_to_logical
        even_L = max_over_mean(load_LE, found, sizes[3])
        figures[f"swap_max_over_mean_{name}"] = float(even_L.mean())
    slower = max(figures["swap_hierarchical_ms"], figures["swap_global_ms"])
    return figures | {"swap_ms": slower}


def of_incremental(quick: bool, repetitions: int) -> dict[str, Any]:
    layers, experts = (4, 64) if quick else (58, 256)
    replicas, devices = (72, 8) if quick else (288, 32)
    loads = drift(layers, experts)
    load_LE = next(loads)
    sizes = (replicas, 1, 1, devices)
    before = rebalance_experts(load_LE, *sizes, policy="swap").physical_to_logical
    plan = compiled(of_previous, sizes, load_LE, before)
    times, shares, worst = [], [], []
    for _ in range(REBALANCES):
        load_LE = next(loads)
        times.append(median_ms(plan, (load_LE, before), repetitions))
        after = plan(load_LE, before).physical_to_logical
        shares.append(float(moved(after, before, devices).mean()) / replicas)
        worst.append(float(max_over_mean(load_LE, after, devices).max()))
        before = after
    return {
        "incremental_ms": statistics.median(times),
        "incremental_moved": statistics.mean(shares),
        "incremental_max_over_mean": max(worst),
    }


def of_run(quick: bool, repetitions: int) -> dict[str, Any]:
    del quick  # it is small
    slots = ["Balancer.interval=1", "Balancer.num_replicas=12"]
    config = gin_config.load((str(DEFAULT_RUN),), slots).config
    mesh = make_mesh(resolve_sizes(config, jax.device_count()))
    setup = Setup(config, mesh, vocab_size(config.data, config.model))
    step, rebalancer = setup.train_step(), Rebalancer(setup)
    loader = Loader(config.data, model=config.model, microbatches=setup.microbatches)
    batch = setup.put_batch(next(loader))
    loader.close()
    state = setup.initial_state()
    times: dict[str, list[float]] = {"step": [], "rebalance": []}
    random = np.random.default_rng(0)
    for turn in range(repetitions + 1):
        before_s = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        step_s = time.perf_counter() - before_s
        placement = placement_of(state.buffers)
        load_LE = random.lognormal(size=placement["load"].shape).astype(np.float32)
        placement = {**placement, "load": load_LE}
        buffers = with_placement(state.buffers, placement)
        state = dataclasses.replace(state, buffers=buffers)
        state = jax.block_until_ready(jax.device_put(state, setup.state_sharding))
        before_s = time.perf_counter()
        state, report = jax.block_until_ready(rebalancer(state))
        if turn:  # the first ones compile
            times["step"].append(step_s)
            times["rebalance"].append(time.perf_counter() - before_s)
            assert report.copies > 0
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"rebalance_over_step": medians["rebalance"] / medians["step"]}


def by_layers(quick: bool, repetitions: int) -> dict[str, Any]:
    times = {}
    for layers in (1, 4) if quick else (1, 12, 58, 120, 240):
        load_LE = next(drift(layers, 256))
        plan = compiled(rebalance_experts, (288, 1, 1, 32), load_LE)
        times[layers] = median_ms(plan, (load_LE,), repetitions)
    return {"reference_ms_by_layers": times}


def by_experts(quick: bool, repetitions: int) -> dict[str, Any]:
    times = {}
    for experts in (64, 128) if quick else (64, 128, 256, 512, 1024):
        load_LE = next(drift(4 if quick else 58, experts))
        slots = experts + max(experts // 8, 32)
        plan = compiled(rebalance_experts, (slots, 1, 1, 32), load_LE)
        times[experts] = median_ms(plan, (load_LE,), repetitions)
    return {"reference_ms_by_experts": times}


def gaps() -> dict[str, Any]:
    """Golden loads whose plan by `swap` is heavier than the best known one."""
    found: dict[str, Any] = {}
    print("| case | layer | public plan | `swap` | best known | proved |")
    print("|---|---|---|---|---|---|")
    for case in json.loads(GOLDEN.read_text("utf-8")):
        load_LE = np.asarray(case["load"], np.float32)
        sizes = case["sizes"]
        plan = rebalance_experts(load_LE, *sizes, policy="swap").physical_to_logical
        even_L = np.asarray(max_over_mean(load_LE, plan, sizes[3]), np.float64)
        worst_L = even_L * np.asarray(case["load"], np.float64).sum(1) / sizes[3]
        rows = zip(
            case["max_load"], worst_L, case["best"], case["optimal"], strict=True
        )
        for layer, (public, worst, best, proved) in enumerate(rows):
            if best > 0 and worst > best * 1.0001:
                word = "yes" if proved else "no"
                print(
                    f"| {case['name']} | {layer} | {public / best:.4f}"
                    f" | {worst / best:.4f} | {best:g} | {word} |",
                    flush=True,
                )
                found[f"{case['name']}/{layer}"] = worst / best
    return found


def drift(layers: int, experts: int) -> Iterator[jax.Array]:
    """Loads [L, E] one after another."""
    random = np.random.default_rng(0)
    log_LE = random.normal(size=(layers, experts))
    while True:
        yield jnp.asarray(np.exp(log_LE), jnp.float32)
        noise_LE = random.normal(size=log_LE.shape)
        log_LE = RHO * log_LE + np.sqrt(1 - RHO**2) * noise_LE


def of_previous(load_LE: jax.Array, before: jax.Array, *sizes: int) -> Any:
    return rebalance_experts(load_LE, *sizes, policy="incremental", previous=before)


def compiled(plan: Callable, sizes: tuple[int, ...], *arguments: jax.Array) -> Any:
    run = jax.jit(lambda *arguments: plan(*arguments, *sizes))
    return run.lower(*arguments).compile()


def median_ms(plan: Any, arguments: tuple, repetitions: int) -> float:
    jax.block_until_ready(plan(*arguments))
    times = []
    for _ in range(repetitions):
        before_s = time.perf_counter()
        jax.block_until_ready(plan(*arguments))
        times.append(1e3 * (time.perf_counter() - before_s))
    return statistics.median(times)


if __name__ == "__main__":
    main()
