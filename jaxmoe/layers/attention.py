# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Self-attention of a stack that is encoder and decoder at once.

Legend: B batch, S positions, D width, H heads, Q head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import Model
from jaxmoe.layers.linear import no_param, normal_param, zeros_param


def attention_mask(
    sequence_BS: Int[Array, "B S"], decoder_BS: Bool[Array, "B S"]
) -> Bool[Array, "B 1 S S"]:
    """Who sees whom: [b, 0, i, j] is True where position i attends to position j.

    Positions of another packed sequence, and padding (sequence 0), are never seen.
    Encoder positions see the whole encoder part of their sequence; decoder positions
    see the whole encoder part and the decoder positions up to their own.

    A padding position sees itself, so that no row of the softmax is empty.

    Reference: M6, arXiv 2103.00823.
    """
    S = sequence_BS.shape[1]
    same = sequence_BS[:, :, None] == sequence_BS[:, None, :]
    same &= (sequence_BS > 0)[:, :, None]
    index = jnp.arange(S)
    past = (index[:, None] >= index[None, :])[None]
    query_decodes, key_decodes = decoder_BS[:, :, None], decoder_BS[:, None, :]
    seen = same & (~key_decodes | (query_decodes & past))
    return (seen | jnp.eye(S, dtype=bool)[None])[:, None]


class Attention(nnx.Module):
    """Multi-head self-attention with one fused projection to query, key and value."""

    def __init__(self, model: Model, *, rngs: nnx.Rngs):
        D, H, Q = model.width, model.num_heads, model.head_size
        self.qkv_kernel = normal_param(
            rngs, (D, 3, H, Q), ("width", None, "heads", "head"), model.init_std
        )
        self.out_kernel = normal_param(
            rngs, (H, Q, D), ("heads", "head", "width"), model.init_std
        )
        bias = zeros_param if model.use_bias else no_param
        self.qkv_bias = bias((3, H, Q), (None, "heads", "head"))
        self.out_bias = bias((D,), ("width",))

    def __call__(
        self, x_BSD: Float[Array, "B S D"], mask: Bool[Array, "B 1 S S"]
    ) -> Float[Array, "B S D"]:
        qkv = jnp.einsum("BSD,DcHQ->cBSHQ", x_BSD, self.qkv_kernel[...])
        if self.qkv_bias is not None:
            qkv += self.qkv_bias[...][:, None, None]
        # The one place where attention is chosen: jax picks the platform's kernel.
        out_BSHQ = jax.nn.dot_product_attention(qkv[0], qkv[1], qkv[2], mask=mask)
        out_BSD = jnp.einsum("BSHQ,HQD->BSD", out_BSHQ, self.out_kernel[...])
        if self.out_bias is not None:
            out_BSD += self.out_bias[...][None, None]
        return out_BSD
