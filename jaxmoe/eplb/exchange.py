# SPDX-License-Identifier: Apache-2.0
"""Floor 4. The policy `swap`: copies change places until no exchange helps.

The start is the public algorithm's plan with no more copies of an expert than there are
devices. `spread` takes second copies of an expert off a device. `level` exchanges
copies between the heaviest device and others, and `recount` gives a slot to another
expert where no exchange helps any more. Nothing leaves its node.

Legend: L layers, E experts, P slots, N nodes, D devices, d devices of a node, k slots
of a device, a slots of the device that gives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.eplb import greedy
from jaxmoe.eplb.recount import Goal, best_recount, carry_out
from jaxmoe.eplb.slots import (
    NONE,
    Slots,
    best_pair,
    exchange,
    first_least,
    heaviest_device,
    held,
    index_of,
    known,
    node_of,
    of_device,
    slots_of,
)

_GAIN = 1e-6  # an exchange must win more than this share, or rounding would go on
_EVEN = 1.01  # a layer this near to the lower bound is not tried again
_KICK = 0.03  # of the mean load; how far gains are disturbed where it is


def tries(num_replicas: int) -> int:
    """How often a layer is tried again after changes that helped nothing by themselves.

    Small plans get stuck more easily, and a try costs them less.
    """
    return min(64, 4096 // num_replicas)


def swap(
    load_LE: Float[Array, "L E"],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_devices: int,
) -> Int[Array, "L P"]:
    """Plans every layer; arguments as of `greedy.place`, and nodes can hold groups.

    No expert lies twice on a device. A layer in which only the public algorithm's plan
    with such an expert has a lighter heaviest device gets that plan.
    """
    sizes = num_replicas, num_groups, num_nodes, num_devices
    most = num_devices // num_nodes
    if most in (1, num_replicas // num_nodes):  # nothing can be exchanged, or improved
        return greedy.place(load_LE, *sizes)[0]

    def heaviest_L(slots_LP):
        return heaviest(slots_of(slots_LP, load_LE, num_devices))

    start_LP, _ = greedy.place(load_LE, *sizes, most_copies=most)
    start = slots_of(start_LP, load_LE, num_devices)
    found_LP = improve(spread(start, num_nodes), num_nodes).plan_LP()
    public_LP = lax.cond(
        jnp.any(start.count_EL >= most),
        lambda: greedy.place(load_LE, *sizes)[0],
        lambda: start_LP,  # the limit changed nothing
    )
    worse_L = heaviest_L(found_LP) > heaviest_L(public_LP) * (1 + _GAIN)
    return jnp.where(worse_L[:, None], public_LP, found_LP)


def spread(slots: Slots, num_nodes: int) -> Slots:
    """Exchanges second copies of an expert on a device for experts of other devices.

    It needs a device of the node that has no copy. With at most d copies of each expert
    in a node there is one, and there is an exchange that makes no other second copy:
    that device has k experts, of which the first has at most k - 2.
    """
    L = slots.expert_DkL.shape[-1]

    def todo(state):
        return jnp.any(_second(*state) < NONE)

    def step(state):
        slots, after_L = state
        slot_L = _second(slots, after_L)
        there_L = slot_L < NONE
        k = slots.expert_DkL.shape[1]
        slot_L = jnp.where(there_L, slot_L, 0)
        node = node_of(slots, slot_L // k, num_nodes)
        expert_L, share_L = (
            of_device(of_aL, slot_L % k) for of_aL in (node.expert_aL, node.share_aL)
        )
        lacks_dL = ~held(expert_L[None], node.expert_dkL)[0]
        same_dkkL = node.expert_dkL[:, :, None] == node.expert_dkL[:, None]
        twice_dkL = jnp.sum(same_dkkL, 2) > 1
        allowed_dkL = ~known(node.expert_aL, node.expert_dkL) | twice_dkL
        change_dkL = share_L[None, None] - node.share_dkL
        heavier_dkL = jnp.maximum(
            node.load_dL[:, None] + change_dkL, node.load_L[None, None] - change_dkL
        )
        allowed_dkL &= lacks_dL[:, None]
        _, best_L = first_least(jnp.where(allowed_dkL, heavier_dkL, jnp.inf))
        found_L = there_L & (best_L < NONE)
        slots = exchange(slots, slot_L, node.slot_of(best_L), found_L)
        return slots, jnp.where(found_L | ~there_L, after_L, slot_L + 1)

    return lax.while_loop(todo, step, (slots, jnp.zeros(L, jnp.int32)))[0]


def level(slots: Slots, num_nodes: int, going_L: Bool[Array, " L"]) -> Slots:
    """Exchanges until no exchange makes the heaviest device of a layer lighter.

    Each step makes that exchange of the heaviest device with one of its node after
    which the heavier of the two is lightest. None puts an expert twice on a device.
    """

    def cost(own, share, load):
        own_share, giver_load = own
        change = own_share - share
        return jnp.maximum(load + change, giver_load - change)

    def todo(state):
        return jnp.any(state[1])

    def step(state):
        slots, going_L = state
        _, giver_L = heaviest_device(slots)
        node = node_of(slots, giver_L, num_nodes)
        known_dkL = known(node.expert_aL, node.expert_dkL)
        load_aL = jnp.broadcast_to(node.load_L[None], node.share_aL.shape)
        own_aL = jnp.stack([node.share_aL, load_aL])
        best = best_pair(node, own_aL, cost, jnp.where(known_dkL, jnp.inf, 0.0))
        found_L = going_L & (best.cost_L < node.load_L * (1 - _GAIN))
        places = node.own_slot_of(best.own_L), node.slot_of(best.other_L)
        return exchange(slots, *places, found_L), found_L

    return lax.while_loop(todo, step, (slots, going_L))[0]


def improve(slots: Slots, num_nodes: int) -> Slots:
    """Exchanges until nothing helps; then gives slots to other experts and goes on.

    The first change is the best one, later ones are disturbed by noise, the same in
    every layer, and every other time there are two. What is heavier than before is
    dropped. Layers near to their lower bound are done with.
    """
    D, k, L = slots.share_DkL.shape
    node_load_NL = slots.share_DkL.reshape(num_nodes, -1, L).sum(1)
    each_L = jnp.max(slots.load_EL, 0) / (D // num_nodes)
    bound_L = jnp.maximum(jnp.max(node_load_NL, 0) / (D // num_nodes), each_L)

    def todo(state):
        _, _, going_L, number = state
        return jnp.any(going_L) & (number <= tries(D * k))

    def step(state):
        best, heavy_L, going_L, number = state
        key = jax.random.fold_in(jax.random.key(0), number)
        noise = jnp.where(number > 1, _KICK, 0.0)

        def kick(i, slots):
            kicks_L = going_L & (number > 0)
            of_kick = jax.random.fold_in(key, i)
            return _kick(slots, num_nodes, of_kick, noise, kicks_L)

        tried = lax.fori_loop(0, 2 - number % 2, kick, best)
        tried = level(tried, num_nodes, going_L)
        then_L = heaviest(tried)
        better_L = going_L & (then_L < heavy_L * (1 - _GAIN))
        best = jax.tree.map(
            lambda new, old: jnp.where(better_L[(None,) * (new.ndim - 1)], new, old),
            tried,
            best,
        )
        heavy_L = jnp.where(better_L, then_L, heavy_L)
        return best, heavy_L, heavy_L > bound_L * _EVEN, number + 1

    state = slots, heaviest(slots), jnp.ones(L, bool), jnp.int32(0)
    return lax.while_loop(todo, step, state)[0]


def heaviest(slots: Slots) -> Float[Array, " L"]:
    """The load of the heaviest device."""
    return heaviest_device(slots)[0]


def _kick(slots, num_nodes, key, noise, where_L) -> Slots:
    """Gives a slot that has to do with the heaviest device to another expert."""
    heavy_L, giver_L = heaviest_device(slots)
    node = node_of(slots, giver_L, num_nodes)
    goal = Goal(heavy_L * (1 - 10 * _GAIN))
    (E, L), shape_dk = slots.load_EL.shape, node.expert_dkL.shape[:2]
    for_E, for_dk = (
        noise * jax.random.gumbel(of_key, shape)
        for of_key, shape in zip(jax.random.split(key), ((E,), shape_dk), strict=True)
    )
    for_EL = jnp.broadcast_to(for_E[:, None], (E, L))
    found = best_recount(slots, node, goal, wish_EL=for_EL, wish_dk=for_dk)
    return carry_out(slots, found, where_L & (found.gain_L > -jnp.inf))


def _second(slots: Slots, after_L: Int[Array, " L"]) -> Int[Array, " L"]:
    """The first slot, from one on, whose expert the device has in an earlier slot."""
    expert_DkL = slots.expert_DkL
    index_DkL = index_of(expert_DkL.shape)
    k = expert_DkL.shape[1]
    earlier_kk = jnp.arange(k)[:, None] > jnp.arange(k)[None]
    same_DkkL = expert_DkL[:, :, None] == expert_DkL[:, None]
    second_DkL = jnp.any(same_DkkL & earlier_kk[None, :, :, None], 2)
    second_DkL &= index_DkL >= after_L[None, None]
    return jnp.min(jnp.where(second_DkL, index_DkL, NONE), (0, 1))
