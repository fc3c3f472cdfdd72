# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The one table of XLA compiler options, by platform.

Training and ahead-of-time compilation read the same table, so that what is estimated
is what runs.
"""

from __future__ import annotations

COMPILER_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "tpu": {
        # An all-to-all gets a start and a done, so that the scheduler can put
        # computation between them; without it the exchange of tokens is synchronous.
        "xla_tpu_enable_async_all_to_all": "true",
        "xla_tpu_enable_async_ragged_all_to_all": "true",
        # Without it the scheduler leaves every fourth exchange of an F&B, and all of a
        # backward by itself, with nothing beside them (docs/aot.md has the figures).
        "xla_tpu_enable_all_experimental_scheduler_features": "true",
    },
    # Lets several exchanges be in flight at once.
    "gpu": {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
}


# Of a program that runs once and is small: on CPU LLVM would take several times as long
# to improve it as it runs. Of the initial state 5.2 seconds of processor time are 1.6.
_ONCE: dict[str, dict[str, str]] = {"cpu": {"xla_backend_optimization_level": "0"}}


def compiler_options(platform: str, *, once: bool = False) -> dict[str, str]:
    """The options for `platform` ('cpu', 'gpu' or 'tpu'), for `jax.jit`.

    Args:
      platform: of the devices.
      once: for what runs once, beside the steps.
    """
    return COMPILER_OPTIONS[platform] | (_ONCE.get(platform, {}) if once else {})
