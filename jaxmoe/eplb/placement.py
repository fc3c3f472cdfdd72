# SPDX-License-Identifier: Apache-2.0
"""Floor 4. Weights and gradients between the experts' owners and their slots.

Every expert has one owner: a device along `expert` that holds its master weights and
optimizer state, in one of E/X rows. Tokens are computed in slots, P/X on each device,
each of which has a copy of one expert. Before a step the slots are filled from the
rows, and after it the gradients of the slots are added in the rows; the optimizer sees
rows only. A new plan changes two integer arrays per layer, `slots` and `rows`, and
where an expert leaves its owner's device, the row moves.

All three are the same move: places on devices that want an expert, places that have
it. What stays on a device is copied there. The rest travels in rounds: in round
(s, n) every device sends one row or none to the device s further on. There are as many
rounds of each s as the device with most to send needs, so the number follows the plan,
while the program stays the same.

Legend: L layers, E experts, P slots, X devices along `expert`, A places that have
(A = E, a of each device), B places that want (b of each device).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.eplb.plan import initial_plan
from jaxmoe.moe.exchange import AXIS

Tree = Any


@flax.struct.dataclass
class Move:
    """Who sends what to whom; the same on every device.

    Attributes:
      from_LB: the place that has the expert which place B wants.
      shift_LB: how many devices further on it is wanted; 0: on the same.
      rounds_X: rounds of each shift; of shift 0 none.
      has, wants: a and b, places of a device (static).
    """

    from_LB: jax.Array
    shift_LB: jax.Array
    rounds_X: jax.Array
    has: int = flax.struct.field(pytree_node=False)
    wants: int = flax.struct.field(pytree_node=False)


def initial_placement(
    num_layers: int, num_experts: int, num_replicas: int, *, nodes: int, devices: int
) -> dict[str, jax.Array]:
    """The placement to start with: row e is that of expert e.

    Returns:
      `slots` [L, P], expert of each slot; `rows` [L, E], expert of each row of the
      masters; `load` [L, E], float32, the average load per expert, 0 so far.
    """
    plan = initial_plan(num_layers, num_experts, num_replicas, devices, nodes)
    rows = jnp.arange(num_experts, dtype=jnp.int32)
    return {
        "slots": plan.physical_to_logical,
        "rows": jnp.tile(rows, (num_layers, 1)),
        "load": jnp.zeros((num_layers, num_experts), jnp.float32),
    }


def plan_move(
    have_LA: Int[Array, "L A"], want_LB: Int[Array, "L B"], num_devices: int
) -> Move:
    """The move from places that have each expert once to places that want experts."""
    X, (L, A), B = num_devices, have_LA.shape, want_LB.shape[1]
    layer_L1 = jnp.arange(L)[:, None]
    place = jnp.broadcast_to(jnp.arange(A, dtype=jnp.int32), (L, A))
    place_LE = jnp.zeros((L, A), jnp.int32).at[layer_L1, have_LA].set(place)
    from_LB = jnp.take_along_axis(place_LE, want_LB, axis=1)
    sender_LB, receiver_B = from_LB // (A // X), jnp.arange(B) // (B // X)
    shift_LB = (receiver_B[None] - sender_LB) % X
    count_XX = jnp.zeros((X, X), jnp.int32).at[sender_LB, shift_LB].add(1)
    rounds_X = jnp.max(count_XX, axis=0).at[0].set(0)
    return Move(from_LB, shift_LB, rounds_X, A // X, B // X)


def carry(move: Move, rows: Tree) -> Tree:
    """The rows where they are wanted.

    Runs per device, inside a shard_map over `expert`.

    Args:
      move: from `plan_move`.
      rows: tree of this device's [L, a, ...].

    Returns:
      Tree of this device's [L, b, ...].
    """
    lists = _Lists(move)
    layer_L1 = jnp.arange(len(move.from_LB))[:, None]
    local_Lb = lists.mine(move.from_LB) % move.has
    start = jax.tree.map(lambda x: x[layer_L1, local_Lb], rows)

    def one(shift: int, n: jax.Array, carried: Tree) -> Tree:
        sent = lists.leaving(shift, n)
        sent = jax.tree.map(lambda x: _at(x, sent.layer, sent.row), rows)
        came = _permute(sent, shift, len(move.rounds_X))
        wanted = lists.coming(shift, n)
        put = partial(_put_if, wanted.there, wanted.layer, wanted.place)
        return jax.tree.map(put, carried, came)

    return _rounds(move, one, start)


def carry_back(move: Move, slots: Tree) -> Tree:
    """The sums, where the rows are, of what stands where they are wanted.

    The transpose of `carry`: tree of [L, b, ...] -> tree of [L, a, ...].
    """
    lists, X = _Lists(move), len(move.rounds_X)
    L = len(move.from_LB)
    row_Lb = lists.mine(move.from_LB) % move.has
    here_Lb = lists.mine(move.shift_LB) == 0

    def local(n, total):
        layer, place = n // move.wants, n % move.wants
        add = partial(_add_if, here_Lb[layer, place], layer, row_Lb[layer, place])
        values = jax.tree.map(lambda x: _at(x, layer, place), slots)
        return jax.tree.map(add, total, values)

    zeros = jax.tree.map(
        lambda x: jnp.zeros((L, move.has, *x.shape[2:]), x.dtype), slots
    )
    start = jax.lax.fori_loop(0, L * move.wants, local, zeros)

    def one(shift: int, n: jax.Array, total: Tree) -> Tree:
        sent = lists.coming(shift, n)
        sent = jax.tree.map(lambda x: _at(x, sent.layer, sent.place), slots)
        came = _permute(sent, -shift, X)
        owned = lists.leaving(shift, n)
        add = partial(_add_if, owned.there, owned.layer, owned.row)
        return jax.tree.map(add, total, came)

    return _rounds(move, one, start)


def _rounds(move: Move, one: Any, start: Tree) -> Tree:
    for shift in range(1, len(move.rounds_X)):
        step = partial(one, shift)
        start = jax.lax.fori_loop(0, move.rounds_X[shift], step, start)
    return start


def own(
    rows_LE: Int[Array, "L E"], slots_LP: Int[Array, "L P"], num_devices: int
) -> Int[Array, "L E"]:
    """Owners for a new plan: the expert of each row.

    An expert keeps its row if its device still has a copy of it. Else it gets a free
    row of a device that has one, or if none of those has a free row, of another; then
    its copies are all filled over the network.

    Args:
      rows_LE: the rows in force.
      slots_LP: expert of each slot in the new plan.
      num_devices: X.
    """
    (L, E), X = rows_LE.shape, num_devices
    layer_L1 = jnp.arange(L)[:, None]
    device_P = jnp.arange(slots_LP.shape[1]) // (slots_LP.shape[1] // X)
    copy_LEX = jnp.zeros((L, E, X), bool)
    copy_LEX = copy_LEX.at[layer_L1, slots_LP, device_P[None]].set(True)
    device_of_row = jnp.arange(E) // (E // X)
    stays_LE = copy_LEX[layer_L1, rows_LE, device_of_row[None]]  # of each row
    free_LX = jnp.sum(~stays_LE.reshape(L, X, -1), axis=2)
    number_LE = jnp.broadcast_to(jnp.arange(E, dtype=jnp.int32), (L, E))
    row_of = jnp.zeros((L, E), jnp.int32).at[layer_L1, rows_LE].set(number_LE)
    leaves_LE = ~jnp.take_along_axis(stays_LE, row_of, axis=1)  # of each expert

    # Those that have a copy where a row is free choose first, then all others.
    def choose(n, found):
        free_LX, to_LE = found
        e = n % E
        wanted_LX = (free_LX > 0) & (copy_LEX[:, e] | (n >= E))
        goes_L = leaves_LE[:, e] & (to_LE[:, e] < 0) & jnp.any(wanted_LX, axis=1)
        device_L = jnp.argmax(jnp.where(wanted_LX, free_LX, 0), axis=1)
        took_LX = goes_L[:, None] & (jnp.arange(X)[None] == device_L[:, None])
        to_LE = to_LE.at[:, e].set(jnp.where(goes_L, device_L, to_LE[:, e]))
        return free_LX - took_LX, to_LE

    nowhere = jnp.full((L, E), -1, jnp.int32)
    _, to_LE = jax.lax.fori_loop(0, 2 * E, choose, (free_LX, nowhere))
    # Experts that come to a device fill its free rows in rising order.
    coming = jnp.argsort(jnp.where(to_LE < 0, X, to_LE), axis=1, stable=True)
    place_LE = jnp.cumsum(~stays_LE, axis=1) - 1  # among the free rows, of each row
    newcomer_LE = jnp.take_along_axis(coming, jnp.maximum(place_LE, 0), axis=1)
    return jnp.where(stays_LE, rows_LE, newcomer_LE).astype(jnp.int32)


# Lists of what a device sends and gets ------------------------------------------------


@flax.struct.dataclass
class _Item:
    """One row that travels: its layer, where it is and where it is wanted.

    Attributes:
      there: whether there is an n-th one at all.
    """

    layer: jax.Array
    row: jax.Array
    place: jax.Array
    there: jax.Array


class _Lists:
    """What this device sends and gets, by shift; senders and receivers agree on the
    order: by layer, then by place."""

    def __init__(self, move: Move):
        self._move = move
        self._me = jax.lax.axis_index(AXIS)
        X = len(move.rounds_X)
        sender_LB = move.from_LB // move.has
        out_LB = jnp.where(sender_LB == self._me, move.shift_LB, X)
        self._out, self._out_start = _by_key(out_LB, X)
        self._in, self._in_start = _by_key(self.mine(move.shift_LB), X)

    def mine(self, of_LB: jax.Array) -> jax.Array:
        """The part of this device's places."""
        b = self._move.wants
        return jax.lax.dynamic_slice_in_dim(of_LB, self._me * b, b, axis=1)

    def leaving(self, shift: int, n: jax.Array) -> _Item:
        """The n-th row that this device sends so far."""
        item, there = _nth(self._out, self._out_start, shift, n)
        layer, place = jnp.divmod(item, self._move.from_LB.shape[1])
        row = self._move.from_LB[layer, place] % self._move.has
        return _Item(layer, row, place % self._move.wants, there)

    def coming(self, shift: int, n: jax.Array) -> _Item:
        """The n-th row that comes to this device from so far."""
        item, there = _nth(self._in, self._in_start, shift, n)
        layer, place = jnp.divmod(item, self._move.wants)
        return _Item(layer, jnp.zeros((), jnp.int32), place, there)


