# SPDX-License-Identifier: Apache-2.0
"""Floor 2. How parameters are declared: value, logical axes and initialiser at once.

Every parameter carries the metadata `logical_axes`, one name per dimension;
`jaxmoe.sharding` turns the names into a PartitionSpec. Products take the weights in
the type in which they are handed over: the step casts them before the model sees them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float
) -> nnx.Param:
    """A float32 parameter drawn from a normal distribution, truncated at 2 std."""
    value = std * jax.random.truncated_normal(
        rngs.params(), -2.0, 2.0, shape, jnp.float32
    )
    return nnx.Param(value, logical_axes=axes)


def no_param(*_: object) -> None:
    """In place of `zeros_param` or `normal_param` where the model has none."""


def zeros_param(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A float32 parameter of zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=axes)
