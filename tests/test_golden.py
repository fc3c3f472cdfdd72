# SPDX-License-Identifier: Apache-2.0
"""The figures of a step, written down: no change alters them unnoticed."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import helpers

GOLDEN = Path(__file__).parent / "golden" / "step.json"
STEPS = 3

# Images only: the running text differs between versions of Python.
CONFIG = helpers.tiny_config(
    moe={"capacity_factor": 1.0, "balance_loss": 0.05, "z_loss": 0.01},
    data={"caption_weight": 0.6, "image_denoise_weight": 0.4}
    | {"text_denoise_weight": 0.0, "lm_weight": 0.0},
)


def figures() -> dict[str, float]:
    """What three AdamW steps of a tiny model report, on data 2 x expert 4, seed 0."""
    setup = helpers.setup_of(CONFIG, 2, 4)
    step = helpers.step_of(CONFIG, 2, 4)
    state = helpers.initial_state(CONFIG, 2, 4)
    for batch in helpers.batches(CONFIG, STEPS):
        state, metrics = step(state, setup.put_batch(batch))
        jax.block_until_ready(metrics)
    sums, stats = metrics.sums, metrics.stats
    assert stats is not None
    square = sum(float(np.square(x).sum()) for x in jax.tree.leaves(state.params))
    return {
        "loss": float(sums.nll.sum() / sums.tokens.sum()),
        "loss_caption": float(sums.nll[0] / sums.tokens[0]),
        "loss_image_denoise": float(sums.nll[1] / sums.tokens[1]),
        "target_tokens": float(sums.tokens.sum()),
        "grad_norm": float(metrics.grad_norm),
        "balance_loss": float(stats.balance_loss.sum()),
        "z_loss": float(stats.z_loss.sum()),
        "parameter_norm": square**0.5,
    }


def test_three_steps_report_what_they_did():
    """The step is the function of seed and data that it was.

    Within 1e-3: another machine may break a near tie of the router the other way.
    """
    golden = json.loads(GOLDEN.read_text("utf-8"))["figures"]
    now = figures()
    assert now == pytest.approx(golden, rel=1e-3), (
        "The figures of a step changed. If the change was meant to leave the numbers"
        " alone, this is a bug: find it. If it was meant to change them, run `python -m"
        ' tests.golden.regenerate --reason "..."` and say in the commit why they are'
        " better now."
    )
