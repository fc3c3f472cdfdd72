# SPDX-License-Identifier: Apache-2.0
"""Floor 5. The optimizer: optax's, with the schedule and the decay mask of the run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmoe.config import Optimizer

# Last names of the parameters that weight decay reaches: matrices and embeddings, not
# norms, biases and routers.
MATRICES = ("qkv_kernel", "out_kernel", "gate", "up", "down", "patch_kernel", "head")
DECAYED = frozenset((*MATRICES, "token", "position", "segment"))


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up to the peak, then the decay that `config.schedule` names.

    Args:
      config: peak rate and shape.
      steps: updates of the whole run; the decay ends there.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    rest, end = max(1, steps - warmup), config.end_fraction
    knee = max(1, warmup)
    decays = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=end),
        "linear": optax.linear_schedule(peak, peak * end, rest),
        # join_schedules asks for steps below 0 too, and throws the answers away.
        "rsqrt": lambda step: peak * jnp.sqrt(knee / (knee + jnp.maximum(step, 0))),
    }
    decay = decays[config.schedule]
    if not warmup:
        return decay
    # Step 0 already learns: the first of `warmup` rungs is peak / warmup.
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([ramp, decay], [warmup])


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """The update rule, without clipping.

    Clipping is done in the step, which has the global norm already: optax would
    compute it again from the sharded gradients, with one all-reduce per parameter.
    """
    rate = learning_rate(config, steps)
    if config.name == "sgd":
        return optax.sgd(rate)
    if config.name == "adafactor":
        # optax.adafactor decays by an absolute rate per step; here, as with AdamW, the
        # decay is a multiple of the learning rate.
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
            optax.scale_by_learning_rate(rate),
        )
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def updates_done(optimizer: Any) -> int:
    """Updates that an optimizer's state has seen: steps but those that were skipped."""
    found = optax.tree_utils.tree_get_all_with_path(optimizer, "count")
    return int(found[0][1])


def decay_mask(params: Any) -> Any:
    """True for each parameter that weight decay reaches."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in DECAYED, params
    )


def clip(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Scales the gradients down to a global norm of `limit`; None leaves them."""
    if limit is None:
        return gradients
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * factor, gradients)
