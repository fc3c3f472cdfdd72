# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Bringing tokens to their experts and the results back.

`dispatch` turns tokens into rows sorted by the expert slots of this device, `combine`
brings the rows' results back to the tokens. Between them the tokens cross the mesh
axis `expert` with two equal-size all-to-alls (one there, one back) and one of counts:

  tokens --gather--> send buffer --all-to-all--> receive buffer --gather--> rows

Every step is a gather whose inverse is known, so every derivative is a gather too:
nothing is scattered but integers, and no [tokens, experts] array of rows exists.
The rows of a slot start at a multiple of `block`, so that a block has one expert.

Legend: T tokens of this device, D width, K slots per token, N = T*K assignments,
X devices along `expert`, p slots of a device, P = X*p slots, W rows that one device
sends to another at most, R rows of this device.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

EXCHANGE = "expert_exchange"  # name of what a remat policy must keep


@flax.struct.dataclass
class Layout:
    """Which rows belong to which slot of this device.

    Attributes:
      sizes_p: rows of each slot, without the filling up to a block.
      slot_of_block: slot of each block of rows; only `used_blocks` have rows.
      used_blocks: blocks that hold rows.
      block: rows of a block (static).
    """

    sizes_p: jax.Array
    slot_of_block: jax.Array
    used_blocks: jax.Array
    block: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Route:
    """The way of the rows, there and back; only `combine` reads it.

    Attributes:
      send_of_TK: place of each assignment in the send buffer; past the end if none.
      assignment_of_send: assignment at each place of the send buffer; N if none.
      row_of_receive, receive_of_row: the same between receive buffer and rows.
      overflow: assignments of this device that found no room in the send buffer.
    """

    send_of_TK: jax.Array
    assignment_of_send: jax.Array
    row_of_receive: jax.Array | None
    receive_of_row: jax.Array | None
    overflow: jax.Array


@jax.custom_vjp
def take_rows(
    source: Float[Array, "M D"], index: Int[Array, " R"], inverse: Int[Array, "M K"]
) -> Float[Array, "R D"]:
    """source[index], zeros where index is M.

    Args:
      source: rows.
      index: the row to take; M takes none.
      inverse: the up to K places to which each row goes; R where none.
    """
    return jnp.take(source, index, axis=0, mode="fill", fill_value=0)


def _take_rows_forward(source, index, inverse):
    return take_rows(source, index, inverse), inverse


