# SPDX-License-Identifier: Apache-2.0
"""Floor 3. The training loss: sums over real tokens, to be divided by global counts.

The loss of a step is

  sum of -log p over all target tokens / their number
  + MoE.balance_loss * sum over MoE layers of the mean balance loss of a routing group
  + MoE.z_loss       * sum over MoE layers of the mean z-loss of a routing group

with both divisors global, so that it depends neither on the mesh, nor on microbatches,
nor on padding.

Legend: B sequences, S positions, V vocabulary.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.config import MoE
from jaxmoe.moe.router import MoEStats


@flax.struct.dataclass
class LossSums:
    """Sums over the tokens of this device; they add over devices and microbatches.

    Attributes:
      nll: negative log-likelihood per task, in nats.
      tokens: target tokens per task.
      correct: target tokens whose most likely prediction is right, per task.
    """

    nll: jax.Array
    tokens: jax.Array
    correct: jax.Array

    @classmethod
    def zeros(cls, num_tasks: int) -> LossSums:
        """Of no token."""
        nothing = jnp.zeros((num_tasks,), jnp.float32)
        return cls(nothing, nothing, nothing)


def loss_sums(
    logits_BSV: Float[Array, "B S V"],
    targets_BS: Int[Array, "B S"],
    task_BS: Int[Array, "B S"],
    num_tasks: int,
) -> LossSums:
    """Cross-entropy by task; `task_BS` is 0 where there is no target, else 1 + task."""
    nll_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS)
    correct_BS = jnp.argmax(logits_BSV, axis=-1) == targets_BS
    of_task = (task_BS[None] == 1 + jnp.arange(num_tasks)[:, None, None]).astype(
        nll_BS.dtype
    )
    total = lambda x: jnp.sum(of_task * x[None], axis=(1, 2))  # noqa: E731
    return LossSums(
        nll=total(nll_BS),
        tokens=jnp.sum(of_task, axis=(1, 2)),
        correct=total(correct_BS.astype(nll_BS.dtype)),
    )


def count_positive(field: Int[Array, "*batch"]) -> Float[Array, ""]:
    """Entries above 0: target tokens of `task`, patches and tokens of `modality`."""
    return jnp.sum(field > 0, dtype=jnp.float32)


def total_loss(
    sums: LossSums,
    stats: MoEStats | None,
    moe: MoE,
    *,
    target_tokens: jax.Array,
    routing_groups: int,
    sequences: int,
) -> Float[Array, ""]:
    """This device's share of the loss.

    Args:
      sums: this device's sums.
      stats: of the MoE layers, stacked; None without such layers.
      moe: coefficients.
      target_tokens: target tokens of the whole step.
      routing_groups: routing groups of the whole step.
      sequences: sequences of the whole step.
    """
    loss = task_loss(sums, target_tokens)
    if stats is None:
        return loss
    return loss + routing_loss(
        stats, moe, routing_groups=routing_groups, sequences=sequences
    )


def task_loss(sums: LossSums, target_tokens: jax.Array) -> Float[Array, ""]:
    """This device's share of the cross-entropy."""
    return jnp.sum(sums.nll) / jnp.maximum(target_tokens, 1.0)


def routing_loss(
    stats: MoEStats, moe: MoE, *, routing_groups: int, sequences: int
) -> Float[Array, ""]:
    """This device's share of the routers' losses, of the layers in `stats`."""
    loss = moe.balance_loss * jnp.sum(stats.balance_loss) / routing_groups
    loss += moe.sequence_balance_loss * jnp.sum(stats.sequence_loss) / sequences
    return loss + moe.z_loss * jnp.sum(stats.z_loss) / routing_groups
