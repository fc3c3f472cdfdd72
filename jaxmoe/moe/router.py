# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Routers: which experts a token visits, and with what weight.

Everything from the tokens before the matrix product to the weights is float32: a
bfloat16 router picks other experts for about one token in a hundred.

Legend: T tokens of this device, D width, E logical experts, K experts per token,
G routing groups, N tokens of a group (T = G * N).
"""

from __future__ import annotations

import math
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import Model, MoE
from jaxmoe.layers.linear import normal_param
from jaxmoe.moe import balance


class Buffer(nnx.Variable):
    """State of the model that no gradient reaches, e.g. the router's bias."""


@flax.struct.dataclass
class Sequences:
    """What a layer knows of the sequences of this device besides their vectors.

    Attributes:
      valid_BS: False where the position is padding: it costs and counts nothing.
      number_B: number of each sequence in the batch of the step, the same on any mesh.
      key_B: random key of each sequence and layer; None: nothing random.
    """

    valid_BS: jax.Array
    number_B: jax.Array
    key_B: jax.Array | None = None


@flax.struct.dataclass
class MoEStats:
    """What a layer reports, for the tokens of this device.

    Attributes:
      load_E: int32 tokens per logical expert, before any drop, padding excluded.
      dropped: int32 assignments that reached no expert.
      balance_loss: Switch balance loss, sum over this device's routing groups.
      sequence_loss: the same, counted in and summed over its sequences.
      z_loss: mean squared log-sum-exp of a group's logits, sum over groups.
      entropy: of the router's probabilities in nats, sum over its real tokens; log(E)
        for each is the most that can be.
    """

    load_E: jax.Array
    dropped: jax.Array
    balance_loss: jax.Array
    sequence_loss: jax.Array
    z_loss: jax.Array
    entropy: jax.Array

    @classmethod
    def zeros(cls, layers: int, num_experts: int) -> MoEStats:
        """Of so many layers, stacked, that saw no token."""
        load = jnp.zeros((layers, num_experts), jnp.int32)
        nothing = jnp.zeros((layers,), jnp.float32)
        dropped = nothing.astype(jnp.int32)
        return cls(load, dropped, nothing, nothing, nothing, nothing)


@flax.struct.dataclass
class Routing:
    """Where the tokens of this device go.

    Attributes:
      expert_ids_TK: logical expert in [0, E), by falling score, ties to the lower id;
        E where the assignment is void: a padding token, or one over capacity.
      weights_TK: factors of the experts' outputs.
      stats: what there is to report, `dropped` without what a full buffer drops.
    """

    expert_ids_TK: jax.Array
    weights_TK: jax.Array
    stats: MoEStats


def top_k(logits_TE: Float[Array, "T E"], moe: MoE):
    """Softmax over all experts, the K largest.

    Reference: Shazeer et al., arXiv 1701.06538; Switch, arXiv 2101.03961 (K = 1).
    """
    probs_TE = jax.nn.softmax(logits_TE, axis=-1)
    weights_TK, ids_TK = jax.lax.top_k(probs_TE, moe.top_k)
    if moe.normalize_weights:
        weights_TK /= jnp.sum(weights_TK, axis=-1, keepdims=True)
    return ids_TK, weights_TK, probs_TE


