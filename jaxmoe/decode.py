# SPDX-License-Identifier: Apache-2.0
"""Floor 3. The model read once and then continued, one position at a time.

`read` applies all layers to whole prompts, padded to the length of a sequence, and
keeps the keys and values of every position. `step` adds one position to each sequence
at the place where that sequence stands, so rows of different lengths share one program.
The logits are those of the model applied to the sequences as a whole.

Legend: B sequences, S positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.layers.attention import Memory, attention_mask
from jaxmoe.layers.embedding import TEXT
from jaxmoe.model import Batch, Network, sequences_of
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.router import Sequences


class Decoder:
    """A network with its weights, on one device.

    Args:
      network: of a setup for inference: its experts drop nothing.
      weights, buffers: as `Network` takes them.
      axis: devices along `expert`; all of them must take every step together.
    """

    def __init__(self, network: Network, weights: Any, buffers: Any, axis: ExpertAxis):
        self._network, self._axis = network, axis
        self._ends = network.ends(weights)
        self._layers = network.in_order(weights, buffers)

    def read(
        self, batch: Batch, place_B: Int[Array, " B"]
    ) -> tuple[Float[Array, "B V"], list[Memory]]:
        """Reads prompts.

        Args:
          batch: Arrays [B, S]: one sequence per row, from position 0 on.
          place_B: Where the last position of each prompt is.

        Returns:
          The logits there, and the memories of all layers.
        """
        x_BSD, memories = self._network.remember(
            self._layers,
            self._ends.embed(batch),
            [None] * len(self._layers),
            mask=attention_mask(batch["sequence"], batch["decoder"]),
            sequences=sequences_of(batch),
            axis=self._axis,
        )
        x_B1D = jnp.take_along_axis(x_BSD, place_B[:, None, None], axis=1)
        return self._ends.logits(x_B1D)[:, 0], memories

    def step(
        self,
        memories: list[Memory],
        token_B: Int[Array, " B"],
        place_B: Int[Array, " B"],
        *,
        valid_B: Bool[Array, " B"],
        number_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B V"], list[Memory]]:
        """Adds one decoder token to each sequence.

        Args:
          memories: Of all positions before; room for S of them.
          token_B, place_B: The token, and its position.
          valid_B: False for rows of no further interest: they cost no expert's time,
            and what is returned for them means nothing.
          number_B: The number of each sequence.

        Returns:
          The logits at this position, and the memories with it.
        """
        S = memories[0].keys_BSHQ.shape[1]
        place_B = jnp.clip(place_B, 0, S - 1)
        seen_BS = jnp.arange(S)[None] <= place_B[:, None]
        # By its number the router `balanced` finds where a sequence starts, from which
        # it counts positions; alone, this one is where it starts.
        sequences = Sequences(valid_B[:, None], number_B * S + place_B)
        x_B1D, memories = self._network.remember(
            self._layers,
            self._embed(token_B, place_B),
            memories,
            mask=seen_BS[:, None, None],
            sequences=sequences,
            axis=self._axis,
            place_B=place_B,
        )
        return self._ends.logits(x_B1D)[:, 0], memories

    def _embed(self, token_B: jax.Array, place_B: jax.Array) -> Float[Array, "B 1 D"]:
        token_B1 = token_B[:, None]
        none_BPC = jnp.zeros((token_B.size, 1, self._network.model.patch_dim))
        return self._ends.embedder(
            token_B1, none_BPC, jnp.full_like(token_B1, TEXT), place_B[:, None]
        )
