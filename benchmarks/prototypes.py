# SPDX-License-Identifier: Apache-2.0
"""Trains with 1, 2 and 4 top-1 prototypes at equal FLOPs, and compares held-out losses.

    python benchmarks/prototypes.py [--seeds 3] [--gin.X.y=VALUE ...]

The claim of M6-T (arXiv 2105.15082, section 3.3): where every expert takes as many
tokens whatever the number of prototypes k (capacity '1x'), k top-1 beats top-1. All
experts together then compute the same number of rows; k changes which, and how many
experts' results are added for a token.

Language models are trained on the shipped text by the trainer itself. Runs differ in k
and in the seed of weights and data; runs of one seed see the same batches. The loss is
measured on held-out text, in nats per byte, with the capacity of the training (equal
FLOPs there too) and without (every token reaches all its k experts, as in
`jaxmoe eval`). The last line is JSON; in it, by k:

  losses, dropless_losses    of each seed
  mean, dropless_mean        over the seeds
  spread, dropless_spread    largest less smallest
  dropped_fraction           of the assignments of the last step, mean over the seeds
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmoe import gin_config, warm_start
from jaxmoe.config_checks import check
from jaxmoe.evaluate import Evaluator
from jaxmoe.train_step import Setup
from jaxmoe.trainer import Trainer

PROTOTYPES = (1, 2, 4)
SIZES = (
    "Mesh.data=1",
    "Mesh.expert=1",
    "Mesh.pipe=1",
    "Model.num_layers=4",
    "Model.layer_pattern=moe",
    "Model.width=64",
    "Model.num_heads=4",
    "Model.ffn_width=128",
    "Model.sequence_length=64",
    "Model.num_patches=0",
    "Model.init_std=0.1",
    "MoE.router=prototype",
    "MoE.num_experts=16",
    "MoE.capacity_factor=1.25",
    "MoE.capacity_mode=1x",
    "MoE.group_tokens=2048",
    "Optimizer.learning_rate=0.003",
    "Data.source=text",
    "Data.batch_size=32",
    "Data.text_denoise_weight=0",
    "Data.lm_weight=1",
    "Train.steps=600",
    "Train.eval_batches=16",
    "Train.log_every=50",
    "Checkpoint.every_steps=0",
)


class SameCapacity(Setup):
    """A setup whose evaluation drops tokens as the training does."""

    def for_inference(self) -> Setup:
        return self


def main() -> None:
    _, overrides, rest = gin_config.split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args(rest).seeds
    changed = {binding.partition("=")[0].strip() for binding in overrides}
    bindings = [size for size in SIZES if size.partition("=")[0] not in changed]
    print("  k seed  with capacity  dropless  dropped", flush=True)
    figures = {}
    for k in PROTOTYPES:
        runs = []
        for seed in range(seeds):
            runs.append(run([*bindings, *overrides], k, seed))
            print(f"{k:3} {seed:4}  {runs[-1][0]:13.4f}  {runs[-1][1]:8.4f}", end="")
            print(f"  {runs[-1][2]:7.3f}", flush=True)
        losses, dropless, dropped = map(list, zip(*runs, strict=True))
        figures[k] = {
            **of_seeds("", losses),
            **of_seeds("dropless_", dropless),
            "dropped_fraction": statistics.mean(dropped),
        }
    print("\n  k  with capacity           dropless")
    print("     mean    spread          mean    spread")
    for k, found in figures.items():
        print(f"{k:3}  {found['mean']:.4f}  {found['spread']:.4f}", end="")
        print(f"          {found['dropless_mean']:.4f}  {found['dropless_spread']:.4f}")
    print(json.dumps(figures))


def of_seeds(name: str, losses: list[float]) -> dict[str, float | list[float]]:
    return {
        f"{name}losses": losses,
        f"{name}mean": statistics.mean(losses),
        f"{name}spread": max(losses) - min(losses),
    }


def run(bindings: list[str], k: int, seed: int) -> tuple[float, float, float]:
    """(held-out loss with capacity, without, dropped fraction) at the end of a run."""
    of_run = [f"MoE.top_k={k}", f"Train.seed={seed}", f"Data.seed={seed}"]
    loaded = gin_config.load((), [*bindings, *of_run])
    check(loaded.config)
    text = gin_config.to_gin(loaded.config, loaded.provenance)
    with tempfile.TemporaryDirectory() as folder:
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            trainer = Trainer(loaded.config, Path(folder), text)
            summary = trainer.run()
            setup = trainer.setup
            same = SameCapacity(loaded.config, setup.mesh, setup.vocab_size)
            weights = warm_start.load_weights(folder, setup.abstract_state)
        limited = Evaluator(same)(**weights).figures
    return (
        limited["eval_loss_lm"],
        summary["eval_loss_lm"],
        summary["dropped_fraction"],
    )


if __name__ == "__main__":
    main()
