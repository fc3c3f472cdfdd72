# SPDX-License-Identifier: Apache-2.0
"""Floor 4. The policy `incremental`: as few copies as possible move.

The start is the current plan. While the heaviest device of a layer is too heavy, the
change is made that wins most per copy moved: an exchange moves two, giving a slot to
another expert moves one.

Legend: L layers, E experts, P slots, G groups, N nodes, D devices, d devices of a node,
k slots of a device, a slots of the device that gives.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.eplb import greedy
from jaxmoe.eplb.exchange import heaviest, swap
from jaxmoe.eplb.recount import Goal, best_recount, carry_out
from jaxmoe.eplb.slots import (
    Node,
    Slots,
    best_pair,
    exchange,
    first_least,
    heaviest_device,
    index_of,
    known,
    node_of,
    of_device,
    slots_of,
    take_slot,
)

_ROUNDING = 1e-6  # loads are added in float32
_MANY, _LATE = 16, 2  # of so many layers or more, one of so many may be late
_URGES, _URGE = 4, 100.0  # how often to urge; more than anything gains, in mean loads


def incremental(
    load_LE: Float[Array, "L E"],
    current_LP: Int[Array, "L P"],
    num_groups: int,
    num_nodes: int,
    num_devices: int,
    tolerance: jax.Array,
) -> Int[Array, "L P"]:
    """Plans every layer.

    Args:
      load_LE: finite and not negative.
      current_LP: the plan from which copies move.
      num_groups, num_nodes, num_devices: as of `greedy.place`; nodes can hold groups.
      tolerance: the largest load of a device over the lowest there can be: the mean,
        or what the groups or one expert with a copy on every device make of it.

    Returns:
      A plan within the tolerance. Where no way there is found, the better one of what
      was reached and of the policy `swap`, if that is better by more than the
      tolerance; it is taken as well where the current plan splits a group of experts
      over nodes.
    """
    P = current_LP.shape[1]
    slots = slots_of(current_LP, load_LE, num_devices)
    limit_L = tolerance * (1 - _ROUNDING) * _bound(slots, num_groups, num_nodes)
    settled_LP = settle(slots, num_nodes, limit_L).plan_LP()
    reached_L = heaviest(slots_of(settled_LP, load_LE, num_devices))
    split_L = _splits_groups(current_LP, load_LE.shape[1], num_groups, num_nodes)
    split_L &= jnp.any(load_LE > 0, 1)

    def with_swap():
        swap_LP = swap(load_LE, P, num_groups, num_nodes, num_devices)
        lighter_L = heaviest(slots_of(swap_LP, load_LE, num_devices))
        take_L = split_L | ((reached_L > limit_L) & (lighter_L * tolerance < reached_L))
        return jnp.where(take_L[:, None], swap_LP, settled_LP)

    return lax.cond(
        jnp.any(split_L | (reached_L > limit_L)), with_swap, lambda: settled_LP
    )


def settle(slots: Slots, num_nodes: int, limit_L: Float[Array, " L"]) -> Slots:
    """Changes a plan until no device exceeds a load, or no change helps.

    An expert that has become hot can fill a device so far that a copy of it elsewhere
    is a step back, until that other device has been relieved. Where nothing helps, the
    heaviest device gives a copy of its heaviest expert all the same, a few times at
    most, and the newest of these copies stay.
    """
    D, _, L = slots.expert_DkL.shape
    if num_nodes == D:
        return slots  # a node is one device: nothing can go elsewhere
    goal = Goal(limit_L)
    none_L = jnp.zeros(L, jnp.int32)
    state = _State(slots, goal, jnp.ones(L, bool), none_L, none_L - 1, none_L)
    return _run(state, num_nodes).slots


class _State(NamedTuple):
    """Where the layers are.

    Attributes:
      slots, goal: the plan, and what is wanted.
      going_L: whether a layer is not done.
      stuck_L: counts up where nothing helps, and again when the next step, which is
        urged, is made: odd in between.
      keep_L: the expert that was urged last.
      steps_L: taken; a layer takes no more than it has slots.
    """

    slots: Slots
    goal: Goal
    going_L: jax.Array
    stuck_L: jax.Array
    keep_L: jax.Array
    steps_L: jax.Array


def _run(state: _State, num_nodes: int) -> _State:
    """Goes on until all layers are done.

    Some take twice as long as most. When half are done the others go on alone, and so
    on down to a few.
    """
    L = len(state.going_L)
    few = L // _LATE if L >= _MANY else 0
    state = lax.while_loop(
        lambda state: jnp.sum(state.going_L) > few,
        lambda state: _step(state, num_nodes),
        state,
    )
    if not few:
        return state
    late_L = lax.top_k(state.going_L.astype(jnp.int32), few)[1]
    late = jax.tree.map(lambda of: jnp.take(of, late_L, axis=-1), state)
    return jax.tree.map(
        lambda of, late: of.at[..., late_L].set(late, unique_indices=True),
        state,
        _run(late, num_nodes),
    )


def _step(state: _State, num_nodes: int) -> _State:
    """One change of each layer that is going."""
    slots, goal, going_L, stuck_L, keep_L, steps_L = state
    heavy_L, giver_L = heaviest_device(slots)
    node = node_of(slots, giver_L, num_nodes)
    gain_L, own_L, other_L = _best_exchange(node, goal)
    urged_L = stuck_L % 2 == 1
    hot_L = take_slot(node.expert_aL, first_least(-node.share_aL)[1])
    hot_EL = index_of(slots.load_EL.shape) == hot_L[None]
    wish_EL = jnp.where(hot_EL & urged_L[None], _URGE, 0.0)
    keep_L = jnp.where(urged_L, hot_L, keep_L)
    change = best_recount(slots, node, goal, wish_EL=wish_EL, keep_L=keep_L)
    exchange_L = gain_L / 2 >= change.gain_L
    most_L = jnp.maximum(gain_L / 2, change.gain_L)
    helps_L = most_L > _ROUNDING
    going_L &= (heavy_L > goal.limit_L) & (helps_L | (stuck_L < 2 * _URGES))
    going_L &= (helps_L | ~urged_L) & (steps_L < slots.expert_DkL[..., 0].size)
    # Each leaves the layers of the other alone.
    slots = exchange(slots, own_L, other_L, going_L & helps_L & exchange_L)
    slots = carry_out(slots, change, going_L & helps_L & ~exchange_L)
    stuck_L += (going_L & ~helps_L) | urged_L
    return _State(slots, goal, going_L, stuck_L, keep_L, steps_L + 1)


def _best_exchange(node: Node, goal: Goal) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the best exchange with the giver wins, and its two slots."""
    now_dL = goal.excess(node.load_dL)

    def cost(own, share, load):
        own_share, giver_load = own
        change = own_share - share
        return goal.excess(load + change) + goal.excess(giver_load - change)

    known_dkL = known(node.expert_aL, node.expert_dkL)
    load_aL = jnp.broadcast_to(node.load_L[None], node.share_aL.shape)
    fixed_dkL = jnp.where(known_dkL, jnp.inf, -now_dL[:, None])
    best = best_pair(node, jnp.stack([node.share_aL, load_aL]), cost, fixed_dkL)
    gain_L = of_device(now_dL, node.giver_L) - best.cost_L
    return gain_L, node.own_slot_of(best.own_L), node.slot_of(best.other_L)