def prototype(logits_TE: Float[Array, "T E"], moe: MoE):
    """K prototypes of E / K experts; every token takes the best of each ("k top-1").

    Reference: M6-T, arXiv 2105.15082, section 3.3.
    """
    T, E = logits_TE.shape
    logits = logits_TE.reshape(T, moe.top_k, E // moe.top_k)
    probs = jax.nn.softmax(logits, axis=-1)  # inside each prototype
    best_TK = jnp.argmax(probs, axis=-1)
    weights_TK = jnp.max(probs, axis=-1)
    ids_TK = best_TK + (E // moe.top_k) * jnp.arange(moe.top_k)[None]
    return ids_TK, weights_TK, probs.reshape(T, E) / moe.top_k


def grouped_sigmoid(
    logits_TE: Float[Array, "T E"], bias_E: Float[Array, " E"], moe: MoE
):
    """DeepSeek-V3: the best expert groups first, then the top K inside them.

    The bias takes part in the choice only: weights are made of the unbiased scores.

    Reference: arXiv 2412.19437, section 2.1.2 (equations 12 to 16) and node-limited
    routing; bias as in arXiv 2408.15664.
    """
    T, E = logits_TE.shape
    scores_TE = jax.nn.sigmoid(logits_TE)
    choice_TE = scores_TE + jax.lax.stop_gradient(bias_E)[None]
    if moe.num_groups > 1:
        grouped = choice_TE.reshape(T, moe.num_groups, -1)
        group_score = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], -1)
        kept = jax.lax.top_k(group_score, moe.top_groups)[1]
        allowed = jnp.any(
            kept[:, :, None] == jnp.arange(moe.num_groups)[None, None], axis=1
        )
        grouped = jnp.where(allowed[:, :, None], grouped, -jnp.inf)
        choice_TE = grouped.reshape(T, E)
    ids_TK = jax.lax.top_k(choice_TE, moe.top_k)[1]
    weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=-1)
    weights_TK /= jnp.sum(weights_TK, axis=-1, keepdims=True) + 1e-20
    probs_TE = scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
    return ids_TK, weights_TK * moe.route_scale, probs_TE


def balanced(logits_TE: Float[Array, "T E"], sequences: Sequences, moe: MoE):
    """Deals the experts out in turn: as even as the number of tokens allows.

    The i-th real token of a sequence takes experts i*K, i*K + 1, ... modulo E, from a
    start that differs by sequence, each with weight 1/K. For runs that measure speed
    and memory; the router learns from its own losses alone.
    """
    T, E = logits_TE.shape
    S, K = sequences.valid_BS.shape[1], moe.top_k
    real_BS = jnp.cumsum(sequences.valid_BS, axis=1) - 1
    token_T = (sequences.number_B[:, None] % E * S + real_BS).reshape(T)
    ids_TK = (token_T[:, None] * K + jnp.arange(K)[None]) % E
    weights_TK = jnp.full((T, K), 1.0 / K, jnp.float32)
    return ids_TK, weights_TK, jax.nn.softmax(logits_TE, axis=-1)


def jitter(
    x_TD: Float[Array, "T D"], key_B: jax.Array, epsilon: float
) -> Float[Array, "T D"]:
    """x times uniform factors in [1 - epsilon, 1 + epsilon), drawn per sequence.

    Reference: Switch, arXiv 2101.03961, section 2.4.
    """
    S = x_TD.shape[0] // key_B.size
    low, high = 1.0 - epsilon, 1.0 + epsilon
    shape = (S, x_TD.shape[1])
    draw = partial(jax.random.uniform, shape=shape, minval=low, maxval=high)
    return x_TD * jax.vmap(lambda key: draw(key))(key_B).reshape(x_TD.shape)


def capacity(moe: MoE, group_tokens: int) -> int:
    """Tokens of one routing group that an expert takes: ceil(share * factor), >= 1.

    The even share counts every token K times ("kx") or once ("1x"); M6-T, section 3.3.
    """
    assert moe.capacity_factor is not None
    times = moe.top_k if moe.capacity_mode == "kx" else 1
    # Rounded first: 64 * 1.1 / 8 must not become 9 for a last bit of the product.
    share = round(times * group_tokens * moe.capacity_factor / moe.num_experts, 9)
    return max(1, math.ceil(share))


def within_capacity(
    ids_GNK: Int[Array, "G N K"], num_experts: int, limit: int
) -> Bool[Array, "G N K"]:
    """Which assignments an expert still takes, counted inside each routing group.

    Priority: all first choices before all second choices, and so on; among equal
    choices the earlier token. Void assignments (id `num_experts`) are never kept.
    """
    G, N, K = ids_GNK.shape
    # (G, N, K) -> (G, K*N): first choices first
    ids = ids_GNK.transpose(0, 2, 1).reshape(G, K * N)
    order = jnp.argsort(ids, axis=1, stable=True)
    ordered = jnp.take_along_axis(ids, order, axis=1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, row, side="left"))(ordered)
    rank = jnp.arange(K * N)[None] - first
    kept = jnp.zeros_like(ids, bool)
    kept = jax.vmap(lambda k, o, r: k.at[o].set(r < limit))(kept, order, rank)
    kept &= ids < num_experts
    return kept.reshape(G, K, N).transpose(0, 2, 1)


