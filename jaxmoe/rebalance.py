# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Rebalancing: a new placement of the experts, between two steps.

One jitted function from state to state. It plans from the average load, and moves the
masters and the optimizer state of experts that leave their owner's device; the step
that follows is the same program on other integers. The same move brings a state into
logical order, in which it is saved, and back.

Legend: L MoE layers, E experts, P slots, X devices along `expert`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxmoe import config_derived, tree_names
from jaxmoe import model as model_lib
from jaxmoe.eplb import plan as plan_lib
from jaxmoe.eplb.placement import Move, carry, own, plan_move
from jaxmoe.train_step import Setup, TrainState

_PLACEMENT = f"buffers/moe/{model_lib.PLACEMENT}/"  # in the names of a checkpoint


@flax.struct.dataclass
class Report:
    """What a rebalance did.

    Attributes:
      before_L, after_L: max/mean device load of each layer, by the average load.
      copies: copies that came to a device that had none of their expert.
      owners: experts whose masters moved.
      rounds: rounds of the move; in each, every device sends at most one row.
      moved_bytes: rounds times the bytes of a row, masters and optimizer state, that
        one device sends.
      refused: layers whose load was not finite or negative; they keep their plan.
    """

    before_L: jax.Array
    after_L: jax.Array
    copies: jax.Array
    owners: jax.Array
    rounds: jax.Array
    moved_bytes: jax.Array
    refused: jax.Array


class Rebalancer:
    """The placement of one run.

    Args:
      setup: With `Balancer.interval` set.
    """

    def __init__(self, setup: Setup):
        self._setup, self._config = setup, setup.config
        self._by_expert = _by_expert(setup)
        state = setup.state_sharding
        self._rebalance = jax.jit(
            self.step,
            in_shardings=(state,),
            out_shardings=(state, setup.everywhere),
            donate_argnums=0,
        )
        ends = {"in_shardings": (state,), "out_shardings": state}
        # The state that is saved is still needed, that which was read is not.
        self.to_logical = jax.jit(partial(self._reorder, logical=True), **ends)
        self.from_logical = jax.jit(
            partial(self._reorder, logical=False), **ends, donate_argnums=0
        )

    def __call__(self, state: TrainState) -> tuple[TrainState, Report]:
        """A state with the experts where the average load wants them; `state` is given
        up."""
        return self._rebalance(state)

    def step(self, state: TrainState) -> tuple[TrainState, Report]:
        """The function that is jitted."""
        balancer, moe = self._config.balancer, self._config.moe
        placement = model_lib.placement_of(state.buffers)
        old_LP, load_LE = placement["slots"], placement["load"]
        X = self._setup.axis.size
        plan = plan_lib.rebalance_experts(
            load_LE,
            config_derived.num_replicas(balancer, moe),
            moe.num_groups,
            balancer.nodes,
            X,
            policy=balancer.policy,
            previous=old_LP,
            threshold=balancer.threshold,
            tolerance=balancer.tolerance,
        )
        new_LP = plan_lib.keep_places(plan.physical_to_logical, old_LP, X)
        return self.place(state, new_LP)

    def place(self, state: TrainState, slots_LP: jax.Array):
        """(state under another plan, report)."""
        placement = model_lib.placement_of(state.buffers)
        load_LE, X = placement["load"], self._setup.axis.size
        rows_LE = own(placement["rows"], slots_LP, X)
        same_L = jnp.all(slots_LP == placement["slots"], axis=1)
        rows_LE = jnp.where(same_L[:, None], placement["rows"], rows_LE)
        move = plan_move(placement["rows"], rows_LE, X)
        state = self._moved(state, move)
        rounds = jnp.sum(move.rounds_X)
        report = Report(
            before_L=plan_lib.max_over_mean(load_LE, placement["slots"], X),
            after_L=plan_lib.max_over_mean(load_LE, slots_LP, X),
            copies=jnp.sum(plan_lib.moved(slots_LP, placement["slots"], X)),
            owners=jnp.sum(move.shift_LB > 0),
            rounds=rounds,
            moved_bytes=rounds.astype(jnp.float32) * self.row_bytes(),
            refused=jnp.sum(~plan_lib.valid_load(load_LE)),
        )
        placement = {**placement, "slots": slots_LP, "rows": rows_LE}
        return _with_placement(state, placement), report

    def restored(self, state: TrainState) -> TrainState:
        """A state read in the form of `of_checkpoint`, its experts where they were, or
        else where they are at the start; `state` is given up."""
        first = jax.jit(
            self._setup.first_placement, out_shardings=self._setup.everywhere
        )
        placement = {**first(), **model_lib.placement_of(state.buffers)}
        return self.from_logical(_with_placement(state, placement))

    def row_bytes(self) -> int:
        """Bytes of what a device sends of one expert in a round, on one device."""
        leaves = jax.tree.leaves(self._setup.abstract_state)
        total = 0
        for leaf, by_expert in zip(leaves, self._by_expert, strict=True):
            if by_expert:
                _, _, *rest = leaf.sharding.shard_shape(leaf.shape)
                total += leaf.dtype.itemsize * math.prod(rest)
        return total

    def _reorder(self, state: TrainState, logical: bool) -> TrainState:
        rows_LE = model_lib.placement_of(state.buffers)["rows"]
        order_LE = jnp.broadcast_to(jnp.arange(rows_LE.shape[1]), rows_LE.shape)
        ends = (rows_LE, order_LE) if logical else (order_LE, rows_LE)
        return self._moved(state, plan_move(*ends, self._setup.axis.size))

    def _moved(self, state: TrainState, move: Move) -> TrainState:
        """The state with every array that has a row per expert in another order."""
        leaves, tree = jax.tree.flatten(state)
        for i, by_expert in enumerate(self._by_expert):
            if by_expert:
                leaves[i] = self._carry(leaves[i], self._spec(i), move)
        return jax.tree.unflatten(tree, leaves)

    def _carry(self, leaf: jax.Array, spec: P, move: Move) -> jax.Array:
        mapped = jax.shard_map(
            carry,
            mesh=self._setup.mesh,
            in_specs=(P(), spec),
            out_specs=spec,
            check_vma=False,
        )
        return mapped(move, leaf)

    def _spec(self, i: int) -> P:
        return jax.tree.leaves(self._setup.state_sharding)[i].spec


