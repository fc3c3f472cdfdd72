# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The mixture-of-experts layer, per device: route, dispatch, experts, combine.

The same code runs on one device, and inside a shard_map over the mesh axis `expert`,
where it exchanges tokens with explicit collectives.

Legend: B batch, S positions, T = B*S tokens of this device, D width, E experts.
"""

from __future__ import annotations

import math

import flax.struct
import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmoe import config as config_lib
from jaxmoe.config import Model, MoE
from jaxmoe.layers.mlp import Mlp
from jaxmoe.moe.dispatch import choose_block, combine, dispatch
from jaxmoe.moe.experts import Experts
from jaxmoe.moe.router import Router, capacity


@flax.struct.dataclass
class MoEStats:
    """What a layer reports, for the tokens of this device.

    Attributes:
      load_E: tokens per logical expert, before drops.
      dropped: assignments that reached no expert: over capacity or over the buffer.
      balance_loss, z_loss: sums over this device's routing groups.
    """

    load_E: jax.Array
    dropped: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array


class MoELayer(nnx.Module):
    """Router, routed experts and shared experts."""

    def __init__(self, model: Model, moe: MoE, *, rngs: nnx.Rngs):
        self.moe = moe
        self.group_tokens = config_lib.group_tokens(model, moe)
        hidden = config_lib.expert_width(model, moe)
        self.router = Router(model, moe, self.group_tokens, rngs=rngs)
        self.experts = Experts(model, moe.num_experts, hidden, rngs=rngs)
        shared = hidden * moe.num_shared_experts
        self.shared = Mlp(model, shared, rngs=rngs) if shared else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], valid_BS: Bool[Array, "B S"], axis_size: int
    ) -> tuple[Float[Array, "B S D"], MoEStats]:
        """Applies the layer to the tokens of this device.

        Args:
          x_BSD: tokens after the norm.
          valid_BS: False where the position is padding: it costs and counts nothing.
          axis_size: devices along `expert`; 1 exchanges nothing.
        """
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_TD, valid_BS.reshape(-1))
        assignments = routing.expert_ids_TK.size
        rows_TD, layout, route = dispatch(
            x_TD,
            routing.expert_ids_TK,
            num_slots=self.moe.num_experts,
            axis_size=axis_size,
            send_rows=self._send_rows(x_TD.shape[0], axis_size),
            block=choose_block(assignments, self.moe.num_experts // axis_size),
        )
        y_TD = combine(self.experts(rows_TD, layout), route, routing.weights_TK)
        y_BSD = y_TD.reshape(x_BSD.shape)
        if self.shared is not None:
            y_BSD += self.shared(x_BSD)
        stats = MoEStats(
            load_E=routing.load_E,
            dropped=routing.dropped + route.overflow,
            balance_loss=routing.balance_loss,
            z_loss=routing.z_loss,
        )
        return y_BSD, stats

    def _send_rows(self, tokens: int, axis_size: int) -> int:
        """Rows that one device can send to another: the smallest that is never short,
        or `buffer_factor` times the even share."""
        moe, experts = self.moe, self.moe.num_experts // axis_size
        most = tokens * min(moe.top_k, experts)  # a token visits an expert once
        if moe.capacity_factor is not None:
            groups = tokens // self.group_tokens
            most = min(most, groups * experts * capacity(moe, self.group_tokens))
        if moe.buffer_factor is not None:
            share = tokens * moe.top_k / axis_size
            most = min(most, math.ceil(share * moe.buffer_factor))
        return most
