# SPDX-License-Identifier: Apache-2.0
"""Floor 6. What is kept of each step: its time, and its figures when they are due."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxmoe import config_derived
from jaxmoe.config import Config
from jaxmoe.data.tasks import TASKS
from jaxmoe.metrics import (
    MetricsWriter,
    Progress,
    load_statistics,
    load_statistics_by_layer,
)
from jaxmoe.nonfinite import SpikeRule, is_finite
from jaxmoe.optim import learning_rate
from jaxmoe.rebalance import Report
from jaxmoe.train_step import StepMetrics

MOST_SKIPPED = 10  # steps in a row; after that the run stops


class RunError(RuntimeError):
    """The run cannot go on: exit code 1."""


class Clock:
    """Seconds from the end of one step to the end of the next.

    Attributes:
      seconds: of each step.
      host_seconds: the part of each in which the host prepared the batch and wrote
        logs. Dispatching is not counted: on CPU it does the step's own work.
    """

    def __init__(self):
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.restart()

    def restart(self) -> None:
        self._last_s, self._host_s = time.perf_counter(), 0.0

    def wait(self, metrics: StepMetrics) -> StepMetrics:
        """Fetches the figures of a step, which ends it."""
        fetched = jax.device_get(metrics)
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._last_s)
        self.host_seconds.append(self._host_s)
        self._last_s, self._host_s = now_s, 0.0
        return fetched

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """Counts what happens inside as work of the host.

        In seconds of this thread on a processor: the step runs meanwhile, and where
        its devices are simulated it takes the processors from the host.
        """
        before_s = time.thread_time()
        yield
        self._host_s += time.thread_time() - before_s

    def summary(self) -> dict[str, float]:
        """Medians: seconds of a step, and the host's share of them."""
        if not self.seconds:
            return {}
        step_s = float(np.median(self.seconds))
        return {
            "step_s": step_s,
            "host_share": float(np.median(self.host_seconds)) / step_s,
        }


