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

    Takes the first dimension that the free axes' product divides, but for the first
    `keep`: the further out, the longer the pieces that a gather copies. An array none
    of whose dimensions can be divided stays as it is; such arrays are small.
    """
    used = {axis for entry in compute if entry for axis in _names(entry)}
    free = tuple(a for a in AXES if a not in used and mesh.shape[a] > 1)
    entries = list(compute) + [None] * (len(shape) - len(compute))
    ways = math.prod(mesh.shape[axis] for axis in free)
    fitting = [
        i
        for i, n in enumerate(shape)
        if entries[i] is None and n % ways == 0 and n and i >= keep
    ]
    if free and fitting:
        entries[fitting[0]] = free
    return PartitionSpec(*entries)


def reduced_spec(
    shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    """The layout of a mean over one dimension of an array: that of its other ones.

    Args:
      shape: of the mean. If it is no such mean, it is not split.
      whole, spec: shape and layout of the array.
    """
    entries = (*spec, *[None] * (len(whole) - len(spec)))
    for i in reversed(range(len(whole))):  # of equal dimensions, the first ones stay
        if (*whole[:i], *whole[i + 1 :]) == shape:
            return PartitionSpec(*entries[:i], *entries[i + 1 :])
    return PartitionSpec()


def moment_spec(
    shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """The layout of a moment of the parameter `whole`, which is laid out by `spec`.

    A factored moment is a mean over one dimension; if that was split, another one is.
    The first dimension, of layers, stays whole as in the parameter.
    """
    if shape == whole:
        return spec
    kept = reduced_spec(shape, whole, spec)
    return master_spec(shape, kept, mesh, keep=int(len(shape) > 1))


def gather(shards: Any, compute: Any, master: Any) -> Any:
    """From this device's part of the master layout to that of the compute layout.

    Args:
      shards: tree of arrays.
      compute, master: their layouts, trees of the same structure.
    """
    leaves, tree = jax.tree.flatten(shards)
    moves = [_added(*specs) for specs in _pairs(tree, compute, master)]
    return tree.unflatten(_all_gather(leaves, moves))


def scatter_sum(
    gradients: Any, compute: Any, master: Any, mesh: Mesh, *, without: str = ""
) -> Any:
    """Sums gradients over the devices that hold copies, each keeping its master part.

    Over every axis that does not split the compute layout, but for `without`.

    A reduce-scatter, written out: a psum whose result is then constrained to the
    master layout compiles to an all-reduce of the whole gradient.
    """
    leaves, tree = jax.tree.flatten(gradients)
    specs = _pairs(tree, compute, master)
    leaves = _reduce_scatter(leaves, [_added(*pair) for pair in specs])
    rests = [_rest(spec, mesh, without) for _, spec in specs]
    for axes in {*rests} - {()}:  # one psum of all leaves that need the same
        which = [i for i, rest in enumerate(rests) if rest == axes]
        summed = jax.lax.psum([leaves[i] for i in which], axes)
        for i, leaf in zip(which, summed, strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves)


def gather_layers(shards: Any, compute: Any, master: Any, places_Rn: np.ndarray) -> Any:
    """The layers of this rank's stage, out of stacks in the master layout.

    Args:
      shards: tree of this device's parts, [layers, ...].
      compute, master: layouts of the stacks; dimension 0 is split in neither.
      places_Rn: per rank of `pipe` the layers it gets; -1 gives any.

    Returns:
      Tree of [n, ...] in the compute layout.
    """
    R, n = places_Rn.shape
    leaves, tree = jax.tree.flatten(shards)
    specs = _pairs(tree, compute, master)
    dims, rests = zip(*(_pipe_dim(*pair) for pair in specs), strict=True)
    places_Rn = np.maximum(places_Rn, 0)
    mine = jnp.asarray(places_Rn)[jax.lax.axis_index("pipe")]
    # (R, n, .. / R): to every rank its layers; it gets a part of them from every rank.
    parts = [
        leaf[mine]
        if dim is None
        else leaf[places_Rn.reshape(-1)].reshape(R, n, *leaf.shape[1:])
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    split = [i for i, dim in enumerate(dims) if dim is not None]
    swapped = _swap([parts[i] for i in split], [(0, dims[i] + 1) for i in split])
    for i, part in zip(split, swapped, strict=True):
        parts[i] = part[0]
    moves = [_added(c, rest) for (c, _), rest in zip(specs, rests, strict=True)]
    return tree.unflatten(_all_gather(parts, moves))


def scatter_sum_layers(
    gradients: Any,
    compute: Any,
    master: Any,
    places_Rn: np.ndarray,
    *,
    layers: int,
    mesh: Mesh,
) -> Any:
    """The reverse of `gather_layers`: sums over all devices that used a layer.

    Args:
      gradients: tree of [n, ...], of the layers of this rank's stage; where the place
        is -1 they are left out.
      compute, master, places_Rn: as in `gather_layers`.
      layers: of the stacks.
    """
    tree = jax.tree.structure(gradients)
    specs = _pairs(tree, compute, master)
    dims, rests = zip(*(_pipe_dim(*pair) for pair in specs), strict=True)
    parts = scatter_sum(gradients, compute, tree.unflatten(rests), mesh, without="pipe")
    parts = jax.tree.leaves(parts)
    R, n = places_Rn.shape
    places_Rn = np.where(places_Rn < 0, layers, places_Rn)  # past the end: dropped
    split = [i for i, dim in enumerate(dims) if dim is not None]
    sent = [parts[i][None] for i in split]
    for i, part in zip(
        split, _swap(sent, [(dims[i] + 1, 0) for i in split]), strict=True
    ):
        parts[i] = part.reshape(R * n, *part.shape[2:])
    rank = jax.lax.axis_index("pipe")
    for i, part in enumerate(parts):
        places = jnp.asarray(places_Rn)
        places = places[rank] if dims[i] is None else places.reshape(-1)
        total = jnp.zeros((layers, *part.shape[1:]), part.dtype)
        parts[i] = total.at[places].add(part, mode="drop")
    whole = [i for i, dim in enumerate(dims) if dim is None]
    summed = jax.lax.psum([parts[i] for i in whole], "pipe")
    for i, part in zip(whole, summed, strict=True):
        parts[i] = part
    return tree.unflatten(parts)


def named(mesh: Mesh, specs: Any) -> Any:
    """PartitionSpecs of a tree -> NamedShardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def put(tree: Any, layout: NamedSharding) -> Any:
    """Arrays of the host, whole in every process, as arrays over all devices."""

    def one(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, layout, array.__getitem__)

    return jax.tree.map(one, tree)


