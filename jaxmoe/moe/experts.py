# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The feed-forward part of the experts that live on this device.

One contract, two implementations with the same numbers: `lax.ragged_dot` on TPU and
GPU; on CPU, where XLA computes ragged_dot expert by expert over all rows, a loop over
the blocks of rows that are in use, each with the weights of its one expert.

Legend: R rows of this device, sorted by slot; p slots, D width, F hidden width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.config import Model
from jaxmoe.layers.linear import normal_param, zeros_param
from jaxmoe.moe.dispatch import Layout


class Experts(nnx.Module):
    """Stacked feed-forward experts, [E, ...]; applied to the slots of one device."""

    def __init__(self, model: Model, num_experts: int, hidden: int, *, rngs: nnx.Rngs):
        E, D, F, std = num_experts, model.width, hidden, model.init_std
        up_axes, down_axes = ("expert", "width", "hidden"), ("expert", "hidden", "width")
        self.gate = None
        if model.activation == "swiglu":
            self.gate = normal_param(rngs, (E, D, F), up_axes, std)
        self.up = normal_param(rngs, (E, D, F), up_axes, std)
        self.down = normal_param(rngs, (E, F, D), down_axes, std)
        self.up_bias = self.down_bias = None
        if model.use_bias:
            self.up_bias = zeros_param((E, F), ("expert", "hidden"))
            self.down_bias = zeros_param((E, D), ("expert", "width"))

    def __call__(self, x_RD: Float[Array, "R D"], layout: Layout) -> Float[Array, "R D"]:
        """Applies each slot's expert to its rows. Rows of no slot come out undefined."""
        h_RF = self._product(x_RD, self.up, self.up_bias, layout)
        if self.gate is None:
            h_RF = jax.nn.gelu(h_RF)
        else:
            h_RF = jax.nn.silu(self._product(x_RD, self.gate, None, layout)) * h_RF
        return self._product(h_RF, self.down, self.down_bias, layout)

    def _product(self, x, kernel, bias, layout: Layout):
        y = grouped_product(x, kernel[...], layout)
        if bias is not None:
            y += jnp.repeat(bias[...][layout.slot_of_block], layout.block, axis=0)
        return y


def grouped_product(
    x_RI: Float[Array, "R I"], w_pIO: Float[Array, "p I O"], layout: Layout
) -> Float[Array, "R O"]:
    """Each row times the matrix of its slot."""
    if jax.default_backend() == "cpu":
        return _blocks_product(
            x_RI, w_pIO, layout.slot_of_block, layout.used_blocks, layout.block
        )
    blocks_p = -(-layout.sizes_p // layout.block) * layout.block
    return jax.lax.ragged_dot(x_RI, w_pIO, blocks_p)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocks_product(x, w, slot_of_block, used_blocks, block: int):
    def body(i, y_RO):
        x_bI = jax.lax.dynamic_slice_in_dim(x, i * block, block)
        w_IO = jax.lax.dynamic_index_in_dim(w, slot_of_block[i], keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(y_RO, x_bI @ w_IO, i * block, 0)

    y_RO = jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, used_blocks, body, y_RO)


def _blocks_forward(x, w, slot_of_block, used_blocks, block):
    y = _blocks_product(x, w, slot_of_block, used_blocks, block)
    return y, (x, w, slot_of_block, used_blocks)


def _blocks_backward(block, residuals, dy):
    x, w, slot_of_block, used_blocks = residuals
    dx = _blocks_product(dy, w.transpose(0, 2, 1), slot_of_block, used_blocks, block)
    return dx, _weight_gradient(x, dy, w, slot_of_block, used_blocks, block), None, None


def _weight_gradient(x, dy, w, slot_of_block, used_blocks, block: int):
    """For each slot the sum over its rows of x^T dy."""

    def body(i, dw_pIO):
        x_bI = jax.lax.dynamic_slice_in_dim(x, i * block, block)
        dy_bO = jax.lax.dynamic_slice_in_dim(dy, i * block, block)
        slot = slot_of_block[i]
        sum_IO = jax.lax.dynamic_index_in_dim(dw_pIO, slot, keepdims=False)
        sum_IO += x_bI.T @ dy_bO
        return jax.lax.dynamic_update_index_in_dim(dw_pIO, sum_IO, slot, 0)

    return jax.lax.fori_loop(0, used_blocks, body, jnp.zeros_like(w))


_blocks_product.defvjp(_blocks_forward, _blocks_backward)