class StepLog:
    """Waits for steps, checks them, and writes their figures where they are due.

    Args:
      config, writer, progress, clock: of the run.
      expert_devices: along `expert`, which hold equal parts of the experts unless a
        balancer places them.
      skipped: steps up to now whose update was left out.
      losses: the last losses before, see `SpikeRule`.
      of_data: gives figures of the data, to be written beside the others.

    Attributes:
      last: the newest figures that were written, but for lists.
      figures: loss and evaluation of the newest step, those that are finite.
      spikes: the rule by which a loss is a spike.
    """

    def __init__(
        self,
        config: Config,
        writer: MetricsWriter,
        progress: Progress,
        clock: Clock,
        *,
        expert_devices: int,
        skipped: int = 0,
        losses: Iterable[float] = (),
        of_data: Callable[[], dict[str, float]] = dict,
    ):
        self._of_data = of_data
        self._config, self._writer, self._progress = config, writer, progress
        self._clock, self._expert_devices = clock, expert_devices
        self.last: dict[str, float] = {}
        self._notes: dict[str, Any] = {}
        self._rate = learning_rate(config.optimizer, config.train.steps)
        self._skipped, self._skipped_in_a_row = skipped, 0
        self.spikes = SpikeRule(losses)
        self.figures: dict[str, float] = {}

    def record(
        self,
        step: int,
        metrics: StepMetrics,
        first_nonfinite: Callable[[StepMetrics], str],
        evaluate: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Ends a step.

        Args:
          step: Updates done with it.
          metrics: Of this step; waits until they are there.
          first_nonfinite: Says what was not finite first, if something was not.
          evaluate: Gives figures of an evaluation to be written beside them.

        Raises:
          RunError: if the loss or the gradient is not finite, unless that is skipped.
        """
        metrics = self._clock.wait(metrics)
        nll, tokens = metrics.sums.nll, metrics.sums.tokens
        loss = float(nll.sum() / max(tokens.sum(), 1.0))
        skipped, rate = not is_finite(metrics), self._rate(step - 1 - self._skipped)
        if skipped:
            self._skip(step, loss, metrics, first_nonfinite(metrics))
        self.figures = {} if skipped else {"loss": loss}
        with self._clock.host():
            self._progress.step(step)
            spike = None if skipped else self._spike(step, loss)
            train = self._config.train
            due = step == 1 or is_due(step, train.steps, train.log_every)
            if not (due or skipped or spike or evaluate):
                return
            values = self._values(loss, float(np.asarray(rate)), metrics)
            values |= self._of_data() | self._notes | (spike or {})
            self._notes = {}
        if evaluate:
            evaluation = evaluate()
            values |= evaluation
            finite = {k: v for k, v in evaluation.items() if math.isfinite(v)}
            self.figures |= finite
            self._clock.restart()
        self.last = {k: v for k, v in values.items() if not isinstance(v, list)}
        with self._clock.host():
            self._writer.write(step, values)
            self._progress.log(step, values)

    def _skip(self, step: int, loss: float, metrics: StepMetrics, first: str) -> None:
        """Counts a step without an update, or ends the run."""
        fact = (
            f"step {step}: loss {loss}, gradient norm {float(metrics.grad_norm)}. The"
            f" first that was not finite: {first}."
        )
        self._skipped += 1
        self._skipped_in_a_row += 1
        if self._config.train.nonfinite == "stop":
            remedy = "lower Optimizer.learning_rate or set Optimizer.clip_norm"
        elif metrics.nonfinite[0].any():
            remedy = "no step can be made with such parameters"
        elif self._skipped_in_a_row >= MOST_SKIPPED:
            remedy = f"{MOST_SKIPPED} steps in a row were skipped"
        else:
            self._progress.message(f"{fact} Its update was skipped.")
            return
        raise RunError(
            f"{fact} Both must be finite. Nothing of this step was saved; {remedy}."
        )

    def _spike(self, step: int, loss: float) -> dict[str, float] | None:
        """Tells a spike of the loss."""
        self._skipped_in_a_row = 0
        median = self.spikes(loss)
        if median is None:
            return None
        self._progress.message(
            f"step {step}: the loss {loss:.4f} is a spike; the median of the steps"
            f" before is {median:.4f}"
        )
        return {"loss_spike": loss - median}

    def tell(self, text: str) -> None:
        """Prints a line."""
        self._progress.message(text)

    def rebalanced(self, step: int, report: Report) -> None:
        """Notes what a rebalance did, for the next line that is written; waits for it.

        On simulated devices too much in flight would make collectives time out.
        """
        report = jax.device_get(report)
        self._notes = {
            "rebalance_step": step,
            "rebalance_before": float(report.before_L.max()),
            "rebalance_after": float(report.after_L.max()),
            "rebalance_copies": int(report.copies),
            "rebalance_owners": int(report.owners),
            "rebalance_rounds": int(report.rounds),
            "rebalance_bytes": float(report.moved_bytes),
            "rebalance_refused": int(report.refused),
        }

    def _values(self, loss: float, rate: float, metrics: StepMetrics) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        config, sums = self._config, metrics.sums
        step_s = self._clock.seconds[-1]
        positions = config.data.batch_size * config.model.sequence_length
        values: dict[str, Any] = {
            "loss": loss,
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": rate,
            "step_s": step_s,
            "tokens_per_s": positions / step_s,
            "padding_fraction": float(metrics.padding_fraction),
        }
        if config.train.nonfinite == "skip":
            values["skipped_steps"] = self._skipped
        for task, nll, tokens in zip(TASKS, sums.nll, sums.tokens, strict=True):
            if tokens:
                values[f"loss_{task}"] = float(nll / tokens)
        stats = metrics.stats
        if stats is not None:
            load_LE = np.asarray(stats.load_E)
            groups = positions // config_derived.group_tokens(config.model, config.moe)
            values["balance_loss"] = float(stats.balance_loss.mean() / groups)
            values["sequence_balance_loss"] = float(
                stats.sequence_loss.mean() / config.data.batch_size
            )
            values["z_loss"] = float(stats.z_loss.mean() / groups)
            values |= load_statistics(load_LE)
            values |= load_statistics_by_layer(load_LE)
            chosen_L = np.maximum(load_LE.sum(axis=1), 1)
            values["dropped_fraction"] = float(stats.dropped.sum() / chosen_L.sum())
            values["dropped_fraction_by_layer"] = (stats.dropped / chosen_L).tolist()
            tokens_L = chosen_L / config.moe.top_k
            entropy_L = stats.entropy / tokens_L
            values["router_entropy"] = float(entropy_L.mean())
            values["router_entropy_by_layer"] = entropy_L.tolist()
            values["expert_load"] = load_LE.tolist()
        if (load_LX := self._device_load(metrics)) is not None:
            balance = load_statistics(load_LX)["load_max_over_mean"]
            values["device_load_max_over_mean"] = balance
            values["device_load"] = load_LX.tolist()
        return values

    def _device_load(self, metrics: StepMetrics) -> np.ndarray | None:
        """Tokens per MoE layer and device along `expert`; None where it is one."""
        if metrics.device_load_LX is not None:
            return np.asarray(metrics.device_load_LX)
        if metrics.stats is None or self._expert_devices == 1:
            return None
        load_LE = np.asarray(metrics.stats.load_E)
        return load_LE.reshape(len(load_LE), self._expert_devices, -1).sum(-1)


def is_due(step: int, last: int, every: int) -> bool:
    """Whether something is due at a step: at the last, and every so many (0: never)."""
    return step == last or (bool(every) and step % every == 0)
