# SPDX-License-Identifier: Apache-2.0
"""Floor 0. What follows from a configuration: 'auto' resolved, the kinds of layers."""

from __future__ import annotations

import re

from jaxmoe.config import Balancer, Config, Data, Model, MoE, Pipeline
from jaxmoe.config_base import mistake, near


def pipeline_microbatches(pipeline: Pipeline, ranks: int) -> int:
    """Microbatches of one pass over so many ranks, 'auto' resolved; 1 without any."""
    if ranks == 1:
        return 1
    return 2 * ranks if pipeline.microbatches == "auto" else pipeline.microbatches


def microbatches(config: Config, ranks: int) -> int:
    """Microbatches of a whole step, over all accumulated parts."""
    parts = config.train.accumulation
    return parts * pipeline_microbatches(config.pipeline, ranks)


def image_patches(data: Data) -> tuple[int, int]:
    """Patches of an image, and the numbers of a patch."""
    channels = 3 if data.image_mode == "rgb" else 1
    return (data.image_size // data.patch_size) ** 2, data.patch_size**2 * channels


def expert_width(model: Model, moe: MoE) -> int:
    """Hidden width of an expert, 'auto' resolved."""
    return model.ffn_width if moe.expert_width == "auto" else moe.expert_width


def num_replicas(balancer: Balancer, moe: MoE) -> int:
    """Slots of a layer, 'auto' resolved."""
    if balancer.num_replicas == "auto":
        return moe.num_experts
    return balancer.num_replicas


def group_tokens(model: Model, moe: MoE) -> int:
    """Tokens of a routing group, 'auto' resolved."""
    return model.sequence_length if moe.group_tokens == "auto" else moe.group_tokens


def layer_kinds(model: Model) -> tuple[str, ...]:
    """The kind of every layer, 'dense' or 'moe', from the first to the last.

    Raises:
      ConfigError: if the pattern cannot be read or does not fill the layers exactly.
    """
    parts: list[tuple[str, int]] = []
    for text in model.layer_pattern.split(","):
        match = re.fullmatch(r"\s*(dense|moe)\s*(?:\*\s*([1-9][0-9]{0,4})\s*)?", text)
        if match is None:
            raise mistake(
                f"Model.layer_pattern={model.layer_pattern!r} has the part {text!r}",
                "its parts are 'dense' or 'moe', each optionally '*N' with N from 1 on",
                "Set Model.layer_pattern='moe' or, for example, 'dense,moe*3'",
            )
        parts.append((match[1], int(match[2] or 1)))
    period, layers = sum(count for _, count in parts), model.num_layers
    if layers % period:
        kind, count = parts[-1]
        last = layers - (period - count)
        shorter = ",".join([*model.layer_pattern.split(",")[:-1], f"{kind}*{last}"])
        raise mistake(
            f"Model.layer_pattern={model.layer_pattern!r} names {period} layers, which"
            f" cannot fill Model.num_layers={layers}",
            "the pattern is repeated a whole number of times",
            f"Set Model.num_layers={near(layers, period)}, or"
            f" Model.layer_pattern={shorter if last > 0 else 'moe'!r}",
        )
    return tuple(kind for kind, count in parts for _ in range(count)) * (
        layers // period
    )
