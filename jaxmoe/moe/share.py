# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Which copy of its expert a token visits.

An expert may live in several slots. Its copies share its tokens evenly, each within one
of the other, counted over all devices of the exchange. Inside its share a copy takes
the tokens of its own device first; what is left goes, device after device, to the
copies in the order of their slots. Everything follows from the counts, so that every
device knows it, and a recomputation finds the same.

Legend: T tokens of this device, K experts per token, N = T*K assignments, E experts,
P slots, X devices along `expert`; s the slots sorted by expert, then number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from jaxmoe.moe.dispatch import sort_by_slot
from jaxmoe.moe.exchange import AXIS, EXCHANGE, ExpertAxis


def choose_slots(
    ids_TK: Int[Array, "T K"],
    expert_P: Int[Array, " P"],
    *,
    num_experts: int,
    axis: ExpertAxis,
) -> Int[Array, "T K"]:
    """The slot that each assignment goes to.

    Runs per device, inside a shard_map over `expert` (unless `axis.size` is 1).

    Args:
      ids_TK: expert of each assignment; E for none.
      expert_P: expert of each slot; every expert has one. Slots are numbered device
        after device.
      num_experts: E.
      axis: devices along `expert`.

    Returns:
      Slots in [0, P); P for none.
    """
    P = expert_P.shape[0]
    _, place_N, count_E = sort_by_slot(ids_TK, num_experts)
    count_XE = count_E[None]
    if axis.size > 1:
        count_XE = jax.lax.all_gather(count_E, AXIS)
    slot_s = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    here = axis.position() if axis.size > 1 else 0
    mine_s = share_counts(count_XE, expert_P, slot_s, axis.size)[here]
    # The assignments sorted by expert are dealt out to the slots sorted by expert.
    which_N = jnp.searchsorted(jnp.cumsum(mine_s), place_N, side="right")
    slot_N = slot_s[jnp.minimum(which_N, P - 1)]
    slot_TK = jnp.where(ids_TK < num_experts, slot_N.reshape(ids_TK.shape), P)
    return checkpoint_name(slot_TK, EXCHANGE)


def share_counts(
    count_XE: Int[Array, "X E"],
    expert_P: Int[Array, " P"],
    slot_s: Int[Array, " P"],
    num_devices: int,
) -> Int[Array, "X P"]:
    """Assignments that each device sends to each slot, the slots sorted by expert.

    Args:
      count_XE: assignments of each device to each expert.
      expert_P: expert of each slot.
      slot_s: the slots, sorted by expert.
      num_devices: X.
    """
    P, E = expert_P.shape[0], count_XE.shape[1]
    expert_s, device_s = expert_P[slot_s], slot_s // (P // num_devices)
    first_s = jnp.searchsorted(expert_s, expert_s, side="left")
    copies_E = jnp.bincount(expert_P, length=E)
    copies_s, copy_s = copies_E[expert_s], jnp.arange(P) - first_s
    total_s = jnp.sum(count_XE, axis=0)[expert_s]
    share_s = total_s // copies_s + (copy_s < total_s % copies_s)

    # Copies on one device follow each other in the order s: they fill up in turn.
    key_s = expert_s * num_devices + device_s
    before_s = _before(share_s, jnp.searchsorted(key_s, key_s, side="left"))
    own_s = jnp.clip(count_XE[device_s, expert_s] - before_s, 0, share_s)

    left_XE = count_XE - jnp.zeros_like(count_XE).at[device_s, expert_s].add(own_s)
    from_Xs = (jnp.cumsum(left_XE, axis=0) - left_XE)[:, expert_s]
    to_Xs = from_Xs + left_XE[:, expert_s]
    room_s = share_s - own_s
    start_s = _before(room_s, first_s)
    end_s = start_s + room_s
    rest_Xs = jnp.minimum(to_Xs, end_s[None]) - jnp.maximum(from_Xs, start_s[None])
    own_Xs = jnp.where(jnp.arange(num_devices)[:, None] == device_s[None], own_s, 0)
    return own_Xs + jnp.maximum(rest_Xs, 0)


def _before(x_s: jax.Array, first_s: jax.Array) -> jax.Array:
    """The sum of x over the places from `first_s` up to, not with, each place."""
    sum_s = jnp.cumsum(x_s) - x_s
    return sum_s - sum_s[first_s]