def of_checkpoint(
    state: TrainState, leaves: list[dict[str, Any]]
) -> tuple[TrainState, list[dict[str, Any]]]:
    """What a checkpoint can give, whatever its placement, and what it must agree with.

    A placement for another number of slots is left alone, and so is one where there is
    no balancer now.

    Args:
      state: abstract.
      leaves: of the checkpoint.

    Returns:
      The part of the state to read, and the leaves without the placement's others.
    """
    saved = {leaf["name"]: leaf["shape"] for leaf in leaves}
    placement = model_lib.placement_of(state.buffers)
    if placement is not None:
        same = {
            n: saved.get(_PLACEMENT + n) == [*x.shape] for n, x in placement.items()
        }
        same["rows"] &= same["slots"]  # one goes with the other
        placement = {n: x for n, x in placement.items() if same[n]}
        state = _with_placement(state, placement)
    asked = tree_names.named_leaves(state)
    others = [n for n in saved if of_placement(n) and n not in asked]
    return state, [leaf for leaf in leaves if leaf["name"] not in others]


def of_placement(name: str) -> bool:
    """Whether a leaf of a checkpoint says where the experts were."""
    return name.startswith(_PLACEMENT)


def _by_expert(setup: Setup) -> list[bool]:
    """Of every array of a state, whether it is [L, E, ...] laid out as the experts'
    parameters."""
    params = setup.abstract_params

    def of_param(path, leaf) -> bool:
        names = [getattr(key, "key", None) for key in path]
        return names[:3] == ["moe", "moe", "experts"]

    marks = jax.tree_util.tree_map_with_path(of_param, params)

    def of_moment(leaf, mark: bool, param) -> bool:
        # A factored moment is laid out as its parameter, but for the missing dimension.
        return mark and leaf.ndim > 1 and leaf.shape[:2] == param.shape[:2]

    state = setup.abstract_state
    optimizer = optax.tree_utils.tree_map_params(
        setup.optimizer,
        of_moment,
        state.optimizer,
        marks,
        params,
        transform_non_params=lambda _: False,
    )
    buffers = jax.tree.map(lambda _: False, state.buffers)
    marked = TrainState(False, marks, buffers, optimizer)
    return jax.tree.leaves(marked)


def _with_placement(state: TrainState, placement: Any) -> TrainState:
    buffers = model_lib.with_placement(state.buffers, placement)
    return dataclasses.replace(state, buffers=buffers)