def _by_key(key_LB: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The flat places sorted by key, and where each key begins, [keys + 1]."""
    flat = key_LB.reshape(-1)
    count = jnp.bincount(flat, length=keys)
    start = jnp.concatenate([jnp.zeros(1, count.dtype), jnp.cumsum(count)])
    return jnp.argsort(flat, stable=True), start


def _nth(order: jax.Array, start: jax.Array, key: int, n: jax.Array):
    index = jnp.minimum(start[key] + n, order.size - 1)
    return order[index], start[key] + n < start[key + 1]


def _permute(rows: Tree, shift: int, num_devices: int) -> Tree:
    ways = [(d, (d + shift) % num_devices) for d in range(num_devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, ways), rows)


def _at(x: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
    """x[layer, place]."""
    zeros = (0,) * (x.ndim - 2)
    row = jax.lax.dynamic_slice(x, (layer, place, *zeros), (1, 1, *x.shape[2:]))
    return row.reshape(x.shape[2:])


def _put_if(condition, layer, place, x: jax.Array, value: jax.Array) -> jax.Array:
    value = jnp.where(condition, value, _at(x, layer, place))
    return _put(x, layer, place, value)


def _add_if(condition, layer, place, x: jax.Array, value: jax.Array) -> jax.Array:
    value = jnp.where(condition, value, jnp.zeros_like(value))
    return _put(x, layer, place, _at(x, layer, place) + value)


def _put(x: jax.Array, layer, place, value: jax.Array) -> jax.Array:
    start = (layer, place, *(0,) * (x.ndim - 2))
    return jax.lax.dynamic_update_slice(x, value[None, None], start)
