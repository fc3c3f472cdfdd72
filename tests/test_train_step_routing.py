# SPDX-License-Identifier: Apache-2.0
"""What routing must not depend on: the mesh and the number of microbatches."""

import jax
import numpy as np
import pytest

from tests import oracle
from tests.helpers import batches, changed, host, initial_state, step_of, tiny_config

TINY = tiny_config(
    model={"num_layers": 1, "layer_pattern": "moe"},
    moe={"group_tokens": 80, "sequence_balance_loss": 0.05},
)
RANDOM = changed(TINY, moe={"input_jitter": 0.2})
BALANCED = changed(TINY, moe={"router": "balanced", "z_loss": 0.01})


def first_step(config, data, expert, batch=None):
    """(state, metrics) after one step from the initial weights."""
    state = initial_state(config, data, expert)
    batch = batches(config)[0] if batch is None else batch
    return host(step_of(config, data, expert)(state, batch))


@pytest.mark.parametrize("config", [RANDOM, BALANCED], ids=["jitter", "balanced"])
def test_the_same_on_every_mesh_and_accumulation(config):
    """Random factors and dealt experts belong to the sequence, not to its device.

    One mesh after another, then the same sequences in two microbatches: counts are
    equal, losses, gradient norm and updates within 1e-5.
    """
    _, want = first_step(config, 4, 2)
    for data, expert in ((2, 4), (1, 1)):
        _, got = first_step(config, data, expert)
        np.testing.assert_array_equal(got.stats.load_E, want.stats.load_E)
        oracle.assert_close(got, want)
    parts = changed(config, train={"accumulation": 2})
    halves = jax.tree.map(
        lambda x: x.reshape(2, x.shape[1] // 2, *x.shape[2:]), batches(config)[0]
    )
    _, got = first_step(parts, 4, 2, halves)
    np.testing.assert_array_equal(got.stats.load_E, want.stats.load_E)
    oracle.assert_close(got, want)


def test_jitter_changes_with_the_step_and_the_layer_only():
    """Step 0 twice is bitwise the same; another step number gives another loss."""
    step, (batch,) = step_of(RANDOM, 4, 2), batches(RANDOM)
    _, one = host(step(initial_state(RANDOM, 4, 2), batch))
    _, again = host(step(initial_state(RANDOM, 4, 2), batch))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    later = initial_state(RANDOM, 4, 2)
    later = later.replace(step=later.step + 1)
    _, other = host(step(later, batch))
    assert not np.array_equal(one.sums.nll, other.sums.nll)


def test_balanced_is_even():
    """Every expert's load is the mean within the number of sequences."""
    _, metrics = first_step(BALANCED, 4, 2)
    load = metrics.stats.load_E[0]
    assert load.max() - load.min() <= BALANCED.data.batch_size
    assert load.max() / load.mean() < 1.1
