# SPDX-License-Identifier: Apache-2.0
"""Times the mixture-of-experts layer against what it replaces, on CPU devices.

    python benchmarks/moe_layer.py [--repetitions 5] [--quick]

Forward and backward in float32: the result, and the gradient with respect to the
tokens and to every parameter, the router's included. 8192 tokens of width 256, 32
experts of hidden width 1024, 2 per token, GELU and biases as `Model` has them by
default, dropless, one device, where nothing else is said. Programs that are compared
run in turn, and a figure is made of their medians over the repetitions. The last line
is JSON:

  over_dense      the layer over a dense feed-forward part of the same active FLOPs;
                  claimed: at most 1.5
  onehot_over_sorted
                  one-hot dispatch and combine as in GShard (arXiv 2006.16668) at
                  capacity 1.25 and its fastest group size (`onehot_group_tokens`), over
                  the layer with the same capacity and groups, which gives the same
                  numbers (checked first)
  onehot_over_dropless
                  the same over the dropless layer, which computes more
  onehot_over_sorted_by_group
                  tokens of a group -> ratio
  peak_bytes_sorted_over_onehot
                  the two programs' temporary and output memory; claimed: at most 1/3
  time_by_tokens  tokens -> ms
  off_linear      by how much the time of more tokens differs at most from that of the
                  fewest times the ratio of the tokens; claimed: at most 0.1
  time_by_experts experts -> ms
  over_einsum_by_experts
                  experts -> ratio to batched einsums of the same number of experts and
                  the same FLOPs, each expert with as many rows, without router,
                  dispatch and combine; claimed: at most 1.3
  expert4_over_1  4 devices along `expert` over one device, at equal work; claimed: at
                  most 1.25
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe.config import Model, MoE
from jaxmoe.layers.mlp import Mlp
from jaxmoe.mesh import BATCH_AXES, Sizes, make_mesh
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.layer import MoELayer
from jaxmoe.moe.router import Sequences, capacity

DEVICES = 4  # along `expert`, in expert4_over_1
CAPACITY = 1.25


@dataclasses.dataclass(frozen=True)
class Sizing:
    """What is run; `tokens_by` and `experts_by` are what one figure varies."""

    tokens: int = 8192
    sequence: int = 1024
    width: int = 256
    hidden: int = 1024
    experts: int = 32
    top_k: int = 2
    groups: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    tokens_by: tuple[int, ...] = (8192, 16384, 32768, 65536)
    experts_by: tuple[int, ...] = (8, 32, 64, 256)


QUICK = Sizing(
    tokens=512,
    sequence=128,
    width=16,
    hidden=32,
    experts=8,
    groups=(128, 256),
    tokens_by=(256, 512),
    experts_by=(4, 8),
)


class Program(NamedTuple):
    """A compiled function and its arguments."""

    compiled: Any
    arguments: tuple

    def run(self) -> Any:
        return jax.block_until_ready(self.compiled(*self.arguments))

    def memory(self) -> int:
        """Bytes that it needs besides its arguments."""
        memory = self.compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sizing, repetitions = QUICK if options.quick else Sizing(), options.repetitions
    figures: dict[str, Any] = {}
    for part in (over_dense, over_onehot, by_tokens, by_experts, over_devices):
        found = part(sizing, repetitions)
        print(found, flush=True)
        figures |= found
    print(json.dumps(figures))


# The figures -------------------------------------------------------------------------


def over_dense(sizing: Sizing, repetitions: int) -> dict[str, Any]:
    ms = medians(
        {"moe": layer(sizing), "dense": dense_feed_forward(sizing)}, repetitions
    )
    return {"over_dense": ms["moe"] / ms["dense"]}


def over_onehot(sizing: Sizing, repetitions: int) -> dict[str, Any]:
    programs = {"dropless": layer(sizing)}
    for group in sizing.groups:
        limited = {"capacity_factor": CAPACITY, "group_tokens": group}
        programs[f"sorted {group}"] = layer(sizing, **limited)
        programs[f"onehot {group}"] = layer(sizing, call=onehot_layer, **limited)
        check_equal(programs[f"sorted {group}"], programs[f"onehot {group}"])
    ms = medians(programs, repetitions)
    best = min(sizing.groups, key=lambda group: ms[f"onehot {group}"])
    ratios = {g: ms[f"onehot {g}"] / ms[f"sorted {g}"] for g in sizing.groups}
    memory = {way: programs[f"{way} {best}"].memory() for way in ("sorted", "onehot")}
    return {
        "onehot_over_sorted": ratios[best],
        "onehot_over_dropless": ms[f"onehot {best}"] / ms["dropless"],
        "onehot_group_tokens": best,
        "onehot_over_sorted_by_group": ratios,
        "peak_bytes_sorted_over_onehot": memory["sorted"] / memory["onehot"],
    }


def by_tokens(sizing: Sizing, repetitions: int) -> dict[str, Any]:
    ms = medians(
        {n: layer(dataclasses.replace(sizing, tokens=n)) for n in sizing.tokens_by},
        repetitions,
    )
    per_token = [time_ms / tokens for tokens, time_ms in ms.items()]
    worst = max(abs(each / per_token[0] - 1) for each in per_token)
    return {"time_by_tokens": ms, "off_linear": worst}


def by_experts(sizing: Sizing, repetitions: int) -> dict[str, Any]:
    times: dict[int, float] = {}
    ratios: dict[int, float] = {}
    for experts in sizing.experts_by:
        of_size = dataclasses.replace(sizing, experts=experts)
        ms = medians(
            {"moe": layer(of_size), "einsum": equal_experts(of_size)}, repetitions
        )
        times[experts] = ms["moe"]
        ratios[experts] = ms["moe"] / ms["einsum"]
    return {"time_by_experts": times, "over_einsum_by_experts": ratios}


def over_devices(sizing: Sizing, repetitions: int) -> dict[str, Any]:
    one, four = layer(sizing), layer(sizing, devices=DEVICES)
    check_equal(one, four)
    ms = medians({"one": one, "four": four}, repetitions)
    return {"expert4_over_1": ms["four"] / ms["one"]}


# How they are measured ---------------------------------------------------------------


def medians(programs: dict[Any, Program], repetitions: int) -> dict[Any, float]:
    """Median ms of each program; they run in turn, once before it counts."""
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        program.run()
    for _ in range(repetitions):
        for name, program in programs.items():
            before_s = time.perf_counter()
            program.run()
            times[name].append(1e3 * (time.perf_counter() - before_s))
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def check_equal(one: Program, other: Program) -> None:
    for a, b in zip(*map(jax.tree.leaves, (one.run(), other.run())), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= 1e-4 * np.max(np.abs(a)), (one, other)


# What is measured --------------------------------------------------------------------

Call = Callable[[MoELayer, jax.Array, Sequences, ExpertAxis], tuple[jax.Array, Any]]


def layer(
    sizing: Sizing, *, call: Call = MoELayer.__call__, devices: int = 1, **options: Any
) -> Program:
    """The layer, or another that takes its parameters (`call`); gradients."""
    model = model_of(sizing)
    moe = MoE(num_experts=sizing.experts, top_k=sizing.top_k, **options)
    graph, params, _ = nnx.split(MoELayer(model, moe, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    x_BSD, cotangent_BSD = tokens(sizing)
    valid_BS = jnp.ones(x_BSD.shape[:2], bool)
    sequences = Sequences(valid_BS, jnp.arange(len(valid_BS)))
    axis = ExpertAxis(devices)

    def gradients(params, x_BSD, sequences, cotangent_BSD):
        def apply(params, x_BSD):
            module = nnx.merge(graph, params, {})
            y_BSD, stats = call(module, x_BSD, sequences, axis)
            return y_BSD, stats.balance_loss

        (y_BSD, _), pull = jax.vjp(apply, params, x_BSD)
        dparams, dx_BSD = pull((cotangent_BSD, jnp.ones(())))
        if devices > 1:
            dparams["router"] = jax.lax.psum(dparams["router"], BATCH_AXES)
        return y_BSD, dparams, dx_BSD

    arguments = (params, x_BSD, sequences, cotangent_BSD)
    if devices == 1:
        return compile_program(gradients, arguments)
    mesh = make_mesh(Sizes(1, devices, 1, "benchmark"))
    rows, specs = P(BATCH_AXES), {"router": P(), "experts": P("expert")}
    split = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(specs, rows, rows, rows),
        out_specs=(rows, specs, rows),
        check_vma=False,  # gradients are summed by hand, as in the train step
    )
    place = partial(jax.sharding.NamedSharding, mesh)
    parts = jax.tree.map(place, (specs, rows, rows, rows))
    return compile_program(split, jax.device_put(arguments, parts))


def onehot_layer(
    self: MoELayer, x_BSD: jax.Array, sequences: Sequences, _: ExpertAxis
) -> tuple[jax.Array, Any]:
    """The same layer by one-hot products, as in GShard.

    Legend: G groups, N tokens of a group, K choices, E experts, C capacity.
    """
    moe, N = self.moe, self.group_tokens
    C, E = capacity(moe, N), moe.num_experts
    x_GND = x_BSD.reshape(-1, N, x_BSD.shape[-1])
    routing = self.router(x_GND.reshape(-1, x_GND.shape[-1]), sequences)
    ids_GNK = routing.expert_ids_TK.reshape(len(x_GND), N, moe.top_k)
    weights_GNK = routing.weights_TK.reshape(ids_GNK.shape)
    combine_GNEC = jnp.zeros((len(x_GND), N, E, C))
    taken_GE = jnp.zeros((len(x_GND), E), jnp.int32)
    for k in range(moe.top_k):  # what is over capacity has the id E: a row of zeros
        expert_GNE = jax.nn.one_hot(ids_GNK[:, :, k], E, dtype=jnp.int32)
        place_GNE = jnp.cumsum(expert_GNE, axis=1) - 1 + taken_GE[:, None]
        place_GN = jnp.sum(place_GNE * expert_GNE, axis=2)
        taken_GE += jnp.sum(expert_GNE, axis=1)
        weighted_GNE = expert_GNE * weights_GNK[:, :, k, None]
        place_GNC = jax.nn.one_hot(place_GN, C)
        combine_GNEC += weighted_GNE[..., None] * place_GNC[:, :, None]
    dispatch_GNEC = (combine_GNEC > 0).astype(x_GND.dtype)
    rows_EGCD = jnp.einsum("GNEC,GND->EGCD", dispatch_GNEC, x_GND)
    rows_ERD = rows_EGCD.reshape(E, -1, x_GND.shape[-1])
    results_ERD = batched_experts(nnx.to_pure_dict(nnx.state(self.experts)), rows_ERD)
    results_EGCD = results_ERD.reshape(rows_EGCD.shape)
    y_GND = jnp.einsum("GNEC,EGCD->GND", combine_GNEC, results_EGCD)
    return y_GND.reshape(x_BSD.shape), routing.stats


def equal_experts(sizing: Sizing) -> Program:
    """All experts on rows that are there already, the same number for each."""
    rows = sizing.tokens * sizing.top_k // sizing.experts
    layer = MoELayer(
        model_of(sizing), MoE(num_experts=sizing.experts), rngs=nnx.Rngs(0)
    )
    weights = nnx.to_pure_dict(nnx.state(layer.experts))
    many = dataclasses.replace(sizing, tokens=sizing.experts * rows, sequence=rows)
    x_ERD, cotangent_ERD = tokens(many)

    def gradients(weights, x_ERD, cotangent_ERD):
        y_ERD, pull = jax.vjp(batched_experts, weights, x_ERD)
        return y_ERD, pull(cotangent_ERD)

    return compile_program(gradients, (weights, x_ERD, cotangent_ERD))


def batched_experts(weights: dict[str, jax.Array], rows_ERD: jax.Array) -> jax.Array:
    h_ERF = jnp.einsum("ERD,EDF->ERF", rows_ERD, weights["up"])
    h_ERF = jax.nn.gelu(h_ERF + weights["up_bias"][:, None])
    y_ERD = jnp.einsum("ERF,EFD->ERD", h_ERF, weights["down"])
    return y_ERD + weights["down_bias"][:, None]


def dense_feed_forward(sizing: Sizing) -> Program:
    hidden = sizing.top_k * sizing.hidden
    graph, weights = nnx.split(Mlp(model_of(sizing), hidden, rngs=nnx.Rngs(0)))
    weights = nnx.to_pure_dict(weights)

    def gradients(weights, x_BSD, cotangent_BSD):
        y_BSD, pull = jax.vjp(lambda w, x: nnx.merge(graph, w)(x), weights, x_BSD)
        return y_BSD, pull(cotangent_BSD)

    return compile_program(gradients, (weights, *tokens(sizing)))


def model_of(sizing: Sizing) -> Model:
    return Model(
        width=sizing.width,
        ffn_width=sizing.hidden,
        sequence_length=sizing.sequence,
        init_std=sizing.width**-0.5,
    )


def tokens(sizing: Sizing) -> tuple[jax.Array, jax.Array]:
    """Random tokens, and what their results are multiplied with: both [B, S, D]."""
    shape = (sizing.tokens // sizing.sequence, sizing.sequence, sizing.width)
    x_BSD, cotangent_BSD = jax.random.normal(jax.random.key(1), (2, *shape))
    return x_BSD, cotangent_BSD


def compile_program(function: Callable, arguments: tuple) -> Program:
    return Program(jax.jit(function).lower(*arguments).compile(), arguments)


if __name__ == "__main__":
    main()
