# SPDX-License-Identifier: Apache-2.0
"""Floor 4. A plan laid out for being improved step by step, in all layers at once.

Layers lie along the last dimension, where the processor's vectors are. Reductions over
the few slots of a device are written out (`fold`): XLA's CPU backend vectorises that,
and takes eight times longer for the same as one reduction.

Legend: L layers, E experts, P slots, N nodes, D devices, d devices of a node, k slots
of a device, a slots of the device that gives.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NONE = 2**30  # an index that there is not
_WRITTEN_OUT = 16  # slots of a device up to which folds are; more take long to compile


class Slots(NamedTuple):
    """A plan, and what it makes of the loads, which are in parts of a device's mean.

    Attributes:
      expert_DkL: of each slot.
      share_DkL: load of each slot: all copies of an expert have the same.
      copies_DkL: copies that the expert of each slot has.
      count_EL: copies of each expert.
      load_EL: of each expert.
    """

    expert_DkL: jax.Array
    share_DkL: jax.Array
    copies_DkL: jax.Array
    count_EL: jax.Array
    load_EL: jax.Array

    def plan_LP(self) -> jax.Array:
        """The experts of the slots as everywhere else."""
        return self.expert_DkL.reshape(-1, self.expert_DkL.shape[-1]).T


def slots_of(
    slots_LP: Int[Array, "L P"], load_LE: Float[Array, "L E"], num_devices: int
) -> Slots:
    """Brings a plan into this layout; the mean load of a device is 1 in it, or 0."""
    mean_L = load_LE.sum(1) / num_devices
    load_LE = load_LE / jnp.where(mean_L > 0, mean_L, 1.0)[:, None]
    L, P = slots_LP.shape
    count_EL = jnp.maximum(count(slots_LP, load_LE.shape[1]), 1).T
    expert_PL, load_EL = slots_LP.T, load_LE.T
    of_slots = [
        jnp.take_along_axis(of_EL, expert_PL, 0)
        for of_EL in (load_EL / count_EL, count_EL)
    ]
    shape = num_devices, P // num_devices, L
    of_slots = [of_PL.reshape(shape) for of_PL in (expert_PL, *of_slots)]
    return Slots(of_slots[0], of_slots[1], of_slots[2], count_EL, load_EL)


def count(slots_LP: Int[Array, "L P"], num_experts: int) -> Int[Array, "L E"]:
    """Copies of each expert."""
    L = len(slots_LP)
    none_LE = jnp.zeros((L, num_experts), jnp.int32)
    return none_LE.at[jnp.arange(L)[:, None], slots_LP].add(1)


class Node(NamedTuple):
    """In each layer the node of one device, the giver, and that device in it.

    Attributes:
      expert_dkL, share_dkL, copies_dkL, load_dL: of the node.
      expert_aL, share_aL, load_L: of the giver.
      giver_L: its number in the node.
      first_slot_L: of the node.
    """

    expert_dkL: jax.Array
    share_dkL: jax.Array
    copies_dkL: jax.Array
    load_dL: jax.Array
    expert_aL: jax.Array
    share_aL: jax.Array
    load_L: jax.Array
    giver_L: jax.Array
    first_slot_L: jax.Array

    def slot_of(self, index_L: jax.Array) -> jax.Array:
        """The slot with an index among those of the node."""
        return self.first_slot_L + index_L

    def own_slot_of(self, index_L: jax.Array) -> jax.Array:
        """The slot with an index among those of the giver."""
        return self.slot_of(self.giver_L * len(self.expert_aL) + index_L)


def node_of(slots: Slots, device_L: jax.Array, N: int) -> Node:
    """The node of a device of each layer."""
    D, k, L = slots.expert_DkL.shape
    d = D // N
    giver_L, node_L = device_L % d, device_L // d

    def of_node(of_DkL):
        if N == 1:
            return of_DkL
        of_NdkL = of_DkL.reshape(N, d, k, L)
        return jnp.take_along_axis(of_NdkL, node_L[None, None, None], 0)[0]

    expert_dkL, share_dkL, copies_dkL = map(of_node, slots[:3])
    load_dL = sum_slots(share_dkL)
    return Node(
        expert_dkL,
        share_dkL,
        copies_dkL,
        load_dL,
        of_device(expert_dkL, giver_L),
        of_device(share_dkL, giver_L),
        of_device(load_dL, giver_L),
        giver_L,
        node_L * (d * k),
    )


def of_device(of: jax.Array, device_L: jax.Array) -> jax.Array:
    """What belongs to one device of each layer, of an array [devices, ..., L]."""
    index = device_L.reshape((1,) * (of.ndim - 1) + device_L.shape)
    return jnp.take_along_axis(of, index, 0)[0]


def fold(number: int, part: Callable[[int], jax.Array], join: Callable) -> jax.Array:
    """join(... join(part(0), part(1)) ..., part(number - 1))."""
    if number <= _WRITTEN_OUT:
        return functools.reduce(join, map(part, range(number)))
    return lax.fori_loop(1, number, lambda i, so_far: join(so_far, part(i)), part(0))


def lesser(a: jax.Array, b: jax.Array) -> jax.Array:
    """The lesser number. XLA's own minimum looks for NaN, which takes longer."""
    return jnp.where(a < b, a, b)


def positive(of: jax.Array) -> jax.Array:
    """A number, or zero if it is negative."""
    return jnp.where(of > 0, of, 0.0)


