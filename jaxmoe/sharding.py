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
    shape: tuple[int, ...], compute: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """The compute layout, further split over all mesh axes that it leaves free.

    Takes the largest dimension that the free axes' product divides. An array none of
    whose dimensions can be divided stays as it is; such arrays are small.
    """
    used = set(compute)
    free = tuple(a for a in AXES if a not in used and mesh.shape[a] > 1)
    entries = list(compute) + [None] * (len(shape) - len(compute))
    ways = math.prod(mesh.shape[axis] for axis in free)
    fitting = [
        i for i, n in enumerate(shape) if entries[i] is None and n % ways == 0 and n
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
    gradient: jax.Array, compute: PartitionSpec, master: PartitionSpec, mesh: Mesh
):
    """Sums gradients over the devices that hold copies, each keeping its master part.

    A reduce-scatter, written out: a psum whose result is then constrained to the
    master layout compiles to an all-reduce of the whole gradient.
    """
    added = _added(compute, master)
    for dim, axes in added:
        gradient = jax.lax.psum_scatter(
            gradient, axes, scatter_dimension=dim, tiled=True
        )
    split = {axis for entry in master if entry for axis in _names(entry)}
    rest = tuple(axis for axis in AXES if axis not in split and mesh.shape[axis] > 1)
    return jax.lax.psum(gradient, rest) if rest else gradient


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


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def _added(compute: PartitionSpec, master: PartitionSpec):
    """(dimension, mesh axes) that the master layout splits in addition."""
    return [
        (dim, entry)
        for dim, entry in enumerate(master)
        if entry and (dim >= len(compute) or compute[dim] != entry)
    ]
