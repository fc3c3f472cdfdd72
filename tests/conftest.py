# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: 8 CPU devices, or nothing is tested at all."""

import functools
import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What was compiled once is found again: by later tests, by the processes that they
# start, by the next run. `pytest --cache-clear` forgets it.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "xla"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import hypothesis
import jax
import pytest

from jaxmoe import plots
from tests import traces

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=30
)
hypothesis.settings.load_profile("suite")

MOST_MAPS = 30_000


@pytest.fixture(scope="module")
def no_plots():
    """Runs draw nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "write_plots", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, f"the suite needs 8 CPU devices: {jax.devices()}"


@pytest.fixture
def write_trace(tmp_path):
    """Writes a trace into the folder of a test and returns its path."""
    return functools.partial(traces.write, tmp_path)


@pytest.fixture(autouse=True)
def memory_maps():
    """Lets compiled programs go before there are too many of them in one process.

    Each one is mapped into memory piece by piece, and Linux allows a process 65,530
    pieces; past them the compiler aborts, without a word.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        for cache in gc.get_objects():
            if isinstance(cache, functools._lru_cache_wrapper):
                module = getattr(cache, "__module__", None) or ""
                if module.split(".")[0] == "tests":
                    cache.cache_clear()
        jax.clear_caches()
        gc.collect()