def copies(spec: PartitionSpec, mesh: Mesh) -> int:
    """On how many devices each element of an array with this layout lives."""
    ways = [mesh.shape[a] for entry in spec if entry for a in _names(entry)]
    return mesh.size // math.prod(ways)


# Collectives of many arrays -----------------------------------------------------------

# Arrays up to this size travel together: a collective costs more than they do.
SMALL_BYTES = 2**18

Move = tuple[int, tuple[str, ...]] | None  # dimension, mesh axes


def _groups(leaves: list[jax.Array], keys: list[Any]) -> list[list[int]]:
    """Which arrays travel together; each is in one group."""
    found: dict[Any, list[int]] = {}
    for i, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
        small = leaf.size * leaf.dtype.itemsize <= SMALL_BYTES
        alone = None if small else i
        found.setdefault((key, leaf.dtype, alone), []).append(i)
    return list(found.values())


def _all_gather(leaves: list[jax.Array], moves: list[Move]) -> list[jax.Array]:
    done = list(leaves)
    for group in _groups(leaves, [move and move[1] for move in moves]):
        move = moves[group[0]]
        if move is None:
            continue
        if len(group) == 1:
            dim, axes = move
            i = group[0]
            done[i] = jax.lax.all_gather(leaves[i], axes, axis=dim, tiled=True)
            continue
        fronts = [jnp.moveaxis(leaves[i], _dim(moves[i]), 0) for i in group]
        vector = jnp.concatenate([front.reshape(-1) for front in fronts])
        gathered = jax.lax.all_gather(vector, move[1])  # [devices, numbers]
        for i, front, part in _cut(group, fronts, gathered):
            whole = part.reshape(-1, *front.shape[1:])
            done[i] = jnp.moveaxis(whole, 0, _dim(moves[i]))
    return done


