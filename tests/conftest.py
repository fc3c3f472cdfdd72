# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: 8 CPU devices, or nothing is tested at all."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=30
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, f"the suite needs 8 CPU devices: {jax.devices()}"
