# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Self-attention of a stack that is encoder and decoder at once.

Legend: B batch, S positions, D width, H heads, Q head size.
"""

from __future__ import annotations

import flax.struct
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


@flax.struct.dataclass
class Memory:
    """What one layer keeps of the positions that it has seen: a key-value cache.

    Attributes:
      keys_BSHQ, values_BSHQ: of position s at [:, s].
    """

    keys_BSHQ: jax.Array
    values_BSHQ: jax.Array

    def at(self, place_B: Int[Array, " B"], new: Memory) -> Memory:
        """With the one position of `new` at `place_B`; past the end it goes nowhere."""
        row_B = jnp.arange(place_B.shape[0])

        def write(old_BSHQ: jax.Array, new_B1HQ: jax.Array) -> jax.Array:
            return old_BSHQ.at[row_B, place_B].set(new_B1HQ[:, 0], mode="drop")

        return Memory(
            write(self.keys_BSHQ, new.keys_BSHQ),
            write(self.values_BSHQ, new.values_BSHQ),
        )


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
        """Attends between the given positions."""
        return self.remember(x_BSD, mask)[0]

    def remember(
        self,
        x_BSD: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 S T"],
        memory: Memory | None = None,
        place_B: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Memory]:
        """Attends, and returns the keys and values that it attended to.

        Args:
          x_BSD: all positions; with a memory the one position at `place_B`.
          mask: which positions, of x or of the memory, each of x attends to.
          memory: of the positions before, and room for this one.
          place_B: where in the memory this position belongs.
        """
        qkv = jnp.einsum("BSD,DcHQ->cBSHQ", x_BSD, self.qkv_kernel[...])
        if self.qkv_bias is not None:
            qkv += self.qkv_bias[...][:, None, None]
        found = Memory(qkv[1], qkv[2])
        if memory is not None and place_B is not None:
            found = memory.at(place_B, found)
        # The one place where attention is chosen: jax picks the platform's kernel.
        out_BSHQ = jax.nn.dot_product_attention(
            qkv[0], found.keys_BSHQ, found.values_BSHQ, mask=mask
        )
        out_BSD = jnp.einsum("BSHQ,HQD->BSD", out_BSHQ, self.out_kernel[...])
        if self.out_bias is not None:
            out_BSD += self.out_bias[...][None, None]
        return out_BSD, found