def _take_rows_backward(inverse, cotangent):
    back = jnp.take(cotangent, inverse, axis=0, mode="fill", fill_value=0)
    return jnp.sum(back, axis=1), None, None  # (M, K, D) -> (M, D)


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def rows_capacity(assignments: int, num_slots: int, block: int) -> int:
    """Rows that hold `assignments` whatever their slots, filled up to whole blocks."""
    rows = assignments + num_slots * (block - 1)
    return -(-rows // block) * block


def choose_block(assignments: int, num_slots: int) -> int:
    """Rows of a block: near the even share of a slot, a power of 2 in [8, 128]."""
    share = max(1, assignments // num_slots)
    return max(8, min(128, 1 << (share.bit_length() - 1)))


def dispatch(
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    *,
    num_slots: int,
    axis_size: int,
    send_rows: int,
    block: int,
) -> tuple[Float[Array, "R D"], Layout, Route]:
    """Brings the tokens to the slots' devices, sorted by slot.

    Runs per device, inside a shard_map over `expert` (unless `axis_size` is 1).

    Args:
      x_TD: tokens of this device.
      slots_TK: slot in [0, P) of each assignment; P for none.
      num_slots: P, a multiple of `axis_size`; slot s lives on device s // p.
      axis_size: devices along `expert`.
      send_rows: W, rows for one destination; those past it are dropped and counted.
      block: rows of a block.
    """
    T, K = slots_TK.shape
    flat = slots_TK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype))
    sizes_P = jnp.bincount(flat, length=num_slots).astype(jnp.int32)
    if axis_size == 1:
        layout, starts = _layout(sizes_P, rows_capacity(T * K, num_slots, block), block)
        first = jnp.cumsum(sizes_P) - sizes_P
        slot = jnp.minimum(flat, num_slots - 1)
        R = layout.slot_of_block.size * block
        row = jnp.where(flat < num_slots, starts[slot] + rank - first[slot], R)
        source = _invert(row, R)
        rows = take_rows(
            x_TD, source // K, row.reshape(T, K)
        )  # N -> T: none stays none
        zero = jnp.zeros((), jnp.int32)
        return rows, layout, Route(row.reshape(T, K), source, None, None, zero)

    p, W = num_slots // axis_size, send_rows
    sizes_Xp = sizes_P.reshape(axis_size, p)
    last_Xp = jnp.minimum(jnp.cumsum(sizes_Xp, axis=1), W)  # what fits in the buffer
    sent_Xp = jnp.diff(last_Xp, axis=1, prepend=0)
    before_X = jnp.cumsum(jnp.sum(sizes_Xp, axis=1)) - jnp.sum(sizes_Xp, axis=1)
    device = jnp.minimum(flat // p, axis_size - 1)
    place = rank - before_X[device]
    fits = (flat < num_slots) & (place < W)
    send_of = jnp.where(fits, device * W + place, axis_size * W)
    source = _invert(send_of, axis_size * W)
    sent = take_rows(x_TD, source // K, send_of.reshape(T, K))
    received = _exchange(sent)
    sizes = _exchange(sent_Xp)

    row_of, layout = _place_received(sizes, W, block)
    receive_of = _invert(row_of, layout.slot_of_block.size * block)
    rows = take_rows(received, receive_of, row_of[:, None])
    overflow = jnp.sum((flat < num_slots) & ~fits, dtype=jnp.int32)
    route = Route(send_of.reshape(T, K), source, row_of, receive_of, overflow)
    return rows, layout, route


def combine(
    rows_RD: Float[Array, "R D"], route: Route, weights_TK: Float[Array, "T K"]
) -> Float[Array, "T D"]:
    """The weighted sum of each token's results; void assignments add nothing."""
    if route.row_of_receive is not None and route.receive_of_row is not None:
        back = take_rows(rows_RD, route.row_of_receive, route.receive_of_row[:, None])
        rows_RD = _exchange(back)
    T, K = weights_TK.shape
    taken = take_rows(
        rows_RD, route.send_of_TK.reshape(-1), route.assignment_of_send[:, None]
    )
    # Not an einsum: that would be T tiny products. In float32, as the weights are.
    weighted = taken.reshape(T, K, -1) * weights_TK[:, :, None]
    return jnp.sum(weighted, axis=1).astype(taken.dtype)


def _exchange(x: jax.Array) -> jax.Array:
    """The i-th part of dimension 0 goes to device i of `expert`, and comes from it."""
    out = jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=0, tiled=True)
    return checkpoint_name(out, EXCHANGE)


def _invert(place: jax.Array, size: int) -> jax.Array:
    """inverse[place[i]] = i; `place.size` where no i goes."""
    empty = jnp.full((size,), place.size, jnp.int32)
    index = jnp.arange(place.size, dtype=jnp.int32)
    return empty.at[place].set(index, mode="drop", unique_indices=True)


def _layout(sizes_p: jax.Array, rows: int, block: int) -> tuple[Layout, jax.Array]:
    """Blocks for slots of the given sizes, and the first row of each slot."""
    blocks_p = -(-sizes_p // block)
    ends_p = jnp.cumsum(blocks_p)
    index = jnp.arange(rows // block)
    slot_of_block = jnp.searchsorted(ends_p, index, side="right")
    slot_of_block = jnp.minimum(slot_of_block, sizes_p.size - 1).astype(jnp.int32)
    layout = Layout(sizes_p, slot_of_block, ends_p[-1], block)
    return layout, (ends_p - blocks_p) * block


def _place_received(sizes_Xp: jax.Array, W: int, block: int):
    """Row of each place (source device x, i) of the receive buffer, and the layout."""
    X, p = sizes_Xp.shape
    rows = rows_capacity(X * W, p, block)
    layout, starts_p = _layout(jnp.sum(sizes_Xp, axis=0), rows, block)
    ends_Xp = jnp.cumsum(sizes_Xp, axis=1)
    index_W = jnp.arange(W)
    # Places of a source are sorted by slot: i belongs to the first slot ending past i.
    find = partial(jnp.searchsorted, side="right")
    slot_XW = jax.vmap(find, in_axes=(0, None))(ends_Xp, index_W)
    filled = slot_XW < p
    slot_XW = jnp.minimum(slot_XW, p - 1)
    from_others_Xp = jnp.cumsum(sizes_Xp, axis=0) - sizes_Xp
    offset_Xp = starts_p[None] + from_others_Xp - (ends_Xp - sizes_Xp)
    row_XW = jnp.take_along_axis(offset_Xp, slot_XW, axis=1) + index_W[None]
    row = jnp.where(filled, row_XW, layout.slot_of_block.size * block)
    return row.reshape(-1).astype(jnp.int32), layout
