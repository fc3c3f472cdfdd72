# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The feed-forward part of the experts that live on this device.

One contract, two implementations with the same numbers:
  ragged  products by `lax.ragged_dot`, for TPU and GPU;
  blocks  a loop over the slots in use, and in it one over blocks of the slot's rows,
          for CPU, where XLA computes ragged_dot expert by expert over all rows.
          Its derivative is written out. It keeps nothing but the rows: to compute again
          what stands before the activation is as fast as to write and read it.

Legend: R rows of this device, sorted by slot, b rows of a block or of several; p slots,
D width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.config import Model
from jaxmoe.layers.linear import no_param, normal_param, zeros_param
from jaxmoe.moe.dispatch import Layout
from jaxmoe.moe.exchange import ExpertAxis

Parts = tuple[int, ...]  # rows of the parts of a slot, as in the layout
Weights = dict[str, jax.Array]  # up, gate, down, up_bias, down_bias: those there are


class Experts(nnx.Module):
    """Stacked feed-forward experts, [E, ...]; applied to the slots of one device."""

    def __init__(self, model: Model, num_experts: int, hidden: int, *, rngs: nnx.Rngs):
        E, D, F, std = num_experts, model.width, hidden, model.init_std
        up_axes, down_axes = (
            ("expert", "width", "hidden"),
            ("expert", "hidden", "width"),
        )
        gate = normal_param if model.activation == "swiglu" else no_param
        bias = zeros_param if model.use_bias else no_param
        self.gate = gate(rngs, (E, D, F), up_axes, std)
        self.up = normal_param(rngs, (E, D, F), up_axes, std)
        self.down = normal_param(rngs, (E, F, D), down_axes, std)
        self.up_bias = bias((E, F), ("expert", "hidden"))
        self.down_bias = bias((E, D), ("expert", "width"))

    def __call__(
        self, x_RD: Float[Array, "R D"], layout: Layout, *, axis: ExpertAxis
    ) -> Float[Array, "R D"]:
        """Applies each slot's expert to its rows; rows of no slot are undefined."""
        names = ("up", "gate", "down", "up_bias", "down_bias")
        found = {name: getattr(self, name) for name in names}
        weights = {name: w[...] for name, w in found.items() if w is not None}
        if axis.platform == "cpu":
            apart = axis.weights_apart
            return _blocks(x_RD, weights, layout.sizes_p, layout.parts, apart)
        return _ragged(x_RD, weights, layout)


