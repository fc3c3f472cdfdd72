# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Bringing tokens to their experts and the results back.

`dispatch` turns tokens into rows sorted by the expert slots of this device, `combine`
brings the rows' results back to the tokens. Between them the rows cross the mesh axis
`expert` (`jaxmoe.moe.exchange`), once there and once back:

  tokens --gather--> send buffer --cross--> receive buffer --gather--> rows

Every step is a gather whose inverse is known, so every derivative is a gather too:
nothing is scattered but integers, and no [tokens, experts] array of rows exists.
The rows of a slot start at a multiple of `block`, so that a block has one expert.

`visit` is the round trip. `visit_by_node` does it in two stages: a token crosses to
each node once, and is spread over the devices of the node there.

Legend: T tokens of this device, D width, K slots per token, N = T*K assignments,
X devices along `expert`, p slots of a device, P = X*p slots, R rows of this device,
n nodes, U places of a receive buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.moe.exchange import ExpertAxis, Way, cross, meet


@flax.struct.dataclass
class Layout:
    """Which rows belong to which slot of this device.

    Attributes:
      sizes_p: rows of each slot, without the filling up to a block.
      slot_of_block: slot of each block of rows; only `used_blocks` have rows.
      used_blocks: blocks that hold rows.
      parts: rows of the parts in which a slot's are best computed, of the larger ones
        first; the last is `block` (static).
    """

    sizes_p: jax.Array
    slot_of_block: jax.Array
    used_blocks: jax.Array
    parts: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.parts[-1]


@flax.struct.dataclass
class Route:
    """The way of the rows, there and back; only `combine` reads it.

    Attributes:
      send_of_TK: place of each assignment in the send buffer; past the end if none.
      assignment_of_send: assignment at each place of the send buffer; N if none.
      row_of_receive, receive_of_row: the same between receive buffer and rows.
      way: how rows cross; None where nothing is exchanged.
      overflow: assignments of this device that found no room in a buffer.
    """

    send_of_TK: jax.Array
    assignment_of_send: jax.Array
    row_of_receive: jax.Array | None
    receive_of_row: jax.Array | None
    way: Way | None
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
    return _take(source, index)


def _take_rows_forward(source, index, inverse):
    return take_rows(source, index, inverse), inverse


def _take_rows_backward(inverse, cotangent):
    return _sum_of_rows(cotangent, inverse), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


@jax.custom_vjp
def weigh_rows(
    rows: Float[Array, "R D"],
    weights: Float[Array, "M K"],
    index: Int[Array, "M K"],
    inverse: Int[Array, " R"],
) -> Float[Array, "M D"]:
    """The sum over K of weights * rows[index], in float32; index R takes none.

    Args:
      rows: R rows.
      weights: their factors.
      index: K rows for each result.
      inverse: the place in `index`, flat, that takes each row; M * K where none.
    """
    return _sum_of_rows(rows, index, weights)


def _weigh_rows_forward(rows, weights, index, inverse):
    return weigh_rows(rows, weights, index, inverse), (rows, weights, index, inverse)


