# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The dense feed-forward part, also used for shared experts.

Legend: D width, F hidden width.
"""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.config import Model
from jaxmoe.layers.linear import no_param, normal_param, zeros_param


class Mlp(nnx.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` with SwiGLU."""

    def __init__(self, model: Model, hidden: int, *, rngs: nnx.Rngs):
        D, F, std = model.width, hidden, model.init_std
        gate = normal_param if model.activation == "swiglu" else no_param
        bias = zeros_param if model.use_bias else no_param
        self.gate = gate(rngs, (D, F), ("width", "hidden"), std)
        self.up = normal_param(rngs, (D, F), ("width", "hidden"), std)
        self.down = normal_param(rngs, (F, D), ("hidden", "width"), std)
        self.up_bias = bias((F,), ("hidden",))
        self.down_bias = bias((D,), ("width",))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        h = x @ self.up[...]
        if self.up_bias is not None:
            h += _row(self.up_bias[...], h)
        h = jax.nn.gelu(h) if self.gate is None else jax.nn.silu(x @ self.gate[...]) * h
        y = h @ self.down[...]
        if self.down_bias is not None:
            y += _row(self.down_bias[...], y)
        return y


def _row(bias: jax.Array, like: jax.Array) -> jax.Array:
    """`bias` with leading axes of size 1, since rank promotion is an error here."""
    return bias.reshape((1,) * (like.ndim - 1) + bias.shape)
