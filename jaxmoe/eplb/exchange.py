# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Plans improved by exchanging copies of experts between devices.

`spread` takes second copies of an expert off a device. `level` exchanges until the
heaviest device of a layer cannot be made lighter.

One step is taken in all layers at once, and in each the best of all its exchanges.
Layers lie along the last dimension, where the processor's vectors are, and every
reduction is over other dimensions: XLA's CPU backend is several times slower otherwise.

Legend: L layers, E experts, P slots, N nodes, D devices, d devices of a node, k slots
of a device, a slots of the device that gives.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_LARGE = 2**30
_GAIN = 1e-6  # an exchange must win more than this share, or rounding would go on


class Slots(NamedTuple):
    """What lies in the slots: experts, and the share of a copy in their load."""

    expert_DkL: jax.Array
    share_DkL: jax.Array


def slots_of(
    slots_LP: Int[Array, "L P"], load_LE: Float[Array, "L E"], num_devices: int
) -> Slots:
    """Brings a plan into the layout of this module."""
    L, P = slots_LP.shape
    layers_L1 = jnp.arange(L)[:, None]
    count_LE = jnp.zeros(load_LE.shape, jnp.int32).at[layers_L1, slots_LP].add(1)
    share_LE = load_LE / jnp.maximum(count_LE, 1)
    share_LP = jnp.take_along_axis(share_LE, slots_LP, 1)
    shape = num_devices, P // num_devices, L
    return Slots(slots_LP.T.reshape(shape), share_LP.T.reshape(shape))


