# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Writing text with a trained model, one token at a time.

Legend: b sequences on this device, B over all devices, S positions, N new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.data.tasks import TEXT, last_position
from jaxmoe.data.tokenizer import PAD
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
from jaxmoe.train_step import Setup


def make_generator(
    setup: Setup, new_tokens: int, eos_id: int
) -> Callable[[Any, Any, Batch], jax.Array]:
    """Greedy decoding, compiled once for one number of new tokens.

    Args:
      setup: For inference (`Setup.for_inference`): experts drop no token.
      new_tokens: Tokens generated per sequence, the end token included.
      eos_id: The token that ends a sequence; padding follows it.

    Returns:
      A function (params, buffers, prompts [B, ...]) -> int32 [B, new_tokens]. A prompt
      is a batch without targets (`data.tasks.caption_prompt`); what does not fit into
      the model's sequence length is not generated (padding).
    """

    def generate(params: Any, buffers: Any, prompts: Batch) -> jax.Array:
        weights = setup.weights(params, buffers)

        def body(i, carry):
            batch, place_b, ended_b, out_bN = carry
            logits_bSV, _ = setup.network(weights, buffers, batch, setup.axis)
            row_b = jnp.arange(place_b.shape[0])
            next_b = jnp.argmax(logits_bSV[row_b, place_b], axis=-1).astype(jnp.int32)
            ended_b |= place_b + 1 >= batch["tokens"].shape[1]
            next_b = jnp.where(ended_b, PAD, next_b)
            out_bN = out_bN.at[:, i].set(next_b)
            batch = _append(batch, place_b + 1, next_b, ended_b)
            return batch, place_b + 1, ended_b | (next_b == eos_id), out_bN

        place_b = last_position(prompts)
        out_bN = jnp.zeros((place_b.shape[0], new_tokens), jnp.int32)
        carry = (prompts, place_b, jnp.zeros_like(place_b, bool), out_bN)
        return jax.lax.fori_loop(0, new_tokens, body, carry)[3]

    spec = P(BATCH_AXES)
    # Every process reads all of them.
    whole = NamedSharding(setup.mesh, P())
    return jax.jit(setup.per_device(generate, spec, spec), out_shardings=whole)


def _append(batch: Batch, place_b, token_b, ended_b) -> Batch:
    """Writes one decoder token at `place_b` of each sequence that has not ended."""
    written = {
        "tokens": token_b,
        "modality": TEXT,
        "decoder": True,
        "sequence": 1,
        "positions": place_b,
    }
    b, S = batch["tokens"].shape
    at = (jnp.arange(b), jnp.where(ended_b, S, place_b))  # S is written nowhere
    return batch | {
        name: batch[name].at[at].set(value, mode="drop")
        for name, value in written.items()
    }


def decode_rows(tokens_BN: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each row."""
    return [decode(row.tolist()) for row in np.asarray(tokens_BN)]
