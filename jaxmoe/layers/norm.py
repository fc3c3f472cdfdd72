# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Normalisation, computed in float32 whatever the compute type."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxmoe.config import Model


def make_norm(model: Model, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """The norm that `model.norm` names, over the last axis, of width `model.width`."""
    if model.norm == "rms":
        return nnx.RMSNorm(model.width, dtype=jnp.float32, rngs=rngs)
    return nnx.LayerNorm(
        model.width, use_bias=model.use_bias, dtype=jnp.float32, rngs=rngs
    )
