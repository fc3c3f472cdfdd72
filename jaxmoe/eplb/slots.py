# SPDX-License-Identifier: Apache-2.0
"""Floor 4. A plan laid out for being improved step by step, in all layers at once.

Layers lie along the last dimension, where the processor's vectors are, and reductions
are over other dimensions: XLA's CPU backend is several times slower otherwise.

Legend: L layers, E experts, P slots, N nodes, D devices, d devices of a node, k slots
of a device, a slots of the device that gives.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NONE = 2**30  # an index that there is not


class Slots(NamedTuple):
    """The expert of each slot, the copies of each expert, and the experts' loads."""

    expert_DkL: jax.Array
    count_EL: jax.Array
    load_EL: jax.Array

    def of_slots(self, of_EL: jax.Array) -> jax.Array:
        """What belongs to the expert of each slot."""
        D, k, L = self.expert_DkL.shape
        of_PL = jnp.take_along_axis(of_EL, self.expert_DkL.reshape(D * k, L), 0)
        return of_PL.reshape(D, k, L)

    def share_DkL(self) -> jax.Array:
        """The load of each slot: all copies of an expert have the same."""
        return self.of_slots(self.load_EL / self.count_EL)

    def plan_LP(self) -> jax.Array:
        """The experts of the slots as everywhere else."""
        return self.expert_DkL.reshape(-1, self.expert_DkL.shape[-1]).T


def slots_of(
    slots_LP: Int[Array, "L P"], load_LE: Float[Array, "L E"], num_devices: int
) -> Slots:
    """Brings a plan into this layout."""
    L, P = slots_LP.shape
    count_EL = jnp.maximum(count(slots_LP, load_LE.shape[1]), 1).T
    expert_DkL = slots_LP.T.reshape(num_devices, P // num_devices, L)
    return Slots(expert_DkL, count_EL, load_LE.T)


def count(slots_LP: Int[Array, "L P"], num_experts: int) -> Int[Array, "L E"]:
    """Copies of each expert."""
    L = len(slots_LP)
    none_LE = jnp.zeros((L, num_experts), jnp.int32)
    return none_LE.at[jnp.arange(L)[:, None], slots_LP].add(1)


class Node(NamedTuple):
    """In each layer the node of one device, the giver, and that device in it.

    Attributes:
      expert_dkL, share_dkL, load_dL: of the node.
      expert_aL, share_aL, load_L: of the giver.
      giver_L: its number in the node.
      first_slot_L: of the node.
    """

    expert_dkL: jax.Array
    share_dkL: jax.Array
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


def node_of(slots: Slots, share_DkL: jax.Array, device_L: jax.Array, N: int) -> Node:
    """The node of a device of each layer."""
    D, k, L = slots.expert_DkL.shape
    d = D // N
    giver_L, node_L = device_L % d, device_L // d

    def of_node(of_DkL):
        if N == 1:
            return of_DkL
        of_NdkL = of_DkL.reshape(N, d, k, L)
        return jnp.take_along_axis(of_NdkL, node_L[None, None, None], 0)[0]

    expert_dkL, share_dkL = of_node(slots.expert_DkL), of_node(share_DkL)
    load_dL = share_dkL.sum(1)
    return Node(
        expert_dkL,
        share_dkL,
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


def held(expert_aL: jax.Array, expert_dkL: jax.Array) -> Bool[Array, "a d L"]:
    """Whether a device holds an expert already."""
    return jnp.any(expert_aL[:, None, None] == expert_dkL[None], 2)


def known(expert_aL: jax.Array, expert_dkL: jax.Array) -> Bool[Array, "d k L"]:
    """Whether the expert of a slot is one of the giver's."""
    return jnp.any(expert_aL[:, None, None] == expert_dkL[None], 0)


def exchange(
    slots: Slots, one_L: jax.Array, other_L: jax.Array, found_L: jax.Array
) -> Slots:
    """Exchanges two slots of each layer in which something was found."""
    slot_DkL = index_of(slots.expert_DkL.shape)
    one_DkL = (slot_DkL == one_L[None, None]) & found_L[None, None]
    other_DkL = (slot_DkL == other_L[None, None]) & found_L[None, None]
    from_one_L, from_other_L = (
        jnp.sum(jnp.where(here_DkL, slots.expert_DkL, 0), (0, 1))
        for here_DkL in (one_DkL, other_DkL)
    )
    expert_DkL = jnp.where(one_DkL, from_other_L[None, None], slots.expert_DkL)
    expert_DkL = jnp.where(other_DkL, from_one_L[None, None], expert_DkL)
    return slots._replace(expert_DkL=expert_DkL)


def first_least(of: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest value of each layer, and its first index among the layer's.

    Infinity is no value: its index is `NONE`. Two plain reductions are several times
    faster on CPU than one argmin.
    """
    axes = tuple(range(of.ndim - 1))
    least_L = jnp.min(of, axes)
    here = (of == jnp.expand_dims(least_L, axes)) & (of < jnp.inf)
    return least_L, jnp.min(jnp.where(here, index_of(of.shape), NONE), axes)


def partner(of: jax.Array, index_L: jax.Array) -> jax.Array:
    """The first axis' index of the least value, where the other axes' index is given."""
    L = of.shape[-1]
    of = of.reshape(len(of), -1, L)
    at_aL = jnp.take_along_axis(of, index_L[None, None] % of.shape[1], 1)[:, 0]
    return first_least(at_aL)[1] % len(of)


def index_of(shape: tuple[int, ...]) -> jax.Array:
    """The index of each place among those of a layer, which is the last dimension."""
    size, index = 1, jnp.zeros(shape, jnp.int32)
    for axis in reversed(range(len(shape) - 1)):
        index += size * lax.broadcasted_iota(jnp.int32, shape, axis)
        size *= shape[axis]
    return index