def _weigh_rows_backward(residuals, cotangent):
    rows, weights, index, inverse = residuals
    K = weights.shape[1]
    weight_R = _take(weights.reshape(-1), inverse)
    drows = _take(cotangent, inverse // K) * weight_R[:, None]  # M*K -> M: still none
    # Some columns at a time, as below: [M, K, D] would be written out.
    of_columns = [
        jnp.sum(
            cotangent[:, None] * _take(rows, index[:, k : k + n]),
            axis=2,
            dtype=jnp.float32,
        )
        for k, n in _columns(K)
    ]
    dweights = jnp.concatenate(of_columns, axis=1).astype(weights.dtype)
    return drows.astype(rows.dtype), dweights, None, None


weigh_rows.defvjp(_weigh_rows_forward, _weigh_rows_backward)


def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    """source[index]; zeros where the index is past the end."""
    return jnp.take(source, index, axis=0, mode="fill", fill_value=0)


def _sum_of_rows(
    rows: jax.Array, index_MK: jax.Array, weights_MK: jax.Array | None = None
) -> jax.Array:
    """The sum over K of rows[index], each times its weight, added up in float32."""
    total = 0.0
    # One by one, so that gathers, products and sums are one loop on CPU: with K as an
    # axis that is summed, [M, K, D] is written out.
    for k, n in _columns(index_MK.shape[1]):
        taken = _take(rows, index_MK[:, k : k + n]).astype(jnp.float32)
        if weights_MK is not None:
            taken *= weights_MK[:, k : k + n, None]
        total += jnp.sum(taken, axis=1)
    return jnp.asarray(total).astype(rows.dtype)


def _columns(K: int) -> list[tuple[int, int]]:
    """(first, number) of the columns that are taken together: one by one, but for the
    80 prototypes of M6-10T, which would be a program of minutes to compile."""
    n = -(-K // 16)
    return [(k, min(n, K - k)) for k in range(0, K, n)]


def rows_capacity(assignments: int, num_slots: int, block: int) -> int:
    """Rows that hold `assignments` whatever their slots, filled up to whole blocks."""
    rows = assignments + num_slots * (block - 1)
    return -(-rows // block) * block


def choose_block(assignments: int, num_slots: int) -> int:
    """Rows of a block, from the even share of a slot: 8, 16 or 32.

    Products of fewer rows are slow, and more waste rows at the end of a slot.
    """
    share = assignments // num_slots
    return 8 if share < 16 else 16 if share < 128 else 32


def choose_parts(even_share: int, block: int) -> tuple[int, ...]:
    """Rows of the parts in which a slot's are best computed.

    Large products are faster per row; blocks waste fewer rows at the end of a slot.
    """
    large = 1 << (max(1, min(even_share, 256)).bit_length() - 1)
    if large <= block:
        return (block,)
    return (large, 2 * block, block) if large >= 4 * block else (large, block)


def dispatch(
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    *,
    num_slots: int,
    axis: ExpertAxis,
    buffer_rows: int,
    block: int,
) -> tuple[Float[Array, "R D"], Layout, Route]:
    """Brings the tokens to the slots' devices, sorted by slot.

    Runs per device, inside a shard_map over `expert` (unless `axis.size` is 1).

    Args:
      x_TD: tokens of this device.
      slots_TK: slot in [0, P) of each assignment; P for none.
      num_slots: P, a multiple of `axis.size`; slot s lives on device s // p.
      axis: devices along `expert`.
      buffer_rows: rows that a device can receive; those past it are dropped, counted.
      block: rows of a block.
    """
    T, K = slots_TK.shape
    parts = choose_parts(T * K * axis.size // num_slots, block)
    if axis.size > 1:
        received, sizes_Xp, route = _send(x_TD, slots_TK, num_slots, axis, buffer_rows)
        assert route.way is not None
        row_of, layout = _place_received(
            sizes_Xp, route.way.receive_start_X, received.shape[0], parts
        )
        receive_of = _invert(row_of, layout.slot_of_block.size * block)
        rows = take_rows(received, receive_of, row_of[:, None])
        places = {"row_of_receive": row_of, "receive_of_row": receive_of}
        return rows, layout, dataclasses.replace(route, **places)

    flat, rank, sizes_P = sort_by_slot(slots_TK, num_slots)
    layout, starts = _layout(sizes_P, T * K, parts)
    first = jnp.cumsum(sizes_P) - sizes_P
    slot = jnp.minimum(flat, num_slots - 1)
    R = layout.slot_of_block.size * block
    row = jnp.where(flat < num_slots, starts[slot] + rank - first[slot], R)
    source = _invert(row, R)
    # N -> T: none stays none
    rows = take_rows(x_TD, source // K, row.reshape(T, K))
    zero = jnp.zeros((), jnp.int32)
    return rows, layout, Route(row.reshape(T, K), source, None, None, None, zero)


def combine(
    rows_RD: Float[Array, "R D"],
    route: Route,
    weights_TK: Float[Array, "T K"],
    axis: ExpertAxis,
) -> Float[Array, "T D"]:
    """The weighted sum of each token's results; void assignments add nothing."""
    if route.row_of_receive is not None and route.receive_of_row is not None:
        rows_RD = take_rows(
            rows_RD, route.row_of_receive, route.receive_of_row[:, None]
        )
    if route.way is not None:
        rows_RD = cross(rows_RD, route.way, axis, False)
    return weigh_rows(rows_RD, weights_TK, route.send_of_TK, route.assignment_of_send)


Apply = Callable[[jax.Array, Layout], jax.Array]


def visit(
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    apply: Apply,
    *,
    num_slots: int,
    axis: ExpertAxis,
    buffer_rows: int,
    block: int,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """Dispatch, `apply` to the rows, combine.

    Args:
      apply: maps rows [R, D] and their layout to results [R, D].
      x_TD, slots_TK, num_slots, axis, buffer_rows, block: as in `dispatch`.
      weights_TK: factors of the results.

    Returns:
      The tokens' weighted sums, and the assignments that found no room in a buffer.
    """
    rows_RD, layout, route = dispatch(
        x_TD,
        slots_TK,
        num_slots=num_slots,
        axis=axis,
        buffer_rows=buffer_rows,
        block=block,
    )
    y_TD = combine(apply(rows_RD, layout), route, weights_TK, axis)
    return y_TD, route.overflow


def visit_by_node(
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    apply: Apply,
    *,
    num_slots: int,
    axis: ExpertAxis,
    buffer_rows: int,
    block: int,
    node_visits: int,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """`visit`, but a token crosses to each of `axis.nodes` nodes at most once.

    A token goes to the device of its own position in every node that has one of its
    slots, with its slots and weights. There it is dispatched inside the node; the
    weighted sum of the node's results comes back.

    Args:
      node_visits: nodes that a token visits at most.
      x_TD, slots_TK, weights_TK, apply, num_slots, axis, buffer_rows, block: as in
        `visit`. A device also takes buffer_rows / K * `node_visits` tokens for its
        node.

    Reference: node-limited routing of DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    T, K = slots_TK.shape
    n, of_node = axis.nodes, num_slots // axis.nodes
    between, inside = axis.between_nodes(), axis.inside_node()
    node_TK = slots_TK // of_node  # n for none
    visited_Tn = jnp.any(node_TK[:, :, None] == jnp.arange(n)[None, None], axis=1)
    node_Tn = jnp.where(visited_Tn, jnp.arange(n)[None], n)
    room = min(n * T, math.ceil(buffer_rows / K) * node_visits)
    received, _, route = _send(x_TD, node_Tn, n, between, room)

    # Slots and weights travel as float32, which holds slots exactly; 0 is an empty row.
    labels = jnp.concatenate([slots_TK + 1.0, weights_TK], axis=1, dtype=jnp.float32)
    exact = dataclasses.replace(between, wire="compute")
    labels, _, _ = _send(labels, node_Tn, n, exact, room, route)
    slots_UK = labels[:, :K].astype(jnp.int32) - 1 - between.position() * of_node
    here_UK = (slots_UK >= 0) & (slots_UK < of_node)
    slots_UK = jnp.where(here_UK, slots_UK, of_node)
    partial_UD, inner_overflow = visit(
        received,
        slots_UK,
        labels[:, K:],
        apply,
        num_slots=of_node,
        axis=inside,
        buffer_rows=min(buffer_rows, inside.size * slots_UK.size),
        block=block,
    )
    y_TD = combine(partial_UD, route, visited_Tn.astype(jnp.float32), between)
    # Assignments, not tokens, that found no room between the nodes.
    lost_Tn = visited_Tn & (route.send_of_TK >= route.assignment_of_send.size)
    of_TKn = node_TK[:, :, None] == jnp.arange(n)[None, None]
    overflow = jnp.sum(of_TKn & lost_Tn[:, None], dtype=jnp.int32) + inner_overflow
    return y_TD, overflow


def _send(
    x_TD: jax.Array,
    slots_TK: jax.Array,
    num_slots: int,
    axis: ExpertAxis,
    buffer_rows: int,
    route: Route | None = None,
) -> tuple[jax.Array, jax.Array, Route]:
    """(receive buffer, its rows by source and slot, route) of one exchange.

    With a `route`, the tokens take the places that others took before them.
    """
    T, K = slots_TK.shape
    if route is None:
        flat, rank, sizes_P = sort_by_slot(slots_TK, num_slots)
        sizes_Xp = sizes_P.reshape(axis.size, -1)
        way = meet(sizes_Xp, axis, most=T * K, buffer_rows=buffer_rows)
        total_X = jnp.sum(sizes_Xp, axis=1)
        device = jnp.minimum(flat // sizes_Xp.shape[1], axis.size - 1)
        place = rank - (jnp.cumsum(total_X) - total_X)[device]
        fits = (flat < num_slots) & (place < way.sent_X[device])
        send_of = jnp.where(fits, way.send_start_X[device] + place, way.send_rows)
        source = _invert(send_of, way.send_rows)
        overflow = jnp.sum((flat < num_slots) & ~fits, dtype=jnp.int32)
        route = Route(send_of.reshape(T, K), source, None, None, way, overflow)
    assert route.way is not None
    # N -> T: none stays none
    sent = take_rows(x_TD, route.assignment_of_send // K, route.send_of_TK)
    return cross(sent, route.way, axis, True), route.way.sizes_Xp, route


def sort_by_slot(slots_TK: jax.Array, num_slots: int):
    """Slot and place in the order of slots of each assignment, flat; rows per slot.

    Void assignments, of slot `num_slots`, come last and count nowhere.
    """
    flat = slots_TK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype))
    return flat, rank, jnp.bincount(flat, length=num_slots).astype(jnp.int32)


def _invert(place: jax.Array, size: int) -> jax.Array:
    """inverse[place[i]] = i; `place.size` where no i goes."""
    empty = jnp.full((size,), place.size, jnp.int32)
    index = jnp.arange(place.size, dtype=jnp.int32)
    return empty.at[place].set(index, mode="drop", unique_indices=True)


def _layout(
    sizes_p: jax.Array, most: int, parts: tuple[int, ...]
) -> tuple[Layout, jax.Array]:
    """Blocks for slots with `most` rows in all, and the first row of each slot."""
    block = parts[-1]
    rows = rows_capacity(most, sizes_p.size, block)
    parts = tuple(size for size in parts if size <= max(rows, block))
    blocks_p = -(-sizes_p // block)
    ends_p = jnp.cumsum(blocks_p)
    index = jnp.arange(rows // block)
    slot_of_block = jnp.searchsorted(ends_p, index, side="right")
    slot_of_block = jnp.minimum(slot_of_block, sizes_p.size - 1).astype(jnp.int32)
    layout = Layout(sizes_p, slot_of_block, ends_p[-1], parts)
    return layout, (ends_p - blocks_p) * block


def _place_received(
    sizes_Xp: jax.Array, start_X: jax.Array, places: int, parts: tuple[int, ...]
) -> tuple[jax.Array, Layout]:
    """Row of each place of the receive buffer (past the end if none), and the layout.

    Args:
      sizes_Xp: rows by source and slot.
      start_X: place of each source's first row; a source's rows are sorted by slot.
      places: U.
      parts: as in the layout.
    """
    layout, first_row_p = _layout(jnp.sum(sizes_Xp, axis=0), places, parts)
    begin_Xp = start_X[:, None] + jnp.cumsum(sizes_Xp, axis=1) - sizes_Xp
    from_others_Xp = jnp.cumsum(sizes_Xp, axis=0) - sizes_Xp
    offset_Xp = first_row_p[None] + from_others_Xp - begin_Xp
    # The runs (source, slot) follow each other: a place is in the first that ends
    # past it, if it is not in the gap before that.
    place_U = jnp.arange(places)
    end_Xp = begin_Xp + sizes_Xp
    run_U = jnp.searchsorted(end_Xp.reshape(-1), place_U, side="right")
    found_U = run_U < sizes_Xp.size
    run_U = jnp.minimum(run_U, sizes_Xp.size - 1)
    found_U &= place_U >= begin_Xp.reshape(-1)[run_U]
    row_U = place_U + offset_Xp.reshape(-1)[run_U]
    row_U = jnp.where(found_U, row_U, layout.slot_of_block.size * layout.block)
    return row_U.astype(jnp.int32), layout
