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
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.eplb.slots import (
    Node,
    Slots,
    first_least,
    held,
    index_of,
    of_device,
    partner,
)


class Goal(NamedTuple):
    """The load that no device shall exceed, and the mean load."""

    limit_L: jax.Array
    mean_L: jax.Array

    def excess(self, load: Float[Array, "... L"]) -> Float[Array, "... L"]:
        """What a load counts: how far it is over the limit.

        A part for what is over the mean makes, of moves that reach the limit, the one
        that leaves most room.
        """
        mean_L = jnp.where(self.mean_L > 0, self.mean_L, 1.0)
        shape = (1,) * (load.ndim - 1) + mean_L.shape
        limit, mean = self.limit_L.reshape(shape), mean_L.reshape(shape)
        over = jnp.maximum(load - mean, 0.0)
        return jnp.maximum(load - limit, 0.0) + over * over / mean


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
    noise: tuple[jax.Array, jax.Array] | None = None,
) -> Recount:
    """The best change that gives a copy of one of the giver's experts to another
    device, or one of the giver's slots to another expert.

    Args:
      slots, node: the plan, and the giver in its node.
      goal: what gains are counted by.
      noise: a random key, and by how much of the mean load to disturb gains.
    """
    D, k, L = slots.expert_DkL.shape
    load_EL, count_EL = slots.load_EL, slots.count_EL
    node_PL = node.expert_dkL.reshape(-1, L)

    def of_node(of_EL):
        return jnp.take_along_axis(of_EL, node_PL, 0).reshape(node.expert_dkL.shape)

    def per_expert(of_dkL):
        none_EL = jnp.zeros(load_EL.shape)
        return none_EL.at[node_PL, jnp.arange(L)[None]].add(of_dkL.reshape(-1, L))

    now_dL = goal.excess(node.load_dL)
    fewer_EL = load_EL / jnp.maximum(count_EL * (count_EL - 1), 1)
    more_EL = load_EL / (count_EL * (count_EL + 1))
    share_EL = load_EL / (count_EL + 1)
    # What the other devices lose if a slot's copy goes, and win by one copy more.
    lost_dkL = goal.excess(node.load_dL[:, None] + of_node(fewer_EL)) - now_dL[:, None]
    won_dkL = now_dL[:, None] - goal.excess(node.load_dL[:, None] - of_node(more_EL))
    lost_dkL = of_node(per_expert(lost_dkL)) - lost_dkL
    won_EL = per_expert(won_dkL)
    lost_dkL = jnp.where(of_node(count_EL) > 1, lost_dkL, jnp.inf)
    if noise is not None:
        key, scale = noise
        for_E = scale * jax.random.gumbel(key, (len(load_EL),))
        for_dk = scale * jax.random.gumbel(jax.random.fold_in(key, 1), node.expert_dkL.shape[:2])
        won_EL += for_E[:, None] * goal.mean_L[None]
        lost_dkL += for_dk[:, :, None] * goal.mean_L[None, None]

    out = _give_copies(node, goal, won_EL, share_EL, lost_dkL, now_dL)
    into = _take_slots(node, goal, won_EL, share_EL, lost_dkL, now_dL)
    better_L = out.gain_L >= into.gain_L
    return Recount(*(jnp.where(better_L, a, b) for a, b in zip(out, into, strict=True)))


def carry_out(slots: Slots, change: Recount, where_L: Bool[Array, " L"]) -> Slots:
    """Makes the change in some of the layers."""
    expert_DkL, count_EL, load_EL = slots
    slot_DkL = index_of(expert_DkL.shape)
    hit_DkL = (slot_DkL == change.slot_L[None, None]) & where_L[None, None]
    before_L = jnp.sum(jnp.where(hit_DkL, expert_DkL, 0), (0, 1))
    expert_DkL = jnp.where(hit_DkL, change.expert_L[None, None], expert_DkL)
    expert_EL = index_of(count_EL.shape)
    count_EL += (expert_EL == change.expert_L[None]) & where_L[None]
    count_EL -= (expert_EL == before_L[None]) & where_L[None]
    return Slots(expert_DkL, count_EL, load_EL)


def _give_copies(node, goal, won_EL, share_EL, lost_dkL, now_dL) -> Recount:
    """A copy of one of the giver's experts comes into a slot of another device."""
    won_aL, share_aL = (
        jnp.take_along_axis(of_EL, node.expert_aL, 0) for of_EL in (won_EL, share_EL)
    )
    left_dkL = node.load_dL[:, None] - node.share_dkL
    then_adkL = goal.excess(left_dkL[None] + share_aL[:, None, None])
    gain_adkL = won_aL[:, None, None] - then_adkL
    held_adL = held(node.expert_aL, node.expert_dkL)
    gain_adkL = jnp.where(held_adL[:, :, None], -jnp.inf, gain_adkL)
    fixed_dkL = now_dL[:, None] - lost_dkL
    gain_L, slot_L = first_least(-(jnp.max(gain_adkL, 0) + fixed_dkL))
    own_L = partner(-gain_adkL, slot_L)
    expert_L = jnp.take_along_axis(node.expert_aL, own_L[None] % len(won_aL), 0)[0]
    return Recount(node.slot_of(slot_L), expert_L, -gain_L)


def _take_slots(node, goal, won_EL, share_EL, lost_dkL, now_dL) -> Recount:
    """A slot of the giver gets a copy of another expert of the node."""
    E, L = won_EL.shape
    layers = jnp.arange(L)[None]
    none_EL = jnp.zeros((E, L), bool)
    here_EL = none_EL.at[node.expert_dkL.reshape(-1, L), layers].set(True)
    here_EL = here_EL.at[node.expert_aL, layers].set(False)
    left_aL = node.load_L[None] - node.share_aL
    fixed_aL = of_device(now_dL, node.giver_L)[None] - of_device(lost_dkL, node.giver_L)
    then_aEL = goal.excess(left_aL[:, None] + share_EL[None])
    gain_aEL = fixed_aL[:, None] - then_aEL
    gain_EL = jnp.where(here_EL, jnp.max(gain_aEL, 0) + won_EL, -jnp.inf)
    gain_L, expert_L = first_least(-gain_EL)
    own_L = partner(-gain_aEL, expert_L)
    return Recount(node.own_slot_of(own_L), expert_L, -gain_L)
