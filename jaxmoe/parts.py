# SPDX-License-Identifier: Apache-2.0
"""Floor 3. The parameters of a model part by part: what is counted, and the names.

A part is one parameter of one layer, as 'moe/router/router_kernel of layer 3 (moe)'.

Legend: F parts, in the order of the parameters' tree, then of their layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import config_derived
from jaxmoe.config import Model
from jaxmoe.model import STACKS

# Names of modules and parameters in the order in which a forward pass meets them.
_FORWARD = (
    *("attention_norm", "attention", "ffn_norm", "mlp", "moe"),
    *("router", "shared", "experts"),
    *("patch", "token", "position", "segment"),
    *("patch_kernel", "patch_bias", "scale", "bias", "router_kernel"),
    *("qkv_kernel", "qkv_bias", "out_kernel", "out_bias"),
    *("gate", "up", "up_bias", "down", "down_bias"),
)
_POST_NORM = ("attention", "attention_norm", "mlp", "moe", "ffn_norm")


def nonfinite_parts(tree: Any) -> jax.Array:
    """How many numbers of each part are not finite, float32 [F].

    Args:
      tree: Parameters, or their gradients, in the form of the parameters; may be one
        device's shards, if dimension 0 of a stack is whole.
    """
    counts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first = int(path[0].key in STACKS)
        axes = tuple(range(first, leaf.ndim))
        bad = jnp.sum(~jnp.isfinite(leaf), axis=axes, dtype=jnp.float32)
        counts.append(bad.reshape(-1))
    return jnp.concatenate(counts)


def part_names(params: Any, model: Model) -> list[tuple[tuple, str]]:
    """(place in a forward pass, name) of each part; places sort. [F]"""
    kinds = config_derived.layer_kinds(model)
    found: list[tuple[tuple, str]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = tuple(str(key.key) for key in path)
        if keys[0] not in STACKS:
            first = -1 if keys[0] == "embedder" else len(kinds)
            found.append(((first, *_places(keys, model)), "/".join(keys)))
            continue
        numbers = [n for n, kind in enumerate(kinds) if kind == keys[0]]
        for row in range(leaf.shape[0]):
            whose = "every layer" if model.share_layers else f"layer {numbers[row]}"
            place = numbers[row], *_places(keys[1:], model)
            found.append((place, f"{'/'.join(keys[1:])} of {whose} ({keys[0]})"))
    return found


def _places(keys: tuple[str, ...], model: Model) -> tuple[int, ...]:
    order = _FORWARD
    if model.norm_position == "post":
        order = (*_POST_NORM, *order)
    return tuple(order.index(key) if key in order else len(order) for key in keys)
