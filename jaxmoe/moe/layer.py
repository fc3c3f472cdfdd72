# SPDX-License-Identifier: Apache-2.0
"""Floor 2. The mixture-of-experts layer, per device: route, dispatch, experts, combine.

The same code runs on one device, and inside a shard_map over the mesh axis `expert`,
where it exchanges tokens with explicit collectives.

Legend: B batch, S positions, T = B*S tokens of this device, D width, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmoe import config_derived
from jaxmoe.config import Model, MoE
from jaxmoe.layers.mlp import Mlp
from jaxmoe.moe.dispatch import choose_block, visit, visit_by_node
from jaxmoe.moe.exchange import ExpertAxis
from jaxmoe.moe.experts import Experts
from jaxmoe.moe.router import MoEStats, Router, Sequences, capacity
from jaxmoe.moe.share import choose_slots


class MoELayer(nnx.Module):
    """Router, routed experts and shared experts."""

    def __init__(self, model: Model, moe: MoE, *, rngs: nnx.Rngs):
        self.moe = moe
        self.group_tokens = config_derived.group_tokens(model, moe)
        hidden = config_derived.expert_width(model, moe)
        self.router = Router(model, moe, self.group_tokens, rngs=rngs)
        self.experts = Experts(model, moe.num_experts, hidden, rngs=rngs)
        shared = hidden * moe.num_shared_experts
        self.shared = Mlp(model, shared, rngs=rngs) if shared else None

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        sequences: Sequences,
        axis: ExpertAxis,
        expert_P: Int[Array, " P"] | None = None,
    ) -> tuple[Float[Array, "B S D"], MoEStats]:
        """Applies the layer to the tokens of this device, after the norm.

        Args:
          x_BSD, sequences: the tokens, and what else is known of them.
          axis: devices along `expert`.
          expert_P: expert of each slot, where the weights are those of slots; None:
            slot e holds expert e.
        """
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_TD, sequences)
        num_slots, slots_TK = self.moe.num_experts, routing.expert_ids_TK
        if expert_P is not None:
            num_experts, num_slots = num_slots, expert_P.shape[0]
            slots_TK = choose_slots(
                slots_TK, expert_P, num_experts=num_experts, axis=axis
            )
        go = visit
        if axis.nodes > 1:
            visits = self._node_visits(axis.nodes, placed=expert_P is not None)
            go = partial(visit_by_node, node_visits=visits)
        y_TD, overflow = go(
            x_TD,
            slots_TK,
            routing.weights_TK,
            partial(self.experts, axis=axis),
            num_slots=num_slots,
            axis=axis,
            buffer_rows=self._buffer_rows(x_TD.shape[0], num_slots, axis.size),
            block=choose_block(slots_TK.size, num_slots // axis.size),
        )
        y_BSD = y_TD.reshape(x_BSD.shape)
        if self.shared is not None:
            y_BSD += self.shared(x_BSD)
        stats = routing.stats
        return y_BSD, dataclasses.replace(stats, dropped=stats.dropped + overflow)

    def _buffer_rows(self, tokens: int, num_slots: int, axis_size: int) -> int:
        """Rows that a device can receive: as many as could ever come from devices with
        `tokens` each, or `buffer_factor` times the even share."""
        moe, slots = self.moe, num_slots // axis_size
        most = tokens * min(moe.top_k, slots)  # a token visits an expert once
        if moe.capacity_factor is not None:
            groups = tokens // self.group_tokens
            most = min(most, groups * slots * capacity(moe, self.group_tokens))
        most *= axis_size
        if moe.buffer_factor is not None:
            most = min(most, math.ceil(tokens * moe.top_k * moe.buffer_factor))
        return most

    def _node_visits(self, nodes: int, *, placed: bool) -> int:
        """Nodes that a token visits at most; `placed`: copies may be on any node."""
        most = min(nodes, self.moe.top_k)
        grouped = self.moe.router == "grouped_sigmoid"
        if placed or not grouped or self.moe.num_groups % nodes:
            return most
        return min(most, self.moe.top_groups)
