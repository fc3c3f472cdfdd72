# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Rows across the mesh axis `expert`: who sends how many to whom, and back.

Two ways with the same numbers:
  equal   all_to_all of buffers of one size; works everywhere
  ragged  ragged_all_to_all of just the rows there are; TPU and GPU
A way is made once per exchange (`meet`, one all-to-all of integer counts); then `cross`
carries rows along it to the experts, results back, and their derivatives likewise.

Legend: X devices that exchange, p slots of a device, P = X*p, N assignments of a
device; s source and d destination of rows.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxmoe.config import MoE
from jaxmoe.config_base import mistake

AXIS = "expert"
EXCHANGE = "expert_exchange"  # name of what a remat policy must keep

Wire = Literal["compute", "float32", "bfloat16", "float8"]


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """What the MoE layer knows of the devices along `expert`. Static, hashable.

    Attributes:
      size: devices that exchange rows with each other.
      platform: 'cpu', 'gpu' or 'tpu': decides how experts and exchange are computed.
      ragged: rows travel by ragged_all_to_all.
      wire: type in which rows travel.
      weights_apart: the gradients of the experts' weights are computed by themselves,
        so that a pipeline can defer them; together with those of the inputs is faster.
      nodes: a token crosses to each of so many nodes at most once; 1: no difference.
      groups: which positions of the axis exchange with each other; None: all.
    """

    size: int = 1
    platform: str = "cpu"
    ragged: bool = False
    wire: Wire = "compute"
    weights_apart: bool = False
    nodes: int = 1
    groups: tuple[tuple[int, ...], ...] | None = None

    def position(self) -> jax.Array:
        """Where this device stands among those that it exchanges with."""
        index = jax.lax.axis_index(AXIS)
        if self.groups is None:
            return index
        place = {i: n for group in self.groups for n, i in enumerate(group)}
        return jnp.asarray([place[i] for i in range(len(place))])[index]

    def between_nodes(self) -> ExpertAxis:
        """The devices of the same position in every node."""
        q = self.size // self.nodes
        groups = tuple(tuple(range(i, self.size, q)) for i in range(q))
        return dataclasses.replace(self, size=self.nodes, nodes=1, groups=groups)

    def inside_node(self) -> ExpertAxis:
        """The devices of one node: consecutive ones."""
        q = self.size // self.nodes
        groups = tuple(tuple(range(n * q, (n + 1) * q)) for n in range(self.nodes))
        return dataclasses.replace(self, size=q, nodes=1, groups=groups)


def expert_axis(mesh: Mesh, moe: MoE, nodes: int) -> ExpertAxis:
    """The axis `expert` of a mesh of real devices, or of those of a topology.

    Raises:
      ConfigError: if the platform has no ragged exchange and it is asked for.
    """
    kind = mesh.devices.flat[0].platform
    platform = kind if kind in ("cpu", "tpu") else "gpu"
    ragged = moe.exchange == "ragged" or (moe.exchange == "auto" and platform != "cpu")
    if ragged and platform == "cpu":
        raise mistake(
            "MoE.exchange='ragged' on CPU devices",
            "ragged_all_to_all exists on TPU and GPU only",
            "Set MoE.exchange='auto'",
        )
    size = mesh.shape[AXIS]
    return ExpertAxis(size, platform, ragged, moe.exchange_dtype, nodes=nodes)