def _bound(slots: Slots, num_groups: int, num_nodes: int) -> jax.Array:
    """The lowest load of the heaviest device that can be hoped for."""
    load_LE = slots.load_EL.T
    L, d = len(load_LE), len(slots.expert_DkL) // num_nodes
    bound_L = jnp.maximum(1.0, jnp.max(load_LE, 1) / d)
    if num_nodes == 1:
        return bound_L
    group_GL = load_LE.reshape(L, num_groups, -1).sum(-1).T
    order_GL, slot_GL = greedy.pack(group_GL, num_nodes)
    node_GL = slot_GL // (num_groups // num_nodes)
    none_NL = jnp.zeros((num_nodes, L))
    sorted_GL = jnp.take_along_axis(group_GL, order_GL, 0)
    node_NL = none_NL.at[node_GL, jnp.arange(L)[None]].add(sorted_GL)
    return jnp.maximum(bound_L, jnp.max(node_NL, 0) / d)


def _splits_groups(
    slots_LP: Int[Array, "L P"], num_experts: int, num_groups: int, num_nodes: int
) -> Bool[Array, " L"]:
    """Whether copies of the experts of one group lie on several nodes."""
    L, P = slots_LP.shape
    if num_nodes == 1:
        return jnp.zeros(L, bool)
    layers_L1 = jnp.arange(L)[:, None]
    group_LP = slots_LP // (num_experts // num_groups)
    node_LP = lax.broadcasted_iota(jnp.int32, (L, P), 1) // (P // num_nodes)
    low_LG = jnp.full((L, num_groups), num_nodes).at[layers_L1, group_LP].min(node_LP)
    high_LG = jnp.zeros_like(low_LG).at[layers_L1, group_LP].max(node_LP)
    return jnp.any(low_LG < high_LG, 1)
