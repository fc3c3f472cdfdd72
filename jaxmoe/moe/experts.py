# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The feed-forward part of the experts that live on this device.

One contract, two implementations with the same numbers:
  ragged  products by `lax.ragged_dot`, for TPU and GPU;
  blocks  a loop over the blocks of rows in use, each with the weights of its one
          expert, for CPU, where XLA computes ragged_dot expert by expert over all rows.
          Its derivative is written out: one loop for the inputs, one for the weights.

Legend: R rows of this device, sorted by slot, b rows of a block; p slots, D width,
F hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.config import Model
from jaxmoe.layers.linear import no_param, normal_param, zeros_param
from jaxmoe.moe.dispatch import Layout

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
        self, x_RD: Float[Array, "R D"], layout: Layout, *, platform: str
    ) -> Float[Array, "R D"]:
        """Applies each slot's expert to its rows; rows of no slot are undefined."""
        names = ("up", "gate", "down", "up_bias", "down_bias")
        found = {name: getattr(self, name) for name in names}
        weights = {name: w[...] for name, w in found.items() if w is not None}
        if platform == "cpu":
            return _blocks(
                x_RD, weights, layout.slot_of_block, layout.used_blocks, layout.block
            )
        return _ragged(x_RD, weights, layout)


def _ragged(x_RD: jax.Array, weights: Weights, layout: Layout) -> jax.Array:
    rows_p = -(-layout.sizes_p // layout.block) * layout.block
    # ragged_dot leaves rows of no slot undefined, in its derivative too. Their blocks
    # take no bias, so that what stands in them reaches no gradient of a bias.
    used = jnp.arange(layout.slot_of_block.size) < layout.used_blocks
    bias_of_block = jnp.where(used, layout.slot_of_block, layout.sizes_p.size)

    def product(x, kernel, bias):
        y = jax.lax.ragged_dot(x, weights[kernel], rows_p)
        if bias in weights:
            bias_B = jnp.take(
                weights[bias], bias_of_block, 0, mode="fill", fill_value=0
            )
            y += jnp.repeat(bias_B, layout.block, axis=0)
        return y

    pre = {"up": product(x_RD, "up", "up_bias")}
    if "gate" in weights:
        pre["gate"] = product(x_RD, "gate", "")
    return product(_activate(pre), "down", "down_bias")


def _activate(pre: dict[str, jax.Array]) -> jax.Array:
    """GELU, or SwiGLU where there is a gate."""
    if "gate" in pre:
        return jax.nn.silu(pre["gate"]) * pre["up"]
    return jax.nn.gelu(pre["up"])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocks(x_RD, weights: Weights, slot_of_block, used_blocks, block: int):
    return _blocks_forward(x_RD, weights, slot_of_block, used_blocks, block)[0]


def _blocks_forward(x_RD, weights: Weights, slot_of_block, used_blocks, block: int):
    def body(i, carry):
        y_RD, pre, h_RF = carry
        w, x_bD = _at(weights, slot_of_block[i]), _rows(x_RD, i, block)
        pre_b = {name: x_bD @ w[name] for name in pre}
        if "up_bias" in w:
            pre_b["up"] += w["up_bias"][None]
        h_bF = _activate(pre_b)
        y_bD = h_bF @ w["down"]
        if "down_bias" in w:
            y_bD += w["down_bias"][None]
        return _write((y_RD, pre, h_RF), (y_bD, pre_b, h_bF), i, block)

    R, F = x_RD.shape[0], weights["up"].shape[2]
    pre = {k: jnp.zeros((R, F), x_RD.dtype) for k in ("up", "gate") if k in weights}
    empty = (jnp.zeros_like(x_RD), pre, jnp.zeros((R, F), x_RD.dtype))
    y_RD, pre, h_RF = jax.lax.fori_loop(0, used_blocks, body, empty)
    return y_RD, (x_RD, pre, h_RF, weights, slot_of_block, used_blocks)


def _blocks_backward(block: int, residuals, dy_RD):
    x_RD, pre, h_RF, weights, slot_of_block, used_blocks = residuals

    def inputs(i, carry):
        w, dy_bD = _at(weights, slot_of_block[i]), _rows(dy_RD, i, block)
        pre_b = {name: _rows(value, i, block) for name, value in pre.items()}
        dpre_b = jax.vjp(_activate, pre_b)[1](dy_bD @ w["down"].T)[0]
        dx_bD = sum(dpre_b[name] @ w[name].T for name in pre_b)
        return _write(carry, (dx_bD, dpre_b), i, block)

    zeros = jax.tree.map(jnp.zeros_like, (x_RD, pre))
    dx_RD, dpre = jax.lax.fori_loop(0, used_blocks, inputs, zeros)

    def of_weights(i, total):
        slot, dy_bD = slot_of_block[i], _rows(dy_RD, i, block)
        x_bD, h_bF = _rows(x_RD, i, block), _rows(h_RF, i, block)
        dpre_b = {name: _rows(value, i, block) for name, value in dpre.items()}
        dw = {name: x_bD.T @ value for name, value in dpre_b.items()}
        dw["down"] = h_bF.T @ dy_bD
        if "up_bias" in total:
            dw["up_bias"] = jnp.sum(dpre_b["up"], axis=0)
            dw["down_bias"] = jnp.sum(dy_bD, axis=0)
        # Not .at[slot].add, which is a scatter on CPU, many times as slow.
        dw = jax.tree.map(jnp.add, _at(total, slot), dw)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=0)
        return jax.tree.map(put, total, dw)

    # In float32: an expert has many blocks, and bfloat16 would lose the later ones.
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    total = jax.lax.fori_loop(0, used_blocks, of_weights, zeros)
    dweights = jax.tree.map(lambda t, w: t.astype(w.dtype), total, weights)
    return dx_RD, dweights, None, None


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _at(weights: Weights, slot: jax.Array) -> Weights:
    """The weights of one slot."""
    take = partial(jax.lax.dynamic_index_in_dim, index=slot, keepdims=False)
    return jax.tree.map(take, weights)


def _rows(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """The rows of block i."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block)


def _write(arrays: Any, rows: Any, i: jax.Array, block: int) -> Any:
    """Puts block i's rows into each array of a tree."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * block, axis=0)
    return jax.tree.map(write, arrays, rows)