@flax.struct.dataclass
class Offsets:
    """Arguments of ragged_all_to_all, [X] each, and the rows of its result."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array
    rows: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Way:
    """How rows cross between this device and the others, there and back.

    Attributes:
      send_start_X: place in the send buffer of the first row for each destination.
      sent_X: rows that go to each destination, those past its room left out.
      sizes_Xp: rows that arrive from each source for each slot of this device.
      receive_start_X: place in the receive buffer of the first row of each source.
      there, back: offsets of the two directions; None where buffers are of one size.
      send_rows, receive_rows: sizes of the two buffers.
    """

    send_start_X: jax.Array
    sent_X: jax.Array
    sizes_Xp: jax.Array
    receive_start_X: jax.Array
    there: Offsets | None
    back: Offsets | None
    send_rows: int = flax.struct.field(pytree_node=False)
    receive_rows: int = flax.struct.field(pytree_node=False)


def meet(
    sizes_Xp: Int[Array, "X p"], axis: ExpertAxis, *, most: int, buffer_rows: int
) -> Way:
    """Tells every device how many rows it will get, and finds their places.

    Args:
      sizes_Xp: rows that this device has for each slot of each device.
      axis: devices that exchange.
      most: N, rows that this device has at most, over all destinations.
      buffer_rows: rows that a device can receive; on the equal way, 1/X from each.
    """
    if axis.ragged:
        return _meet_ragged(sizes_Xp, axis, most, buffer_rows)
    X, W = axis.size, -(-buffer_rows // axis.size)
    kept_Xp = _first(sizes_Xp, jnp.full((X,), W))
    start_X = W * jnp.arange(X, dtype=jnp.int32)
    return Way(
        send_start_X=start_X,
        sent_X=jnp.sum(kept_Xp, axis=1),
        sizes_Xp=_tell(kept_Xp, axis),
        receive_start_X=start_X,
        there=None,
        back=None,
        send_rows=X * W,
        receive_rows=X * W,
    )


def _meet_ragged(sizes_Xp: jax.Array, axis: ExpertAxis, most: int, buffer_rows: int):
    X, p = sizes_Xp.shape
    mine_X = jnp.sum(sizes_Xp, axis=1)
    # One exchange of counts: what each slot gets from me, and who else gets how much.
    totals_XX = jnp.broadcast_to(mine_X[None], (X, X))
    told = _tell(jnp.concatenate([sizes_Xp, totals_XX], axis=1), axis)
    sizes_Xp, totals_sd = told[:, :p], told[:, p:]
    sent_sd, start_sd = ragged_places(totals_sd, buffer_rows)
    me = axis.position()
    begin_sd = jnp.cumsum(totals_sd, axis=1) - totals_sd
    sent_X, got_X = sent_sd[me], sent_sd[:, me]
    there = Offsets(begin_sd[me], sent_X, start_sd[me], got_X, buffer_rows)
    # The inverse swaps sender and receiver: what arrived goes to where it was.
    back = Offsets(start_sd[:, me], got_X, begin_sd[:, me], sent_X, most)
    return Way(
        send_start_X=begin_sd[me],
        sent_X=sent_X,
        sizes_Xp=_first(sizes_Xp, got_X),
        receive_start_X=start_sd[:, me],
        there=there,
        back=back,
        send_rows=most,
        receive_rows=buffer_rows,
    )


def ragged_places(
    totals_sd: Int[Array, "X X"], buffer_rows: int
) -> tuple[Int[Array, "X X"], Int[Array, "X X"]]:
    """(rows that go, place of the first in d's buffer) from every s to every d.

    A buffer is filled in the order of the sources; what is past its end does not go.
    """
    start_sd = jnp.minimum(jnp.cumsum(totals_sd, axis=0) - totals_sd, buffer_rows)
    return jnp.minimum(totals_sd, buffer_rows - start_sd), start_sd


def _first(sizes_Xp: jax.Array, limit_X: jax.Array) -> jax.Array:
    """How many of each slot's rows are among the first `limit_X` of each device."""
    last_Xp = jnp.minimum(jnp.cumsum(sizes_Xp, axis=1), limit_X[:, None])
    return jnp.diff(last_Xp, axis=1, prepend=0)


def cross(rows: jax.Array, way: Way, axis: ExpertAxis, to_experts: bool) -> jax.Array:
    """Carries rows along a way: the send buffer to the receive buffer, or back.

    The derivative goes the other way, in the type of the other way.
    """
    # Named outside of the written-out derivative, into which remat does not look.
    return checkpoint_name(_cross(rows, way, axis, to_experts), EXCHANGE)


# Written out because that of ragged_all_to_all would exchange its offsets once more.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross(rows: jax.Array, way: Way, axis: ExpertAxis, to_experts: bool) -> jax.Array:
    offsets = way.there if to_experts else way.back
    wire = axis.wire
    if wire == "float8" and not to_experts:
        wire = "bfloat16"  # results are summed: DeepSeek-V3, arXiv 2412.19437, 3.3.2
    if wire == "compute":
        return _carry(rows, offsets, axis)
    if wire == "float8":
        return _unpack(_carry(_pack(rows), offsets, axis), rows.dtype)
    return _carry(rows.astype(wire), offsets, axis).astype(rows.dtype)


def _cross_forward(rows, way, axis, to_experts):
    return _cross(rows, way, axis, to_experts), way


def _cross_backward(axis, to_experts, way, cotangent):
    return _cross(cotangent, way, axis, not to_experts), None


_cross.defvjp(_cross_forward, _cross_backward)


def _carry(x: jax.Array, offsets: Offsets | None, axis: ExpertAxis) -> jax.Array:
    if offsets is None:
        return _all_to_all(x, axis)
    return jax.lax.ragged_all_to_all(
        x,
        jnp.zeros((offsets.rows, *x.shape[1:]), x.dtype),
        offsets.input_offsets,
        offsets.send_sizes,
        offsets.output_offsets,
        offsets.recv_sizes,
        axis_name=AXIS,
        axis_index_groups=axis.groups,
    )


def _all_to_all(x: jax.Array, axis: ExpertAxis) -> jax.Array:
    """The i-th part of dimension 0 goes to the i-th device, and comes from it."""
    return jax.lax.all_to_all(
        x,
        AXIS,
        split_axis=0,
        concat_axis=0,
        tiled=True,
        axis_index_groups=axis.groups,
    )


def _tell(counts_Xn: jax.Array, axis: ExpertAxis) -> jax.Array:
    return checkpoint_name(_all_to_all(counts_Xn, axis), EXCHANGE)


def _pack(rows: jax.Array) -> jax.Array:
    """Rows as bytes: float8 (e4m3) numbers, behind them the row's float32 scale."""
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(_FLOAT8).max), 1.0)
    bytes_RD = jax.lax.bitcast_convert_type((rows / scale).astype(_FLOAT8), jnp.uint8)
    scale_R4 = jax.lax.bitcast_convert_type(scale[:, 0], jnp.uint8)
    return jnp.concatenate([bytes_RD, scale_R4], axis=1)


def _unpack(packed: jax.Array, dtype: Any) -> jax.Array:
    scale_R = jax.lax.bitcast_convert_type(packed[:, -4:], jnp.float32)
    rows = jax.lax.bitcast_convert_type(packed[:, :-4], _FLOAT8)
    return (rows.astype(jnp.float32) * scale_R[:, None]).astype(dtype)


_FLOAT8 = jnp.float8_e4m3fn