def spread(slots: Slots, num_nodes: int) -> Slots:
    """Exchanges second copies of an expert on a device for experts of other devices.

    It needs a device of the node that has no copy. With at most d copies of each expert
    in a node there is one, and there is an exchange that makes no other second copy:
    that device has k experts, of which the first has at most k - 2.
    """
    D, k, L = slots.expert_DkL.shape
    index_DkL = _index((D, k, L))

    def todo(state):
        return jnp.any(_seconds(*state) < _LARGE)

    def step(state):
        slots, after_L = state
        slot_L = _seconds(slots, after_L)
        there_L = slot_L < _LARGE
        giver_L = jnp.where(there_L, slot_L // k, 0)
        node = _node_of(slots, giver_L, num_nodes)
        expert_L, share_L = (
            jnp.sum(jnp.where(index_DkL == slot_L[None, None], of_DkL, 0), (0, 1))
            for of_DkL in slots
        )
        load_dL = node.slots.share_DkL.sum(1)
        giver_load_L = _pick(load_dL, node.device_L)
        experts_dkL = node.slots.expert_DkL
        lacks_dL = jnp.all(experts_dkL != expert_L[None, None], 1)
        own_kL = jnp.take_along_axis(experts_dkL, node.device_L[None, None], 0)[0]
        known_dkL = jnp.any(experts_dkL[:, :, None] == own_kL[None, None], 2)
        twice_dkL = (experts_dkL[:, :, None] == experts_dkL[:, None]).sum(2) > 1
        change_dkL = share_L[None, None] - node.slots.share_DkL
        heavier_dkL = jnp.maximum(
            load_dL[:, None] + change_dkL, giver_load_L[None, None] - change_dkL
        )
        allowed_dkL = lacks_dL[:, None] & (~known_dkL | twice_dkL)
        _, best_L = _best(jnp.where(allowed_dkL, heavier_dkL, jnp.inf), (0, 1))
        found_L = there_L & (best_L < _LARGE)
        other_L = best_L + node.first_slot_L
        slots = _exchange(slots, index_DkL, slot_L, other_L, found_L)
        return slots, jnp.where(found_L | ~there_L, after_L, slot_L + 1)

    return lax.while_loop(todo, step, (slots, jnp.zeros(L, jnp.int32)))[0]


def level(slots: Slots, num_nodes: int) -> Slots:
    """Exchanges until no exchange makes the heaviest device of a layer lighter.

    Each step makes that exchange of the heaviest device with one of its node after
    which the heavier of the two is lightest. None puts an expert twice on a device.
    """
    D, k, L = slots.expert_DkL.shape
    index_DkL = _index((D, k, L))

    def todo(state):
        return jnp.any(state[1])

    def step(state):
        slots, going_L = state
        load_DL = slots.share_DkL.sum(1)
        heavy_L = jnp.max(load_DL, 0)
        _, giver_L = _best(-load_DL, (0,))
        node = _node_of(slots, giver_L, num_nodes)
        load_dL = node.slots.share_DkL.sum(1)
        own = [
            jnp.take_along_axis(of_dkL, node.device_L[None, None], 0)[0]
            for of_dkL in node.slots
        ]
        allowed_adkL = _no_seconds(own[0], node.slots.expert_DkL)
        change_adkL = own[1][:, None, None] - node.slots.share_DkL[None]
        heavier_adkL = jnp.maximum(
            load_dL[None, :, None] + change_adkL,
            heavy_L[None, None, None] - change_adkL,
        )
        heavier_L, best_L = _best(
            jnp.where(allowed_adkL, heavier_adkL, jnp.inf), (0, 1, 2)
        )
        found_L = going_L & (heavier_L < heavy_L * (1 - _GAIN))
        per_giver = D // num_nodes * k
        slot_L = giver_L * k + best_L // per_giver
        other_L = best_L % per_giver + node.first_slot_L
        return _exchange(slots, index_DkL, slot_L, other_L, found_L), found_L

    return lax.while_loop(todo, step, (slots, jnp.ones(L, bool)))[0]


class _Node(NamedTuple):
    """The node of a device in each layer: its slots, the device, its first slot."""

    slots: Slots
    device_L: jax.Array
    first_slot_L: jax.Array


def _node_of(slots: Slots, device_L: Int[Array, " L"], num_nodes: int) -> _Node:
    D, k, L = slots.expert_DkL.shape
    d = D // num_nodes
    if num_nodes == 1:
        return _Node(slots, device_L, jnp.zeros_like(device_L))
    node_L = device_L // d
    index_NdkL = node_L[None, None, None]

    def of_node(of_DkL):
        of_NdkL = of_DkL.reshape(num_nodes, d, k, L)
        return jnp.take_along_axis(of_NdkL, index_NdkL, 0)[0]

    return _Node(Slots(*map(of_node, slots)), device_L % d, node_L * (d * k))


def _no_seconds(
    own_aL: Int[Array, "a L"], expert_dkL: Int[Array, "d k L"]
) -> Bool[Array, "a d k L"]:
    """Which exchanges put no expert where it is already; none is inside a device."""
    same_adkL = own_aL[:, None, None] == expert_dkL[None]
    there_adL, here_dkL = jnp.any(same_adkL, 2), jnp.any(same_adkL, 0)
    return ~(there_adL[:, :, None] | here_dkL[None])


def _seconds(slots: Slots, after_L: Int[Array, " L"]) -> Int[Array, " L"]:
    """The first slot, from one on, whose expert the device has in an earlier slot."""
    expert_DkL = slots.expert_DkL
    index_DkL = _index(expert_DkL.shape)
    k = expert_DkL.shape[1]
    earlier_kk = jnp.arange(k)[:, None] > jnp.arange(k)[None]
    same_DkkL = expert_DkL[:, :, None] == expert_DkL[:, None]
    second_DkL = jnp.any(same_DkkL & earlier_kk[None, :, :, None], 2)
    second_DkL &= index_DkL >= after_L[None, None]
    return jnp.min(jnp.where(second_DkL, index_DkL, _LARGE), (0, 1))


def _exchange(slots: Slots, index_DkL, one_L, other_L, found_L) -> Slots:
    """Exchanges what lies in two slots of each layer in which something was found."""
    is_one_DkL = (index_DkL == one_L[None, None]) & found_L[None, None]
    is_other_DkL = (index_DkL == other_L[None, None]) & found_L[None, None]

    def exchanged(of_DkL):
        one_L = jnp.sum(jnp.where(is_one_DkL, of_DkL, 0), (0, 1))
        other_L = jnp.sum(jnp.where(is_other_DkL, of_DkL, 0), (0, 1))
        of_DkL = jnp.where(is_one_DkL, other_L[None, None], of_DkL)
        return jnp.where(is_other_DkL, one_L[None, None], of_DkL)

    return Slots(*map(exchanged, slots))


def _best(of: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The smallest value of each layer and its first flat index.

    Infinity is no value: its index is `_LARGE`.
    """
    least_L = jnp.min(of, axes)
    here = (of == jnp.expand_dims(least_L, axes)) & (of < jnp.inf)
    return least_L, jnp.min(jnp.where(here, _index(of.shape), _LARGE), axes)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Flat index of what a layer has, the layer being the last dimension."""
    size = 1
    index = jnp.zeros(shape, jnp.int32)
    for axis in reversed(range(len(shape) - 1)):
        index += size * lax.broadcasted_iota(jnp.int32, shape, axis)
        size *= shape[axis]
    return index


def _pick(of_dL: jax.Array, device_L: jax.Array) -> jax.Array:
    return jnp.take_along_axis(of_dL, device_L[None], 0)[0]
