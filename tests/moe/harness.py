# SPDX-License-Identifier: Apache-2.0
"""Runs a mixture-of-experts layer on a mesh and beside it the dense oracle.

The 8 devices form data 8/X x expert X. Every run returns, for the whole batch, the
output, the statistics, and the gradient of

  sum(output * cotangent) + 0.3 * balance losses + 0.2 * those of the sequences
  + 0.1 * z-losses

with respect to the tokens and to every parameter.

Legend: B sequences, S positions, T = B*S, D width, E experts, X devices along `expert`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe import config_derived
from jaxmoe.config import Model, MoE
from jaxmoe.mesh import BATCH_AXES, Sizes, make_mesh
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.layer import MoELayer
from jaxmoe.moe.router import MoEStats, Sequences, capacity
from tests import oracle

B, S, D, F, E = 8, 8, 16, 24, 8
BALANCE, SEQUENCE, Z = 0.3, 0.2, 0.1


class Result(NamedTuple):
    """What a run gives."""

    output: Any  # [T, D]
    stats: MoEStats
    gradients: Any  # (of x_TD, of the parameters)


class Scene(NamedTuple):
    """Inputs of one run."""

    params: Any
    buffers: Any
    x_TD: np.ndarray
    valid_T: np.ndarray
    cotangent_TD: np.ndarray


def small_model(**changes: Any) -> Model:
    return Model(width=D, ffn_width=F, sequence_length=S, init_std=0.3, **changes)


def small_moe(**changes: Any) -> MoE:
    changes.setdefault("group_tokens", 4)
    return MoE(num_experts=E, **changes)


def mesh_of(axis_size: int) -> jax.sharding.Mesh:
    return make_mesh(Sizes(8 // axis_size, axis_size, 1, "test"))


def sequences(valid_T: Any, length: int | None = None) -> Sequences:
    """Sequences of a length (None: a single one), numbered from 0."""
    valid_BS = jnp.reshape(valid_T, (-1, length or len(valid_T)))
    return Sequences(valid_BS, jnp.arange(len(valid_BS)))


@lru_cache
def split_layer(model: Model, moe: MoE):
    """(graph, parameters, buffers) of a layer with seed 0."""
    layer = MoELayer(model, moe, rngs=nnx.Rngs(0))
    graph, params, buffers = nnx.split(layer, nnx.Param, ...)
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    return graph, pure, jax.tree.map(np.asarray, nnx.to_pure_dict(buffers))


def make_scene(model: Model, moe: MoE, kind: str) -> Scene:
    """Random tokens of which some are padding; feature 0 is 1, to steer the router.

    Args:
      kind: 'random'; 'empty' keeps everything from expert 2; 'collapse' makes expert 3
        every token's first choice; 'padding' leaves a single real token.
    """
    rng = np.random.default_rng(1)
    _, params, buffers = split_layer(model, moe)
    params = jax.tree.map(np.copy, params)
    for name in ("up_bias", "down_bias"):
        if name in params["experts"]:
            bias = params["experts"][name]
            bias[...] = 0.3 * rng.standard_normal(bias.shape)
    x_TD = rng.standard_normal((B * S, D)).astype(np.float32)
    x_TD[:, 0] = 1.0
    valid_T = rng.random(B * S) < 0.8
    valid_T[-S:] = False
    kernel = params["router"]["router_kernel"]
    if kind == "empty":
        kernel[0, 2] -= 8.0
    if kind == "collapse":
        kernel[0, 3] += 8.0
    if kind == "padding":
        valid_T[:] = False
        valid_T[13] = True
    if "router" in buffers:
        bias = rng.standard_normal(E).astype(np.float32)
        bias[2] -= 8.0 * (kind == "empty")
        bias[3] += 8.0 * (kind == "collapse")
        buffers = {"router": {"bias": bias}}
    cotangent_TD = rng.standard_normal((B * S, D)).astype(np.float32)
    return Scene(params, buffers, x_TD, valid_T, cotangent_TD)


def sharded(model: Model, moe: MoE, axis: int | ExpertAxis, *, optimized: bool = False):
    """The jitted run on data 8/X x expert X: Scene -> Result.

    Args:
      axis: X, or the whole axis.
      optimized: compile as the training does, not as fast as can be.
    """
    run = program(model, moe, axis, optimized)

    def call(scene: Scene) -> Result:
        y, stats, dx, dparams = run(*arguments(scene))
        flat = lambda a: a.reshape(B * S, D)  # noqa: E731
        return Result(flat(y), stats, (flat(dx), dparams))

    return call


def arguments(scene: Scene) -> tuple:
    """What `program` is called with."""
    x_BSD, cotangent_BSD = (
        a.reshape(B, S, D) for a in (scene.x_TD, scene.cotangent_TD)
    )
    given = sequences(scene.valid_T, S)
    return scene.params, scene.buffers, x_BSD, given, cotangent_BSD


@lru_cache
def program(model: Model, moe: MoE, axis: int | ExpertAxis, optimized: bool = False):
    """The jitted function of `sharded`."""
    graph, params, buffers = split_layer(model, moe)
    axis = ExpertAxis(axis) if isinstance(axis, int) else axis
    mesh = mesh_of(axis.size)

    def per_device(params, buffers, x_BSD, sequences, cotangent_BSD):
        def objective(x_BSD, params):
            layer = nnx.merge(graph, params, buffers)
            y_BSD, stats = layer(x_BSD, sequences, axis)
            total = jnp.sum(y_BSD * cotangent_BSD)
            total += BALANCE * stats.balance_loss + Z * stats.z_loss
            total += SEQUENCE * stats.sequence_loss
            return total, (y_BSD, stats)

        gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
        (dx, dparams), (y, stats) = gradient(x_BSD, params)
        dparams = {
            name: jax.lax.psum(part, "data" if name == "experts" else BATCH_AXES)
            for name, part in dparams.items()
        }
        return y, jax.lax.psum(stats, BATCH_AXES), dx, dparams

    rows, whole = P(BATCH_AXES), jax.tree.map(lambda _: P(), buffers)
    specs = {name: jax.tree.map(lambda _: P(), part) for name, part in params.items()}
    specs["experts"] = jax.tree.map(lambda _: P("expert"), params["experts"])
    return jax.jit(
        jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(specs, whole, rows, rows, rows),
            out_specs=(rows, P(), rows, specs),
            check_vma=False,  # gradients are summed by hand, as in the train step
        ),
        compiler_options=None if optimized else oracle.QUICK,
    )


@lru_cache
def _dense(moe: MoE, group: int):
    def run(params, x_TD, valid_T, chosen_TE, kept_TE, cotangent_TD):
        def objective(x_TD, params):
            y, balance, sequence, z, entropy = oracle.moe_layer(
                params, x_TD, valid_T, chosen_TE, kept_TE, moe, group, S
            )
            total = jnp.sum(y * cotangent_TD)
            total += BALANCE * balance + SEQUENCE * sequence + Z * z
            return total, (y, balance, sequence, z, entropy)

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(x_TD, params)

    return jax.jit(run, compiler_options=oracle.QUICK)


def dense(model: Model, moe: MoE, scene: Scene) -> Result:
    """The oracle's result."""
    group = config_derived.group_tokens(model, moe)
    logits_TE = scene.x_TD @ scene.params["router"]["router_kernel"]
    bias_E = scene.buffers["router"]["bias"] if scene.buffers else None
    ids_TK = oracle.choose(logits_TE, moe, bias_E, scene.valid_T.reshape(B, S))
    real_TK = np.repeat(scene.valid_T[:, None], moe.top_k, axis=1)
    limit = 10**9 if moe.capacity_factor is None else capacity(moe, group)
    kept_TK = oracle.keep(ids_TK, scene.valid_T, group, limit)
    chosen_TE = oracle.one_hot(ids_TK, real_TK, E)
    kept_TE = oracle.one_hot(ids_TK, kept_TK, E)
    gradients, (y, *losses) = _dense(moe, group)(
        scene.params, scene.x_TD, scene.valid_T, chosen_TE, kept_TE, scene.cotangent_TD
    )
    dropped = (chosen_TE & ~kept_TE).sum()
    return Result(y, MoEStats(chosen_TE.sum(0), dropped, *losses), gradients)
