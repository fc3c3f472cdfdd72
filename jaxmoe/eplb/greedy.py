# SPDX-License-Identifier: Apache-2.0
"""Floor 4. The public placement algorithm (EPLB, deepseek-ai/EPLB@d52c72d), compiled.

Groups of experts go to nodes; in each node spare slots go, one at a time, to the expert
with the largest load per copy; then the copies go to the devices of the node. Things
are packed greedily: by falling load, each to the lightest pack that has room. All ties
go to the lower index, and loads are added in float32.

Every greedy step is taken in all layers and nodes at once. They lie along the last
dimension, where the processor's vectors are.

Legend: L layers, E experts, P slots, N nodes, D devices, G groups, R rows: one for each
layer and node, n items of a row, m packs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_LARGE = 2**30
_LOW_BITS, _INDEX_BITS = 15, 16  # an order is found from the 31 bits of a load


def place(
    load_LE: Float[Array, "L E"],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_devices: int,
    *,
    most_copies: int | None = None,
) -> tuple[Int[Array, "L P"], Int[Array, "L P"]]:
    """Plans every layer.

    Args:
      load_LE: finite and not negative.
      num_replicas: P, a multiple of `num_devices`, at least E.
      num_groups: G; divides E. If it is no multiple of `num_nodes`, groups and nodes
        are ignored, as the public function does.
      num_nodes: N; divides `num_devices`.
      num_devices: D.
      most_copies: of an expert, as long as other experts can take the spare slots; the
        public algorithm has no such limit.

    Returns:
      The expert of each slot, and which of its copies the slot holds, 0 the first.
    """
    L, E = load_LE.shape
    num_groups, num_nodes = nodes_used(num_groups, num_nodes)
    size, rows = E // num_groups, L * num_nodes
    # Node n gets the experts expert_LE[:, n * E/N : (n + 1) * E/N], in this order.
    group_load_GL = load_LE.reshape(L, num_groups, size).sum(-1).T
    order_GL, slot_GL = pack(group_load_GL, num_nodes)
    group_LG = _at_slots(order_GL, slot_GL).T
    expert_LE = (group_LG[:, :, None] * size + jnp.arange(size)[None, None]).reshape(
        L, E
    )
    load_eR = jnp.take_along_axis(load_LE, expert_LE, 1).reshape(rows, -1).T
    spare_sR, copy_sR, count_eR = replicate(
        load_eR, (num_replicas - E) // num_nodes, most_copies
    )
    share_eR = load_eR / count_eR
    first_eR = lax.broadcasted_iota(jnp.int32, load_eR.shape, 0)
    item_nR = jnp.concatenate([first_eR, spare_sR])
    share_nR = jnp.concatenate([share_eR, jnp.take_along_axis(share_eR, spare_sR, 0)])
    copy_nR = jnp.concatenate([jnp.zeros_like(first_eR), copy_sR])
    order_nR, slot_nR = pack(share_nR, num_devices // num_nodes)
    item_nR, copy_nR = (
        _at_slots(jnp.take_along_axis(of_nR, order_nR, 0), slot_nR)
        for of_nR in (item_nR, copy_nR)
    )
    slots_LP = jnp.take_along_axis(expert_LE.reshape(rows, -1), item_nR.T, 1).reshape(
        L, num_replicas
    )
    return slots_LP, copy_nR.T.reshape(L, num_replicas)


def nodes_used(num_groups: int, num_nodes: int) -> tuple[int, int]:
    """Groups and nodes that a plan respects: one each if groups cannot be split."""
    return (num_groups, num_nodes) if num_groups % num_nodes == 0 else (1, 1)


def replicate(
    load_eR: Float[Array, "e R"], num_spares: int, most_copies: int | None = None
) -> tuple[Int[Array, "s R"], Int[Array, "s R"], Int[Array, "e R"]]:
    """Gives spare slots, one at a time, to the expert with the most load per copy.

    Args:
      load_eR: of the experts of each row.
      num_spares: s.
      most_copies: of an expert, unless all have as many.

    Returns:
      The expert of each spare slot; which of its copies that is, from 1 on; copies.
    """
    iota_eR = lax.broadcasted_iota(jnp.int32, load_eR.shape, 0)

    def step(state, _):
        each_eR, count_eR = state
        expert_R = _first(each_eR, jnp.max(each_eR, 0), iota_eR)
        hit_eR = iota_eR == expert_R[None]
        copy_R = jnp.max(jnp.where(hit_eR, count_eR, 0), 0)
        count_eR += hit_eR
        each_eR = jnp.where(hit_eR, load_eR / count_eR, each_eR)
        if most_copies is not None:
            # Below every load, and falling, so that what has to exceed the limit does
            # so evenly.
            over_eR = -count_eR.astype(jnp.float32)
            each_eR = jnp.where(hit_eR & (count_eR >= most_copies), over_eR, each_eR)
        return (each_eR, count_eR), (expert_R, copy_R)

    each_eR = load_eR
    if most_copies == 1:
        each_eR = jnp.full_like(load_eR, -1.0)
    start = (each_eR, jnp.ones_like(iota_eR))
    (_, count_eR), (spare_sR, copy_sR) = lax.scan(step, start, length=num_spares)
    return spare_sR, copy_sR, count_eR


def pack(
    weight_nR: Float[Array, "n R"], num_packs: int
) -> tuple[Int[Array, "n R"], Int[Array, "n R"]]:
    """Packs the items of every row greedily, the same number into each pack.

    Args:
      weight_nR: of the items, not negative.
      num_packs: m, which divides n.

    Returns:
      The items by falling weight, and the slot of each of these, pack after pack. With
      one item to a pack nothing is sorted: item i gets slot i.
    """
    n, rows = weight_nR.shape
    iota_nR = lax.broadcasted_iota(jnp.int32, (n, rows), 0)
    room = n // num_packs
    if room == 1:
        return iota_nR, iota_nR
    order_nR = falling_order(weight_nR)
    if num_packs == 1:
        return order_nR, iota_nR
    first_mR = lax.broadcasted_iota(jnp.int32, (num_packs, rows), 0) * room

    def step(state, weight_R):
        filled_mR, next_mR = state  # a full pack is infinitely heavy
        lightest_R = jnp.min(filled_mR, 0)
        slot_R = _first(filled_mR, lightest_R, next_mR)
        hit_mR = (filled_mR == lightest_R[None]) & (next_mR == slot_R[None])
        next_mR += hit_mR
        filled_mR = jnp.where(hit_mR, filled_mR + weight_R[None], filled_mR)
        full_mR = next_mR == first_mR + room
        return (jnp.where(full_mR, jnp.inf, filled_mR), next_mR), slot_R

    sorted_nR = jnp.take_along_axis(weight_nR, order_nR, 0)
    start = (jnp.zeros((num_packs, rows)), first_mR)
    return order_nR, lax.scan(step, start, sorted_nR)[1]


def falling_order(weight_nR: Float[Array, "n R"]) -> Int[Array, "n R"]:
    """Indices that sort every column by falling weight, ties by rising index.

    Weights are not negative, so their bits have their order. They are sorted in two
    rounds, low bits first, as whole numbers that carry the index: XLA's CPU sort is
    several times slower with two operands, or with floats.
    """
    n = weight_nR.shape[0]
    assert n <= 2**_INDEX_BITS, n
    weight_Rn = jnp.where(weight_nR > 0, weight_nR, 0.0).T  # no negative zero
    bits_Rn = lax.bitcast_convert_type(weight_Rn.astype(jnp.float32), jnp.uint32)
    bits_Rn = 2**31 - 1 - bits_Rn
    iota_Rn = lax.broadcasted_iota(jnp.uint32, bits_Rn.shape, 1)
    order_Rn = iota_Rn
    for digit_Rn in (bits_Rn & (2**_LOW_BITS - 1), bits_Rn >> _LOW_BITS):
        digit_Rn = jnp.take_along_axis(digit_Rn, order_Rn, 1)
        key_Rn = lax.sort((digit_Rn << _INDEX_BITS) | iota_Rn, is_stable=False)
        order_Rn = jnp.take_along_axis(order_Rn, key_Rn & (2**_INDEX_BITS - 1), 1)
    return order_Rn.astype(jnp.int32).T


def _first(of_mR: jax.Array, wanted_R: jax.Array, index_mR: jax.Array) -> jax.Array:
    """The lowest index at which a value stands.

    Two plain reductions are several times faster on CPU than one argmin.
    """
    return jnp.min(jnp.where(of_mR == wanted_R[None], index_mR, _LARGE), 0)


def _at_slots(of_nR: Int[Array, "n R"], slot_nR: Int[Array, "n R"]) -> jax.Array:
    """Brings what belongs to the items to the items' slots."""
    rows = jnp.arange(of_nR.shape[1])[None]
    empty = jnp.zeros_like(of_nR)
    return empty.at[slot_nR, rows].set(of_nR, unique_indices=True)