def _reduce_scatter(leaves: list[jax.Array], moves: list[Move]) -> list[jax.Array]:
    done = list(leaves)
    for group in _groups(leaves, [move and move[1] for move in moves]):
        move = moves[group[0]]
        if move is None:
            continue
        if len(group) == 1:
            dim, axes = move
            i = group[0]
            done[i] = jax.lax.psum_scatter(
                leaves[i], axes, scatter_dimension=dim, tiled=True
            )
            continue
        ways = jax.lax.axis_size(move[1])
        fronts = [jnp.moveaxis(leaves[i], _dim(moves[i]), 0) for i in group]
        fronts = [f.reshape(ways, f.shape[0] // ways, *f.shape[1:]) for f in fronts]
        rows = jnp.concatenate([front.reshape(ways, -1) for front in fronts], axis=1)
        summed = jax.lax.psum_scatter(rows, move[1], scatter_dimension=0)
        for i, front, part in _cut(group, [f[0] for f in fronts], summed[None]):
            done[i] = jnp.moveaxis(part.reshape(front.shape), 0, _dim(moves[i]))
    return done


def _swap(parts: list[jax.Array], ways: list[tuple[int, int]]) -> list[jax.Array]:
    """Exchanges over `pipe`: each array is cut along its first dimension of a way, and
    what arrives is put together along the second, in the order of the ranks."""
    done, R = list(parts), jax.lax.axis_size("pipe")
    for group in _groups(parts, [None] * len(parts)):
        if len(group) == 1:  # keeps its shape: a flat copy of large weights is dear
            (i,) = group
            cut, joined = ways[i]
            done[i] = jax.lax.all_to_all(parts[i], "pipe", cut, joined, tiled=True)
            continue
        rows = [_cut_into(parts[i], ways[i][0], R) for i in group]
        together = jnp.concatenate([row.reshape(R, -1) for row in rows], axis=1)
        together = jax.lax.all_to_all(together, "pipe", 0, 0, tiled=True)
        for i, row, part in _cut(group, [row[0] for row in rows], together):
            part = part.reshape(R, *row.shape)
            done[i] = jnp.concatenate(list(part), axis=ways[i][1])
    return done


def _cut_into(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """[.., d, ..] -> [parts, .., d / parts, ..]."""
    return jnp.stack(jnp.split(x, parts, axis=dim))


def _cut(group: list[int], arrays: list[jax.Array], together: jax.Array):
    """(number, array, its columns of `together`) of each array, in order."""
    start = 0
    for i, array in zip(group, arrays, strict=True):
        yield i, array, together[:, start : start + array.size]
        start += array.size


# Layouts -----------------------------------------------------------------------------


def _pairs(tree: Any, compute: Any, master: Any) -> list[tuple]:
    return list(
        zip(tree.flatten_up_to(compute), tree.flatten_up_to(master), strict=True)
    )


def _dim(move: Move) -> int:
    assert move is not None
    return move[0]


def _rest(master: PartitionSpec, mesh: Mesh, without: str) -> tuple[str, ...]:
    """The axes along which an array in this layout is the same everywhere."""
    split = {axis for entry in master if entry for axis in _names(entry)}
    return tuple(
        a for a in AXES if a not in split and a != without and mesh.shape[a] > 1
    )


def _pipe_dim(
    compute: PartitionSpec, master: PartitionSpec
) -> tuple[int | None, PartitionSpec]:
    """The dimension that the master layout splits over `pipe`, and the layout without.

    `pipe` is the last axis of AXES, so the parts of one group of ranks follow each
    other, and can be put together before the others are.
    """
    move = _added(compute, master)
    if move is None or "pipe" not in move[1]:
        return None, master
    dim, axes = move
    assert axes[-1] == "pipe", master
    entries = [*master]
    entries[dim] = axes[:-1] or None
    return dim, PartitionSpec(*entries)


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def _added(compute: PartitionSpec, master: PartitionSpec) -> Move:
    """What the master layout splits in addition: one dimension, or nothing."""
    found = [
        (dim, _names(entry))
        for dim, entry in enumerate(master)
        if entry and (dim >= len(compute) or compute[dim] != entry)
    ]
    assert len(found) <= 1, (compute, master)
    return found[0] if found else None
