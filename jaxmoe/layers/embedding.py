# SPDX-License-Identifier: Apache-2.0
"""Floor 2. Image patches and text tokens become vectors of the model's width.

Legend: B batch, S positions, D width, P patches, C numbers of a patch.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmoe.config import Model
from jaxmoe.layers.linear import normal_param, zeros_param

PADDING, IMAGE, TEXT = 0, 1, 2  # values of `modality`


class PatchProjection(nnx.Module):
    """Linear projection of pixels, or of ready-made patch features, to the width."""

    def __init__(self, model: Model, *, rngs: nnx.Rngs):
        self.patch_kernel = normal_param(
            rngs, (model.patch_dim, model.width), (None, "width"), model.init_std
        )
        self.patch_bias = zeros_param((model.width,), ("width",))

    def __call__(self, patches_BPC: Float[Array, "B P C"]) -> Float[Array, "B P D"]:
        kernel = self.patch_kernel[...]
        projected = patches_BPC.astype(kernel.dtype) @ kernel
        return projected + self.patch_bias[...][None, None]


class Embedder(nnx.Module):
    """Token or projected patch, plus learned position, plus segment of the modality.

    Reference: M6, arXiv 2103.00823, section 3.2.
    """

    def __init__(self, model: Model, vocab_size: int, *, rngs: nnx.Rngs):
        D, std = model.width, model.init_std
        axes = ("vocab", "width")
        self.token = normal_param(rngs, (vocab_size, D), axes, std)
        self.position = normal_param(
            rngs, (model.sequence_length, D), (None, "width"), std
        )
        self.segment = normal_param(rngs, (2, D), (None, "width"), std)
        self.patch = PatchProjection(model, rngs=rngs) if model.num_patches else None

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        patches_BPC: Float[Array, "B P C"],
        modality_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
    ) -> Float[Array, "B S D"]:
        x_BSD = self.token[...][tokens_BS]
        is_image = modality_BS == IMAGE
        if self.patch is not None:
            image_BPD = self.patch(patches_BPC)
            # The i-th image position of a row takes patch i, wherever it stands.
            patch = jnp.cumsum(is_image, axis=1) - 1
            patch = jnp.clip(patch, 0, image_BPD.shape[1] - 1)
            image_BSD = jnp.take_along_axis(image_BPD, patch[:, :, None], axis=1)
            x_BSD = jnp.where(is_image[:, :, None], image_BSD, x_BSD)
        x_BSD += self.position[...][positions_BS]
        x_BSD += self.segment[...][jnp.where(is_image, 0, 1)]
        return x_BSD * (modality_BS != PADDING)[:, :, None].astype(x_BSD.dtype)
