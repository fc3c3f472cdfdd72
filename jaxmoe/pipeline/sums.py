# SPDX-License-Identifier: Apache-2.0
"""Floor 4. What the ticks of a pipeline add up, and the layers of a stage by kind."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jaxmoe.pipeline.choose import turn_if
from jaxmoe.pipeline.stage import Tree

Kinds = tuple[str, ...]  # of a stage's layers
Layers = dict[str, list[Tree]]  # by kind, those of one stage in order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "head", "stage", "finish"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sums:
    """What ticks add to.

    Attributes:
      weights: per direction, gradients of the weights that this rank has for it.
      head: gradients of the head's weights.
      stage: per direction, statistics of the MoE layers, [layers, ...]; or None.
      finish: statistics of the head.
    """

    weights: list[Layers]
    head: Tree
    stage: list[Tree]
    finish: Tree


def pick(layers: Layers, kinds: Kinds) -> list[Tree]:
    """The layers of a stage in the order in which they are applied."""
    following = {kind: iter(of_kind) for kind, of_kind in layers.items()}
    return [next(following[kind]) for kind in kinds]


def put(layers: Layers, kinds: Kinds, of_stage: Tree) -> Layers:
    """The layers with those of a stage in the first places of their kinds."""
    layers = {kind: list(of_kind) for kind, of_kind in layers.items()}
    seen = dict.fromkeys(layers, 0)
    for kind, layer in zip(kinds, of_stage, strict=True):
        layers[kind][seen[kind]] = layer
        seen[kind] += 1
    return layers


def num_rows(statistics: Tree) -> int:
    """MoE layers of the statistics."""
    return max((len(leaf) for leaf in jax.tree.leaves(statistics)), default=0)


def write_first(like: Tree, first: Tree) -> Tree:
    """The first rows, and zeros; a stage may have fewer MoE layers than another."""
    zeros = jax.tree.map(jnp.zeros_like, like)
    if first is None:
        return zeros
    return jax.tree.map(lambda r, f: r.at[: len(f)].set(f), zeros, first)


def first_of(made: Layers, layers: Layers) -> Layers:
    """As many layers of each kind as a direction has."""
    return {kind: made[kind][: len(layers[kind])] for kind in layers}


def first_rows(made: Tree, rows: Tree) -> Tree:
    """The statistics of as many MoE layers as a direction has."""
    return jax.tree.map(lambda m, r: m[: len(r)], made, rows)


def add(total: Tree, more: Tree) -> Tree:
    """total + more, in the types of the total."""
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)


def add_if(condition: jax.Array, total: Tree, more: Tree) -> Tree:
    """total + more where the condition holds, else total, in place."""
    return turn_if(condition, lambda _, total: add(total, more), total)
