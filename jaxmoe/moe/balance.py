# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Keeping the experts evenly loaded: losses, counts and the bias update.

Losses are counted inside routing groups, a fixed set of tokens whatever the mesh, the
microbatches or the placement; the model takes their mean over all groups of the step.

Legend: G routing groups, N tokens of a group, E experts, K experts per token, L layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def count_tokens(ids_GNK: Int[Array, "G N K"], num_experts: int) -> Int[Array, "G E"]:
    """Assignments per group and expert; void ones (id `num_experts`) count nowhere."""
    G = ids_GNK.shape[0]
    flat = ids_GNK.reshape(G, -1)
    return jax.vmap(lambda ids: jnp.bincount(ids, length=num_experts))(flat)


def switch_loss(
    probs_GNE: Float[Array, "G N E"],
    load_GE: Int[Array, "G E"],
    valid_GN: Bool[Array, "G N"],
) -> Float[Array, " G"]:
    """E * sum over experts of (share of the assignments) * (mean probability).

    Probabilities sum to 1 over the E experts; even load gives 1, all tokens on one
    expert give E (top-1). A group without a real token gives 0. With one sequence as
    the group this is the sequence-wise loss of DeepSeek-V3.

    Reference: Switch, arXiv 2101.03961, equations 4 to 6; arXiv 2412.19437, 17 to 20.
    """
    real = valid_GN[:, :, None].astype(probs_GNE.dtype)
    tokens = jnp.maximum(jnp.sum(real, axis=1), 1.0)
    mean_GE = jnp.sum(probs_GNE * real, axis=1) / tokens
    load = load_GE.astype(probs_GNE.dtype)
    share_GE = load / jnp.maximum(jnp.sum(load, axis=1, keepdims=True), 1.0)
    return probs_GNE.shape[-1] * jnp.sum(share_GE * mean_GE, axis=1)


def z_loss(
    logits_GNE: Float[Array, "G N E"], valid_GN: Bool[Array, "G N"]
) -> Float[Array, " G"]:
    """Mean over the real tokens of a group of log-sum-exp(logits) squared.

    Reference: ST-MoE, arXiv 2202.08906, equation 5.
    """
    real = valid_GN.astype(logits_GNE.dtype)
    squared = jnp.square(jax.nn.logsumexp(logits_GNE, axis=-1))
    return jnp.sum(squared * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1.0)


def update_bias(
    bias_LE: Float[Array, "L E"], load_LE: Int[Array, "L E"], rate: float
) -> Float[Array, "L E"]:
    """Raises the bias of underloaded experts by `rate`, lowers that of overloaded ones.

    Args:
      bias_LE: selection bias.
      load_LE: global tokens per expert of the step just done.
      rate: gamma of arXiv 2408.15664; DeepSeek-V3 uses 0.001.
    """
    load = load_LE.astype(jnp.float32)
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return bias_LE + rate * jnp.sign(mean - load)