class Router(nnx.Module):
    """Linear scores and the rule of `moe.router`."""

    def __init__(self, model: Model, moe: MoE, group_tokens: int, *, rngs: nnx.Rngs):
        self.moe, self.group_tokens = moe, group_tokens
        shape = (model.width, moe.num_experts)
        # "router" in the name: this leaf is never cast below float32, never decayed.
        self.router_kernel = normal_param(rngs, shape, ("width", None), model.init_std)
        biased = moe.router == "grouped_sigmoid"
        zeros = jnp.zeros((moe.num_experts,), jnp.float32)
        self.bias = Buffer(zeros, logical_axes=(None,)) if biased else None

    def __call__(self, x_TD: Float[Array, "T D"], sequences: Sequences) -> Routing:
        """Routes the tokens of this device; padding goes nowhere."""
        moe, E = self.moe, self.moe.num_experts
        valid_T = sequences.valid_BS.reshape(-1)
        x_TD = x_TD.astype(jnp.float32)
        if moe.input_jitter and sequences.key_B is not None:
            x_TD = jitter(x_TD, sequences.key_B, moe.input_jitter)
        # The default precision is bfloat16 on TPU and TF32 on GPU, also for float32.
        logits_TE = jnp.dot(
            x_TD, self.router_kernel[...], precision=jax.lax.Precision.HIGHEST
        )
        ids_TK, weights_TK, probs_TE = self._choose(logits_TE, sequences)
        ids_TK = jnp.where(valid_T[:, None], ids_TK, E).astype(jnp.int32)

        def losses(rows: int):
            """(tokens per expert, balance loss) of each of so many equal groups."""
            split = lambda x: x.reshape(rows, -1, *x.shape[1:])  # noqa: E731
            load = balance.count_tokens(split(ids_TK), E)
            return load, balance.switch_loss(split(probs_TE), load, split(valid_T))

        groups = x_TD.shape[0] // self.group_tokens
        load_GE, balance_G = losses(groups)
        _, sequence_B = losses(sequences.valid_BS.shape[0])
        z_G = balance.z_loss(
            logits_TE.reshape(groups, -1, E), valid_T.reshape(groups, -1)
        )
        entropy_T = -jnp.sum(jax.scipy.special.xlogy(probs_TE, probs_TE), axis=-1)
        dropped = jnp.zeros((), jnp.int32)
        if moe.capacity_factor is not None:
            limit = capacity(moe, self.group_tokens)
            ids_GNK = ids_TK.reshape(groups, -1, moe.top_k)
            kept_TK = within_capacity(ids_GNK, E, limit).reshape(ids_TK.shape)
            dropped = jnp.sum((ids_TK < E) & ~kept_TK, dtype=jnp.int32)
            ids_TK = jnp.where(kept_TK, ids_TK, E)
        stats = MoEStats(
            load_E=jnp.sum(load_GE, axis=0),
            dropped=dropped,
            balance_loss=jnp.sum(balance_G),
            sequence_loss=jnp.sum(sequence_B),
            z_loss=jnp.sum(z_G),
            entropy=jax.lax.stop_gradient(jnp.sum(entropy_T * valid_T)),
        )
        return Routing(ids_TK, weights_TK, stats)

    def _choose(self, logits_TE: jax.Array, sequences: Sequences):
        """(expert ids, weights, probabilities) by the rule of `moe.router`."""
        if self.bias is not None:
            return grouped_sigmoid(logits_TE, self.bias[...], self.moe)
        if self.moe.router == "balanced":
            return balanced(logits_TE, sequences, self.moe)
        rule = prototype if self.moe.router == "prototype" else top_k
        return rule(logits_TE, self.moe)
