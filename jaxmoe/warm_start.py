# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Starting a run from the weights of another one (`Train.init_from`).

Where that run shared one set of layer weights and this one does not, every layer gets a
copy: the "delink" of Pseudo-to-Real (M6-10T, arXiv 2110.03888, section 3).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import model as model_lib
from jaxmoe import tree_names
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import ConfigError
from jaxmoe.rebalance import of_placement
from jaxmoe.train_step import TrainState


def load_weights(run: str, abstract_state: TrainState) -> dict[str, Any]:
    """`params` and `buffers` of the newest complete checkpoint of a run.

    Args:
      run: The run folder.
      abstract_state: Shapes, types and shardings to load into.

    Raises:
      ConfigError: if `run` has no complete checkpoint, or its weights do not fit; each
        differing array is named.
    """
    buffers = model_lib.with_placement(abstract_state.buffers, None)
    own = {"params": abstract_state.params, "buffers": buffers}
    with Checkpointer(Path(run) / "checkpoints", read_only=True) as checkpoints:
        newest = checkpoints.latest()
        if newest is None:
            raise ConfigError(
                f"{run!r} has no complete checkpoint. Weights come from the folder of a"
                " run that saved at least once. Name such a folder, or leave"
                " Train.init_from empty for random weights."
            )
        leaves = checkpoints.leaves(newest)
        saved = {x["name"]: x for x in leaves if not of_placement(x["name"])}
        names = tree_names.named_leaves(own)
        if left := [n for n in saved if n.split("/")[0] in own and n not in names]:
            raise ConfigError(
                f"the run {run!r} has weights that this model has no place for:"
                f" {', '.join(left)}. A model is the same function only with all of"
                " them. Use the Model and MoE sections of that run's config.gin."
            )
        wanted = [_shared_form(x, saved.get(name)) for name, x in names.items()]
        wanted = jax.tree.unflatten(jax.tree.structure(own), wanted)
        loaded = checkpoints.restore(newest, wanted, partial=True)
    print(f"weights of {run}, step {newest}", flush=True)
    return jax.tree.map(_delink, loaded, own)


def with_weights(state: TrainState, weights: dict[str, Any]) -> TrainState:
    """A first state with other weights; its experts are in logical order."""
    if not weights:
        return state
    placement = model_lib.placement_of(state.buffers)
    buffers = model_lib.with_placement(weights["buffers"], placement)
    return dataclasses.replace(state, params=weights["params"], buffers=buffers)


def _shared_form(own: Any, saved: dict[str, Any] | None) -> jax.ShapeDtypeStruct:
    """How to load a leaf: as it is here, or as the single layer that was saved."""
    if saved and own.ndim and saved["shape"] == [1, *own.shape[1:]] != list(own.shape):
        replicated = NamedSharding(own.sharding.mesh, P())
        return jax.ShapeDtypeStruct((1, *own.shape[1:]), own.dtype, sharding=replicated)
    return own


def _delink(loaded: jax.Array, own: Any) -> jax.Array:
    """A copy of a shared layer's weights for every layer of `own`."""
    if loaded.shape == own.shape:
        return loaded
    copy = jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=own.sharding)
    return copy(loaded, own.shape)
