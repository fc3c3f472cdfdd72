# SPDX-License-Identifier: Apache-2.0
"""The loss: sums over real tokens by task, and its parts with their divisors.

Legend: B sequences, S positions, V vocabulary, L MoE layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MoE
from jaxmoe.loss import LossSums, count_positive, loss_sums, total_loss
from jaxmoe.moe.router import MoEStats
from tests import oracle

V = 5
sums_of = jax.jit(loss_sums, static_argnums=3)


def example():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 4, V)).astype(np.float32)
    targets = rng.integers(0, V, (2, 4)).astype(np.int32)
    task = np.array([[0, 1, 1, 3], [0, 3, 0, 1]], np.int32)
    return logits, targets, task


def test_sums_equal_a_loop():
    """Per task: sum of log sum exp - logit of the target, targets, right guesses."""
    logits, targets, task = example()
    logits[0, 1, targets[0, 1]] = logits[1, 1, targets[1, 1]] = 9.0  # two are right
    nll, tokens, correct = np.zeros(3), np.zeros(3), np.zeros(3)
    for b, s in np.argwhere(task > 0):
        row, k = logits[b, s].astype(np.float64), task[b, s] - 1
        nll[k] += np.log(np.exp(row).sum()) - row[targets[b, s]]
        tokens[k] += 1
        correct[k] += row.argmax() == targets[b, s]
    got = sums_of(logits, targets, task, 3)
    np.testing.assert_allclose(got.nll, nll, rtol=1e-5)
    np.testing.assert_array_equal(got.tokens, [3, 0, 2])
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_array_equal(got.correct, correct)
    assert correct.sum() >= 2


def test_uniform_logits_give_log_v():
    """A model that knows nothing pays log V nats per token."""
    _, targets, task = example()
    got = sums_of(np.zeros((2, 4, V), np.float32), targets, task, 3)
    np.testing.assert_allclose(got.nll, np.log(V) * np.array([3, 0, 2]), rtol=1e-6)


def test_positions_without_target_add_nothing():
    """Sums and gradients do not depend on logits and targets where task is 0."""
    logits, targets, task = example()
    free = task == 0
    other = np.where(free[:, :, None], 1e4, logits).astype(np.float32)
    targets_other = np.where(free, V - 1, targets)

    @jax.jit
    def run(logits, targets):
        total = lambda x: jnp.sum(loss_sums(x, targets, task, 3).nll)  # noqa: E731
        return loss_sums(logits, targets, task, 3), jax.grad(total)(logits)

    one, two = run(logits, targets), run(other, targets_other)
    jax.tree.map(np.testing.assert_array_equal, one[0], two[0])
    assert not np.any(one[1][free])
    np.testing.assert_array_equal(one[1][~free], two[1][~free])


def test_sums_add_over_devices_and_microbatches():
    """The sums of a batch are the sums of its rows' sums: no mean of means."""
    logits, targets, task = example()
    whole = sums_of(logits, targets, task, 3)
    rows = [
        sums_of(logits[i : i + 1], targets[i : i + 1], task[i : i + 1], 3)
        for i in range(2)
    ]
    oracle.assert_close(jax.tree.map(jnp.add, *rows), whole)
    assert float(count_positive(jnp.asarray(task))) == 5.0
    assert float(count_positive(jnp.asarray(task)[None])) == 5.0


def stats(balance, z, sequence=(0.0, 0.0)):
    return MoEStats(
        load_E=jnp.zeros((2, 4), jnp.int32),
        dropped=jnp.zeros(2, jnp.int32),
        balance_loss=jnp.asarray(balance),
        sequence_loss=jnp.asarray(sequence),
        z_loss=jnp.asarray(z),
        entropy=jnp.zeros(2),
    )


def test_total_by_hand():
    """(2 + 4) / 12 + 0.1 (8 + 12) / 10 + 0.3 (1 + 3) / 5 + 0.01 (30 + 10) / 10

    = 0.5 + 0.2 + 0.24 + 0.04, over 2 layers, with 12 target tokens, 10 routing groups
    and 5 sequences in the whole step.
    """
    sums = LossSums(jnp.array([2.0, 4.0]), jnp.array([1.0, 2.0]), jnp.zeros(2))
    moe = MoE(balance_loss=0.1, sequence_balance_loss=0.3, z_loss=0.01)
    loss = total_loss(
        sums,
        stats([8.0, 12.0], [30.0, 10.0], [1.0, 3.0]),
        moe,
        target_tokens=jnp.float32(12),
        routing_groups=10,
        sequences=5,
    )
    assert float(loss) == pytest.approx(0.98, rel=1e-6)


def test_shares_of_devices_add_up():
    """With global divisors the shares of two halves sum to the loss of the whole."""
    moe = MoE(balance_loss=0.1, z_loss=0.01)
    divisors = {"target_tokens": jnp.float32(7), "routing_groups": 6, "sequences": 3}
    halves = [
        (
            LossSums(jnp.array([n]), jnp.array([n]), jnp.array([0.0])),
            stats([n, 2 * n], [n, 1.0]),
        )
        for n in (3.0, 4.0)
    ]
    parts = [total_loss(*half, moe, **divisors) for half in halves]
    whole = total_loss(*jax.tree.map(jnp.add, *halves), moe, **divisors)
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


def test_without_targets_or_layers():
    """No target token: 0, not NaN. No MoE layer: the cross-entropy alone."""
    sums = LossSums(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))
    divisors = {"target_tokens": jnp.float32(0), "routing_groups": 1, "sequences": 1}
    assert float(total_loss(sums, None, MoE(), **divisors)) == 0.0
    sums = LossSums(jnp.array([6.0]), jnp.array([3.0]), jnp.zeros(1))
    divisors = {"target_tokens": jnp.float32(3), "routing_groups": 1, "sequences": 1}
    assert float(total_loss(sums, None, MoE(), **divisors)) == 2.0
