# SPDX-License-Identifier: Apache-2.0
"""Floor 1. The leaves of a tree by name: for messages, files and comparisons."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by name, the '/'-joined path of keys, in the tree's order."""
    return {"/".join(path): leaf for path, leaf in paths(tree).items()}


def paths(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves by path, in the tree's order.

    Raises:
      ValueError: if two names are the same, joined by '/' or (as in orbax) by '.'.
    """
    leaves: dict[tuple[str, ...], Any] = {}
    seen: dict[str, tuple[str, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if not keys:
            raise ValueError(f"the tree is a single {type(leaf).__name__}, not a dict")
        for joined in {"/".join(keys), ".".join(keys)}:
            if seen.setdefault(joined, keys) != keys or keys in leaves:
                raise ValueError(
                    f"two leaves are both named {joined!r}: names must differ."
                    " Rename a key, or leave out '/' and '.' in keys."
                )
        leaves[keys] = leaf
    return leaves


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dicts from leaves by path: what orbax is given, whatever the tree was."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def lookup(tree: Any, path: tuple[str, ...]) -> Any:
    """What stands at a path in nested dicts."""
    return functools.reduce(lambda node, key: node[key], path, tree)


def describe(leaf: Any) -> dict[str, Any]:
    """Shape and type of an array, of its abstract form or of a Python number."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _text(leaf: Mapping[str, Any] | None) -> str:
    return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"


def differences(saved: list[dict[str, Any]], tree: Any) -> list[str]:
    """One line per leaf that is missing, extra, or of another shape or type."""
    then = {leaf["name"]: leaf for leaf in saved}
    now = {name: describe(leaf) for name, leaf in named_leaves(tree).items()}
    return [
        f"{name}: saved {_text(then.get(name))}, now {_text(now.get(name))}"
        for name in dict.fromkeys((*then, *now))
        if _text(then.get(name)) != _text(now.get(name))
    ]
