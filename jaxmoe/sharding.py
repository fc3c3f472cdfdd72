# SPDX-License-Identifier: Apache-2.0
"""Floor 1. From logical axes to PartitionSpecs, and between the two layouts of weights.

Each parameter lives in two layouts:
  compute  as the model uses it: experts over `expert`, layers over `pipe`, the rest
           replicated;
  master   as the optimizer holds it (float32): in addition split over every mesh axis
           that the compute layout does not use (ZeRO-1).
`gather` and `scatter_sum` go from one to the other, inside a shard_map.

Reference: ZeRO, arXiv 1910.02054.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.mesh import AXES

# The one table: logical axis of a parameter -> mesh axis of its compute layout.
# Logical axes that are not here are not split for compute.
MESH_AXIS = {"expert": "expert"}


def compute_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """The compute layout of an array with these logical axes.

    Raises:
      ValueError: if two dimensions would be split over the same mesh axis.
    """
    entries = [MESH_AXIS.get(axis) if axis else None for axis in logical_axes]
    used = [entry for entry in entries if entry]
    if len(used) != len(set(used)):
        raise ValueError(f"{logical_axes} uses a mesh axis twice: {entries}")
    return PartitionSpec(*entries)


def master_spec(
    shape: tuple[int, ...], compute: PartitionSpec, mesh: Mesh, *, keep: int = 0
) -> PartitionSpec:
    """The compute layout, further split over all mesh axes that it leaves free.

    Takes the largest dimension that the free axes' product divides, but for the first
    `keep`. An array none of whose dimensions can be divided stays as it is; such arrays
    are small.
    """
    used = set(compute)
    free = tuple(a for a in AXES if a not in used and mesh.shape[a] > 1)
    entries = list(compute) + [None] * (len(shape) - len(compute))
    ways = math.prod(mesh.shape[axis] for axis in free)
    fitting = [
        i
        for i, n in enumerate(shape)
        if entries[i] is None and n % ways == 0 and n and i >= keep
    ]
    if free and fitting:
        entries[max(fitting, key=lambda i: shape[i])] = free
    return PartitionSpec(*entries)


def gather(shard: jax.Array, compute: PartitionSpec, master: PartitionSpec):
    """From this device's part of the master layout to that of the compute layout."""
    for dim, axes in _added(compute, master):
        shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
    return shard


def scatter_sum(
    gradient: jax.Array,
    compute: PartitionSpec,
    master: PartitionSpec,
    mesh: Mesh,
    *,
    without: str = "",
):
    """Sums gradients over the devices that hold copies, each keeping its master part.

    Over every axis that does not split the compute layout, but for `without`.

    A reduce-scatter, written out: a psum whose result is then constrained to the
    master layout compiles to an all-reduce of the whole gradient.
    """
    added = _added(compute, master)
    for dim, axes in added:
        gradient = jax.lax.psum_scatter(
            gradient, axes, scatter_dimension=dim, tiled=True
        )
    split = {axis for entry in master if entry for axis in _names(entry)}
    split.add(without)
    rest = tuple(axis for axis in AXES if axis not in split and mesh.shape[axis] > 1)
    return jax.lax.psum(gradient, rest) if rest else gradient


def gather_layers(
    shard: jax.Array,
    compute: PartitionSpec,
    master: PartitionSpec,
    places_Rn: np.ndarray,
) -> jax.Array:
    """The layers of this rank's stage, out of a stack in the master layout.

    Args:
      shard: this device's part, [layers, ...].
      compute, master: layouts of the stack; its dimension 0 is split in neither.
      places_Rn: per rank of `pipe` the layers it gets; -1 gives any.

    Returns:
      [n, ...] in the compute layout.
    """
    places_Rn = np.maximum(places_Rn, 0)
    dim, rest = _pipe_dim(compute, master)
    if dim is None:
        rank = jax.lax.axis_index("pipe")
        shard = shard[jnp.asarray(places_Rn)[rank]]
    else:  # (R*n, .. / R) -> (n, ..): to every rank its layers, from every rank a part
        shard = jax.lax.all_to_all(
            shard[places_Rn.reshape(-1)], "pipe", 0, dim, tiled=True
        )
    return gather(shard, compute, rest)


def scatter_sum_layers(
    gradient: jax.Array,
    compute: PartitionSpec,
    master: PartitionSpec,
    places_Rn: np.ndarray,
    *,
    layers: int,
    mesh: Mesh,
) -> jax.Array:
    """The reverse of `gather_layers`: sums over all devices that used a layer.

    Args:
      gradient: [n, ...], of the layers of this rank's stage; where its place is -1 it
        is left out.
      layers: of the stack.
    """
    dim, rest = _pipe_dim(compute, master)
    gradient = scatter_sum(gradient, compute, rest, mesh, without="pipe")
    places_Rn = np.where(places_Rn < 0, layers, places_Rn)  # past the end: dropped
    if dim is None:
        places = jnp.asarray(places_Rn)[jax.lax.axis_index("pipe")]
    else:
        gradient = jax.lax.all_to_all(gradient, "pipe", dim, 0, tiled=True)
        places = places_Rn.reshape(-1)
    total = jnp.zeros((layers, *gradient.shape[1:]), gradient.dtype)
    total = total.at[places].add(gradient, mode="drop")
    return jax.lax.psum(total, "pipe") if dim is None else total


def named(mesh: Mesh, specs: Any) -> Any:
    """PartitionSpecs of a tree -> NamedShardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def copies(spec: PartitionSpec, mesh: Mesh) -> int:
    """On how many devices each element of an array with this layout lives."""
    ways = [mesh.shape[a] for entry in spec if entry for a in _names(entry)]
    return mesh.size // math.prod(ways)


def _pipe_dim(compute: PartitionSpec, master: PartitionSpec):
    """The dimension that the master layout splits over `pipe`, and the layout without.

    `pipe` is the last axis of AXES, so the parts of one group of ranks follow each
    other, and can be put together before the others are.
    """
    for dim, axes in _added(compute, master):
        if "pipe" in _names(axes):
            assert _names(axes)[-1] == "pipe", master
            others = _names(axes)[:-1]
            entries = [*master]
            entries[dim] = others or None
            return dim, PartitionSpec(*entries)
    return None, master


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def _added(compute: PartitionSpec, master: PartitionSpec):
    """(dimension, mesh axes) that the master layout splits in addition."""
    return [
        (dim, entry)
        for dim, entry in enumerate(master)
        if entry and (dim >= len(compute) or compute[dim] != entry)
    ]