def sum_slots(of_DkL: jax.Array) -> Float[Array, "D L"]:
    """What the devices hold together."""
    return fold(of_DkL.shape[1], lambda j: of_DkL[:, j], operator.add)


def held(expert_aL: Int[Array, "a L"], expert_dkL: jax.Array) -> Bool[Array, "a d L"]:
    """Whether a device holds an expert already."""
    return jnp.any(expert_aL[:, None, None] == expert_dkL[None], 2)


def known(expert_aL: jax.Array, expert_dkL: jax.Array) -> Bool[Array, "d k L"]:
    """Whether the expert of a slot is one of the giver's."""
    return fold(
        len(expert_aL),
        lambda a: expert_aL[a][None, None] == expert_dkL,
        operator.or_,
    )


class Pair(NamedTuple):
    """The best of a slot of the giver and a slot of its node, in each layer.

    Attributes:
      cost_L: infinite if there is none.
      own_L, other_L: their indices among those of the giver and those of the node.
    """

    cost_L: jax.Array
    own_L: jax.Array
    other_L: jax.Array


def best_pair(
    node: Node, own_aL: jax.Array, cost: Callable, fixed_dkL: jax.Array
) -> Pair:
    """Finds the cheapest pair whose slot of the giver may go to the other's device.

    Args:
      node: the giver and its node.
      own_aL: what belongs to the giver's slots; `cost` reads it.
      cost: (own, share of the other slot, load of its device) -> cost, elementwise.
      fixed_dkL: what the other slot costs besides; infinite if it is not to be used.
    """
    d, k, _ = node.expert_dkL.shape
    held_adL = held(node.expert_aL, node.expert_dkL)

    def of_own(a):
        cost_dkL = cost(
            own_aL[..., a, :][..., None, None, :], node.share_dkL, node.load_dL[:, None]
        )
        return jnp.where(held_adL[a][:, None], jnp.inf, cost_dkL)

    cost_dkL = fold(len(node.expert_aL), of_own, lesser) + fixed_dkL
    cost_L, other_L = first_slot(cost_dkL)
    device_L, slot_L = other_L // k % d, other_L % k
    share_L = of_device(of_device(node.share_dkL, device_L), slot_L)
    load_L = of_device(node.load_dL, device_L)
    cost_aL = cost(own_aL, share_L[None], load_L[None])
    held_aL = jnp.take_along_axis(held_adL, device_L[None, None], 1)[:, 0]
    _, own_L = first_least(jnp.where(held_aL, jnp.inf, cost_aL))
    return Pair(cost_L, own_L % k, other_L)


def heaviest_device(slots: Slots) -> tuple[jax.Array, jax.Array]:
    """The load of the heaviest device of each layer, and which it is."""
    lightest_L, device_L = first_least(-sum_slots(slots.share_DkL))
    return -lightest_L, device_L


def first_slot(of_dkL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`first_least` of slots, by device and then in the device."""
    d, k, _ = of_dkL.shape
    least_dL = fold(k, lambda j: of_dkL[:, j], lesser)
    least_L, device_L = first_least(least_dL)
    _, slot_L = first_least(of_device(of_dkL, device_L % d))
    return least_L, jnp.where(device_L < NONE, device_L * k + slot_L, NONE)


def exchange(
    slots: Slots, one_L: jax.Array, other_L: jax.Array, found_L: jax.Array
) -> Slots:
    """Exchanges two slots of each layer in which something was found."""
    one_L, other_L = (jnp.where(found_L, at_L, NONE) for at_L in (one_L, other_L))

    def exchanged(of_DkL):
        of_PL = of_DkL.reshape(-1, len(found_L))
        of_one_L, of_other_L = (take_slot(of_PL, at_L) for at_L in (one_L, other_L))
        of_PL = put_slot(put_slot(of_PL, one_L, of_other_L), other_L, of_one_L)
        return of_PL.reshape(of_DkL.shape)

    return slots._replace(
        expert_DkL=exchanged(slots.expert_DkL),
        share_DkL=exchanged(slots.share_DkL),
        copies_DkL=exchanged(slots.copies_DkL),
    )


def take_slot(of_PL: jax.Array, slot_L: jax.Array) -> jax.Array:
    """What is in one place of each layer; anything if there is no such place."""
    return jnp.take_along_axis(of_PL, slot_L[None] % len(of_PL), 0)[0]


def put_slot(of_PL: jax.Array, slot_L: jax.Array, value_L: jax.Array) -> jax.Array:
    """Puts something into one place of each layer, if there is the place."""
    layers_L = jnp.arange(of_PL.shape[1])
    return of_PL.at[slot_L, layers_L].set(value_L, mode="drop", unique_indices=True)


def first_least(of: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest value of each layer, and its first index among the layer's.

    Infinity is no value: its index is `NONE`. Two plain reductions are several times
    faster on CPU than one argmin.
    """
    axes = tuple(range(of.ndim - 1))
    least_L = jnp.min(of, axes)
    here = (of == jnp.expand_dims(least_L, axes)) & (of < jnp.inf)
    return least_L, jnp.min(jnp.where(here, index_of(of.shape), NONE), axes)


def index_of(shape: tuple[int, ...]) -> jax.Array:
    """The index of each place among those of a layer, which is the last dimension."""
    size, index = 1, jnp.zeros(shape, jnp.int32)
    for axis in reversed(range(len(shape) - 1)):
        index += size * lax.broadcasted_iota(jnp.int32, shape, axis)
        size *= shape[axis]
    return index