def _ragged(x_RD: jax.Array, weights: Weights, layout: Layout) -> jax.Array:
    rows_p = -(-layout.sizes_p // layout.block) * layout.block
    slot_R = jnp.repeat(layout.slot_of_block, layout.block)
    used_R1 = (jnp.arange(slot_R.size) < layout.used_blocks * layout.block)[:, None]

    def product(x, kernel, bias):
        y = jax.lax.ragged_dot(x, weights[kernel], rows_p)
        if bias not in weights:
            return y
        # ragged_dot leaves rows of no slot undefined, in its derivative too. They are
        # cut off here, so that what stands in them reaches no gradient of a bias.
        return jnp.where(used_R1, y + _pick(weights[bias], slot_R), 0)

    pre = {"up": product(x_RD, "up", "up_bias")}
    if "gate" in weights:
        pre["gate"] = product(x_RD, "gate", "")
    return product(_activate(pre), "down", "down_bias")


def _pick(bias_pF: jax.Array, slot_R: jax.Array) -> jax.Array:
    """bias_pF[slot_R], as a product: a TPU adds it and the activation in one pass.

    Rows gathered there, or repeated, are written out first, which took longer than the
    product with the weights. The batch dimension keeps it apart from products that
    Model.remat='dots' saves.
    """
    rows_1Rp = jax.nn.one_hot(slot_R, bias_pF.shape[0], dtype=bias_pF.dtype)[None]
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("xRp,xpF->xRF", rows_1Rp, bias_pF[None], precision=exact)[0]


def _activate(pre: dict[str, jax.Array]) -> jax.Array:
    """GELU, or SwiGLU where there is a gate."""
    if "gate" in pre:
        return jax.nn.silu(pre["gate"]) * pre["up"]
    return jax.nn.gelu(pre["up"])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _blocks(x_RD, weights: Weights, sizes_p, parts: Parts, apart: bool):
    return _blocks_forward(x_RD, weights, sizes_p, parts, apart)[0]


def _blocks_forward(x_RD, weights: Weights, sizes_p, parts: Parts, apart: bool):
    def of_slot(slot, first, rows, y_RD):
        w = _at(weights, slot)

        def of_part(start, size, y_RD):
            y_bD = _activate(_before(w, _rows(x_RD, start, size))) @ w["down"]
            if "down_bias" in w:
                y_bD += w["down_bias"][None]
            return _write(y_RD, y_bD, start)

        return _for_parts(parts, first, rows, of_part, y_RD)

    y_RD = _for_used_slots(sizes_p, parts, of_slot, jnp.zeros_like(x_RD))
    return y_RD, (x_RD, weights, sizes_p)


def _blocks_backward(parts: Parts, apart: bool, residuals, dy_RD):
    x_RD, weights, sizes_p = residuals
    if apart:
        dx_RD, between = _input_gradients(residuals, dy_RD, parts)
        dweights = _weight_gradients(residuals, dy_RD, between, parts)
        return dx_RD, dweights, None

    def of_slot(slot, first, rows, carry):
        w = _at(weights, slot)

        def of_part(start, size, carry):
            # Rows of dy_RD give way to those of dx_RD, once they have been read.
            rows_RD, total = carry
            x_bD, dy_bD = _rows(x_RD, start, size), _rows(rows_RD, start, size)
            dx_bD, between = _part_input_gradients(w, x_bD, dy_bD)
            total = _add_part(total, x_bD, dy_bD, between)
            return _write(rows_RD, dx_bD, start), total

        rows_RD, dweights = carry
        start = (rows_RD, _zero_gradients(w))
        rows_RD, dw = _for_parts(parts, first, rows, of_part, start)
        return rows_RD, _put(dweights, dw, slot)

    start = (dy_RD, jax.tree.map(jnp.zeros_like, weights))
    dx_RD, dweights = _for_used_slots(sizes_p, parts, of_slot, start)
    return dx_RD, dweights, None


def _input_gradients(residuals, dy_RD, parts: Parts):
    """(gradient of the rows, (h, gradient before the activation) for the weights)."""
    x_RD, weights, sizes_p = residuals

    def of_slot(slot, first, rows, carry):
        w = _at(weights, slot)

        def of_part(start, size, carry):
            x_bD, dy_bD = _rows(x_RD, start, size), _rows(dy_RD, start, size)
            made = _part_input_gradients(w, x_bD, dy_bD)
            return jax.tree.map(partial(_write, start=start), carry, made)

        return _for_parts(parts, first, rows, of_part, carry)

    h_RF = jnp.zeros((x_RD.shape[0], weights["up"].shape[2]), x_RD.dtype)
    dpre = {name: h_RF for name in ("up", "gate") if name in weights}
    start = (jnp.zeros_like(x_RD), (h_RF, dpre))
    return _for_used_slots(sizes_p, parts, of_slot, start)


def _weight_gradients(residuals, dy_RD, between, parts: Parts) -> Weights:
    x_RD, weights, sizes_p = residuals

    def of_slot(slot, first, rows, dweights):
        def of_part(start, size, total):
            take = partial(_rows, start=start, size=size)
            return _add_part(
                total, take(x_RD), take(dy_RD), jax.tree.map(take, between)
            )

        zeros = _zero_gradients(_at(weights, slot))
        return _put(dweights, _for_parts(parts, first, rows, of_part, zeros), slot)

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return _for_used_slots(sizes_p, parts, of_slot, zeros)


def _part_input_gradients(w: Weights, x_bD: jax.Array, dy_bD: jax.Array):
    """(gradient of the rows, (h, gradients before the activation))."""
    h_bF, pull = jax.vjp(_activate, _before(w, x_bD))
    dpre = pull(dy_bD @ w["down"].T)[0]
    dx_bD: Any = sum(value @ w[name].T for name, value in dpre.items())
    return dx_bD, (h_bF, dpre)


def _add_part(total: Weights, x_bD: jax.Array, dy_bD: jax.Array, between) -> Weights:
    """Adds what some rows give to the gradients of their expert's weights."""
    h_bF, dpre = between
    dw = {name: x_bD.T @ value for name, value in dpre.items()}
    dw["down"] = h_bF.T @ dy_bD
    if "up_bias" in total:
        dw["up_bias"] = jnp.sum(dpre["up"], axis=0)
        dw["down_bias"] = jnp.sum(dy_bD, axis=0)
    return jax.tree.map(jnp.add, total, dw)


def _zero_gradients(w: Weights) -> Weights:
    # In float32: an expert has many parts, and bfloat16 would lose the later ones.
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), w)


def _put(dweights: Weights, dw: Weights, slot: jax.Array) -> Weights:
    put = partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=0)
    return jax.tree.map(
        lambda all_, one: put(all_, one.astype(all_.dtype)), dweights, dw
    )


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _for_used_slots(
    sizes_p: jax.Array, parts: Parts, body: Callable, carry: Any
) -> Any:
    """carry = body(slot, its first row, its rows, carry), over the slots with rows.

    The others are left out, so that their weights are not read.
    """
    rows_p = -(-sizes_p // parts[-1]) * parts[-1]
    first_p = jnp.cumsum(rows_p) - rows_p
    slots_p = jnp.argsort(rows_p == 0, stable=True)  # those with rows first

    def step(n, carry):
        slot = slots_p[n]
        return body(slot, first_p[slot], rows_p[slot], carry)

    return jax.lax.fori_loop(0, jnp.sum(rows_p > 0), step, carry)


def _for_parts(
    parts: Parts,
    first: jax.Array,
    rows: jax.Array,
    body: Callable,
    carry: Any,
) -> Any:
    """carry = body(first row, size, carry), over one slot's rows: parts of the first
    size as long as there are so many rows, then those of the next."""
    for size in parts:
        number = rows // size

        def step(n, carry, first=first, size=size):
            return body(first + n * size, size, carry)

        carry = jax.lax.fori_loop(0, number, step, carry)
        first, rows = first + number * size, rows - number * size
    return carry


def _before(w: Weights, x_bD: jax.Array) -> dict[str, jax.Array]:
    """What stands before the activation."""
    pre = {name: x_bD @ w[name] for name in ("up", "gate") if name in w}
    if "up_bias" in w:
        pre["up"] += w["up_bias"][None]
    return pre


def _at(weights: Weights, slot: jax.Array) -> Weights:
    """The weights of one slot."""
    take = partial(jax.lax.dynamic_index_in_dim, index=slot, keepdims=False)
    return jax.tree.map(take, weights)


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`size` rows from `start` on."""
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _write(x: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """x with other rows from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, axis=0)
