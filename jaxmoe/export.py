# SPDX-License-Identifier: Apache-2.0
"""Floor 6. The weights of a checkpoint as one safetensors file, each layer by itself.

Names are those of the parameters, joined by '.', with the number of the layer in the
model: 'layers.3.moe.router.router_kernel'. Experts are in logical order, [E, ...]. With
`Model.share_layers` the one layer of a kind is 'layers.moe' or 'layers.dense'.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxmoe import config_derived, tree_names
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import Model
from jaxmoe.config_base import mistake, shown_path
from jaxmoe.model import STACKS
from jaxmoe.rebalance import of_placement


def export(checkpoints: Path, step: int, model: Model, file: str) -> int:
    """Writes parameters and router biases of a step, as float32.

    Args:
      checkpoints: The folder of the steps.
      step: One that verifies.
      model: The section of the configuration of the run that saved it.
      file: Where to; replaced if it is there.

    Returns:
      The number of tensors.

    Raises:
      ConfigError: if the file cannot be written.
      CheckpointError: if the step is damaged.
    """
    from safetensors.numpy import save_file

    with Checkpointer(checkpoints, read_only=True) as reader:
        tree = reader.arrays(step, _are_weights)
        config_text = reader.config_text(step)
    tensors = dict(_tensors(tree_names.paths(tree), model))
    notes = {"format": "jaxmoe", "step": str(step), "config": config_text}
    temporary = f"{file}.tmp"
    try:
        save_file(tensors, temporary, notes)
        os.replace(temporary, file)
    except Exception as error:  # the library has an error class of its own
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise mistake(
            f"{shown_path(file)} cannot be written ({error})",
            "the weights go into a folder that exists, can be written and has space",
            "Name another file",
        ) from error
    return len(tensors)


def _are_weights(name: str) -> bool:
    return name.startswith(("params/", "buffers/")) and not of_placement(name)


def _tensors(
    leaves: Mapping[tuple[str, ...], np.ndarray], model: Model
) -> Iterator[tuple[str, np.ndarray]]:
    kinds = config_derived.layer_kinds(model)
    for (_, *path), leaf in leaves.items():
        value = np.ascontiguousarray(leaf, np.float32)
        if path[0] not in STACKS:
            yield ".".join(path), value
            continue
        kind, *rest = path
        numbers = [str(n) for n, k in enumerate(kinds) if k == kind]
        if model.share_layers:
            numbers = [kind]
        if len(numbers) != len(value):
            raise mistake(
                f"the checkpoint has {len(value)} layers of the kind {kind!r}, its"
                f" configuration {len(numbers)}",
                "the number of a layer in the model comes from the configuration",
                "Use a checkpoint that train has written",
            )
        for number, row in zip(numbers, value, strict=True):
            yield ".".join(("layers", number, *rest)), np.ascontiguousarray(row)
