# SPDX-License-Identifier: Apache-2.0
"""A configuration to be changed in a few values, and what the checks say to it."""

import dataclasses
import re
from collections.abc import Iterator

from jaxmoe.config import Config, ConfigError, Data, Model, MoE, Train
from jaxmoe.config_checks import check
from jaxmoe.config_values import FIELDS

# Everything that the messages below show, whatever the defaults are.
BASE = Config(
    model=Model(
        num_layers=4,
        width=64,
        num_heads=4,
        layer_pattern="moe",
        sequence_length=48,
        num_patches=16,
        patch_dim=4,
    ),
    moe=MoE(num_experts=8, top_k=2),
    data=Data(
        batch_size=64,
        patch_size=2,
        caption_weight=0.75,
        image_denoise_weight=0.05,
        text_denoise_weight=0.1,
        lm_weight=0.1,
    ),
    train=Train(accumulation=1),
)


def changed(**values: object) -> Config:
    """The configuration above with values changed, as `Model__width=32`."""
    config = BASE
    for name, value in values.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(config, section.lower()), **{field: value})
        config = dataclasses.replace(config, **{section.lower(): part})
    return config


def message(config: Config) -> str:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


def default(name: str) -> str:
    """How a message proposes the default of a field, e.g. of 'Train.steps'."""
    return f"Set {name}={FIELDS[name].field.default!r} (the default)."


def better(config: Config, text: str) -> Iterator[tuple[str, Config]]:
    """The configuration with each single value that a message proposes."""
    remedy = (
        text.rpartition(". Set ")[2].removesuffix(".").replace(" (the default)", "")
    )
    name = ""
    for word in re.split(r",? or |, ", remedy):
        new_name, equals, value = word.rpartition("=")
        name = new_name if equals else name
        if not re.fullmatch(r"\w+\.\w+", name) or value in ("less", "more"):
            continue
        words = {"True": True, "False": False}
        new = int(value) if value.isdigit() else words.get(value, value.strip("'"))
        section, field = name.lower().split(".")
        part = dataclasses.replace(getattr(config, section), **{field: new})
        yield word, dataclasses.replace(config, **{section: part})
