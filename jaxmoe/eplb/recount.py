# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Slots given to other experts: one copy fewer of one, one more of another.

This changes the load of every device that has a copy of the two, so a gain is counted
over all of them: how much nearer they come to a `Goal`. Where a device has copies of
both experts, the two changes are counted one by one.

Legend: L layers, E experts, D devices, d devices of a node, k slots of a device, a
slots of the giver, the device from which load shall be taken.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.eplb.slots import (
    NONE,
    Node,
    Slots,
    best_pair,
    first_least,
    fold,
    lesser,
    of_device,
    positive,
    put_slot,
    take_slot,
)


class Goal(NamedTuple):
    """The load that no device shall exceed, where the mean load of a device is 1."""

    limit_L: jax.Array

    def excess(self, load: Float[Array, "... L"]) -> Float[Array, "... L"]:
        """What a load counts: how far it is over the limit.

        A part for what is over the mean makes, of moves that reach the limit, the one
        that leaves most room.
        """
        limit = self.limit_L.reshape((1,) * (load.ndim - 1) + self.limit_L.shape)
        over = positive(load - 1.0)
        return positive(load - limit) + over * over


class Recount(NamedTuple):
    """One change of each layer: a slot, the expert it gets, and what is gained."""

    slot_L: jax.Array
    expert_L: jax.Array
    gain_L: jax.Array


def best_recount(
    slots: Slots,
    node: Node,
    goal: Goal,
    *,
    wish_EL: jax.Array | None = None,
    wish_dk: jax.Array | None = None,
    keep_L: jax.Array | None = None,
) -> Recount:
    """The best change that gives a copy of one of the giver's experts to another
    device, or one of the giver's slots to another expert.

    Args:
      slots, node: the plan, and the giver in its node.
      goal: what gains are counted by.
      wish_EL, wish_dk: added to the gain, by the expert that gets a copy and by the
        slot that it gets.
      keep_L: an expert of each layer that loses no copy.
    """
    L = slots.load_EL.shape[1]
    load_EL, count_EL = slots.load_EL, slots.count_EL
    node_PL = node.expert_dkL.reshape(-1, L)

    def per_expert(of_dkL):
        none_EL = jnp.zeros(load_EL.shape)
        return none_EL.at[node_PL, jnp.arange(L)[None]].add(of_dkL.reshape(-1, L))

    now_dL = goal.excess(node.load_dL)
    share_EL = load_EL / (count_EL + 1)
    fewer_dkL = node.share_dkL / jnp.maximum(node.copies_dkL - 1, 1)
    more_dkL = node.share_dkL / (node.copies_dkL + 1)
    # What the other devices lose if a slot's copy goes, and win by one copy more.
    lost_dkL = goal.excess(node.load_dL[:, None] + fewer_dkL) - now_dL[:, None]
    won_dkL = now_dL[:, None] - goal.excess(node.load_dL[:, None] - more_dkL)
    lost_PL = jnp.take_along_axis(per_expert(lost_dkL), node_PL, 0)
    lost_dkL = lost_PL.reshape(lost_dkL.shape) - lost_dkL
    won_EL = per_expert(won_dkL)
    spare_dkL = node.copies_dkL > 1
    if keep_L is not None:
        spare_dkL &= node.expert_dkL != keep_L[None, None]
    lost_dkL = jnp.where(spare_dkL, lost_dkL, jnp.inf)
    if wish_EL is not None:
        won_EL += wish_EL
    if wish_dk is not None:
        lost_dkL -= wish_dk[:, :, None]

    out = _give_copies(node, goal, won_EL, share_EL, lost_dkL, now_dL)
    num_nodes = len(slots.expert_DkL) // len(node.expert_dkL)
    into = _take_slots(node, goal, won_EL, share_EL, lost_dkL, now_dL, num_nodes)
    better_L = out.gain_L >= into.gain_L
    return Recount(*(jnp.where(better_L, a, b) for a, b in zip(out, into, strict=True)))


def carry_out(slots: Slots, change: Recount, where_L: Bool[Array, " L"]) -> Slots:
    """Makes the change in some of the layers."""
    slot_L = jnp.where(where_L, change.slot_L, NONE)
    shape, L = slots.expert_DkL.shape, len(slot_L)
    expert_PL = slots.expert_DkL.reshape(-1, L)
    experts = take_slot(expert_PL, slot_L), change.expert_L % len(slots.count_EL)
    expert_DkL = put_slot(expert_PL, slot_L, experts[1]).reshape(shape)
    share_DkL, copies_DkL, count_EL = slots[1:4]
    for expert_L, more in zip(experts, (-1, 1), strict=True):
        more_L = where_L * more
        count_EL = count_EL.at[expert_L, jnp.arange(L)].add(more_L)
        count_L, load_L = (take_slot(of, expert_L) for of in (count_EL, slots.load_EL))
        hit_DkL = (expert_DkL == expert_L[None, None]) & where_L[None, None]
        copies_DkL = jnp.where(hit_DkL, count_L[None, None], copies_DkL)
        share_DkL = jnp.where(hit_DkL, (load_L / count_L)[None, None], share_DkL)
    return Slots(expert_DkL, share_DkL, copies_DkL, count_EL, slots.load_EL)


def _give_copies(node, goal, won_EL, share_EL, lost_dkL, now_dL) -> Recount:
    """A copy of one of the giver's experts comes into a slot of another device."""

    def cost(own, share, load):
        won, new_share = own
        return goal.excess(load - share + new_share) - won

    own_aL = jnp.stack(
        [jnp.take_along_axis(of_EL, node.expert_aL, 0) for of_EL in (won_EL, share_EL)]
    )
    best = best_pair(node, own_aL, cost, lost_dkL - now_dL[:, None])
    expert_L = take_slot(node.expert_aL, best.own_L)
    return Recount(node.slot_of(best.other_L), expert_L, -best.cost_L)


def _take_slots(node, goal, won_EL, share_EL, lost_dkL, now_dL, num_nodes) -> Recount:
    """A slot of the giver gets a copy of another expert of the node."""
    E, L = won_EL.shape
    layers = jnp.arange(L)[None]
    here_EL = jnp.ones((E, L), bool)
    if num_nodes > 1:
        here_EL = ~here_EL.at[node.expert_dkL.reshape(-1, L), layers].set(False)
    here_EL = here_EL.at[node.expert_aL, layers].set(False)
    left_aL = node.load_L[None] - node.share_aL
    lost_aL = of_device(lost_dkL, node.giver_L)

    def cost(a, share):
        return goal.excess(left_aL[a][None] + share) + lost_aL[a][None]

    k = len(left_aL)
    cost_EL = fold(k, lambda a: cost(a, share_EL), lesser)
    cost_EL -= won_EL + of_device(now_dL, node.giver_L)[None]
    cost_L, expert_L = first_least(jnp.where(here_EL, cost_EL, jnp.inf))
    new_share_L = take_slot(share_EL, expert_L)
    _, own_L = first_least(goal.excess(left_aL + new_share_L[None]) + lost_aL)
    return Recount(node.own_slot_of(own_L % k), expert_L, -cost_L)
