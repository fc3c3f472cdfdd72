# SPDX-License-Identifier: Apache-2.0
"""Floor 6. The training run: state in, steps, metrics, checkpoints, evaluation, out.

Metrics are read one step late: step n is dispatched before the figures of step n - 1
are fetched, so that the devices never wait for the host. On CPU this is also the limit
of what may be in flight: with many queued steps the simulated devices' collectives
time out.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe import config as config_lib
from jaxmoe import mesh as mesh_lib
from jaxmoe import plots, warm_start
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import Config
from jaxmoe.data.loader import Loader
from jaxmoe.data.records import vocab_size
from jaxmoe.data.tasks import TASKS
from jaxmoe.evaluate import Evaluation, Evaluator
from jaxmoe.metrics import MetricsWriter, Progress, load_statistics
from jaxmoe.optim import learning_rate
from jaxmoe.train_step import Setup, StepMetrics, TrainState

SAMPLES = 3  # captions per language that are printed beside the truth


class RunError(RuntimeError):
    """The run cannot go on: exit code 1."""


class Stopped(Exception):
    """A signal asked the run to stop; the state is saved: exit code 75."""


@dataclasses.dataclass
class _StopFlag:
    """Set by SIGTERM and SIGINT; looked at between steps."""

    signal: str = ""

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, _: Any) -> None:
        self.signal = signal.Signals(number).name


class _Clock:
    """Seconds from the end of one step to the end of the next.

    Attributes:
      seconds: of each step.
      host_seconds: the part of each in which the host worked instead of waiting.
    """

    def __init__(self):
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.restart()

    def restart(self) -> None:
        self._last_s = time.perf_counter()

    def wait(self, metrics: StepMetrics) -> StepMetrics:
        """Fetches the figures of a step, which ends it."""
        before_s = time.perf_counter()
        fetched = jax.device_get(metrics)
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._last_s)
        self.host_seconds.append(before_s - self._last_s)
        self._last_s = now_s
        return fetched

    def summary(self) -> dict[str, float]:
        """Medians: seconds of a step, and the host's share of them."""
        if not self.seconds:
            return {}
        step_s = float(np.median(self.seconds))
        return {
            "step_s": step_s,
            "host_share": float(np.median(self.host_seconds)) / step_s,
        }


def _is_due(step: int, last: int, every: int) -> bool:
    """Whether something is due at a step: at the last, and every so many (0: never)."""
    return step == last or (bool(every) and step % every == 0)


class Trainer:
    """One run in one folder.

    Args:
      config: Checked configuration.
      workdir: The run folder; a run found there goes on.
      config_text: The resolved configuration, written to config.gin.

    Raises:
      ConfigError: for what does not fit the devices or the data, before anything is
        compiled or written.
    """

    def __init__(self, config: Config, workdir: Path, config_text: str):
        self.config, self.workdir, self.config_text = config, workdir, config_text
        self.started_s = time.monotonic()
        if config.train.compilation_cache:
            cache = str(Path(config.train.compilation_cache).absolute())
            jax.config.update("jax_compilation_cache_dir", cache)
        self.platform = mesh_lib.start_backend(config.mesh)
        self.sizes = mesh_lib.resolve_sizes(config, jax.device_count())
        mesh = mesh_lib.make_mesh(self.sizes)
        self.setup = Setup(config, mesh, vocab_size(config.data, config.model))
        self.loader = Loader(
            config.data,
            model=config.model,
            microbatches=config.train.accumulation,
            rows=self.setup.local_rows(),
        )
        self.rate = learning_rate(config.optimizer, config.train.steps)
        self.evaluator = Evaluator(self.setup)
        self.clock = _Clock()
        self.compile_s = 0.0

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns what summary.json holds.

        Raises:
          RunError: if the loss is not finite.
          Stopped: after a signal, with the state saved.
        """
        stop = _StopFlag()
        stop.install()
        config = self.config
        checkpoints = Checkpointer(
            self.workdir / "checkpoints",
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        with checkpoints:
            state = self._first_state(checkpoints)
            first = int(state.step)
            if (
                first >= config.train.steps
                and (self.workdir / "summary.json").is_file()
            ):
                print(f"{self.workdir} has all {first} steps already: nothing to do.")
                return {}
            (self.workdir / "config.gin").write_text(self.config_text, "utf-8")
            with (
                MetricsWriter(self.workdir, resume_step=first) as writer,
                Progress(config.train.steps, first) as progress,
            ):
                state = self._steps(state, checkpoints, writer, progress, stop)
                checkpoints.wait()
                summary = self._finish(state, writer)
        plots.write_plots(self.workdir)
        return summary

    def _first_state(self, checkpoints: Checkpointer) -> TrainState:
        """Where the run goes on, or begins."""
        newest = checkpoints.latest()
        if newest is not None:
            state = checkpoints.restore(newest, self.setup.abstract_state)
            self.loader.restore(checkpoints.extra(newest)["data"])
            print(f"going on from step {newest} of {self.workdir}", flush=True)
            return state
        state = self.setup.initial_state()
        if run := self.config.train.init_from:
            weights = warm_start.load_weights(run, self.setup.abstract_state)
            state = dataclasses.replace(state, **weights)
        return state

    def _steps(
        self,
        state: TrainState,
        checkpoints: Checkpointer,
        writer: MetricsWriter,
        progress: Progress,
        stop: _StopFlag,
    ) -> TrainState:
        """All steps that are left; `state` is given up to them."""
        first, total = int(state.step), self.config.train.steps
        if first >= total:
            return state
        batch = self._next_batch()
        before_s = time.perf_counter()
        train_step = self.setup.train_step().lower(state, batch).compile()
        self.compile_s = time.perf_counter() - before_s
        clock = self.clock
        clock.restart()
        previous: StepMetrics | None = None
        for step in range(first + 1, total + 1):
            state, metrics = train_step(state, batch)
            if previous is not None:  # the figures of the step before, as this one runs
                self._record(step - 1, previous, clock, writer, progress)
            previous = metrics
            saves = _is_due(step, total, self.config.checkpoint.every_steps)
            evaluates = step < total and _is_due(step, 0, self.config.train.eval_every)
            if saves or evaluates or stop.signal:
                evaluated = state if evaluates else None
                self._record(step, metrics, clock, writer, progress, evaluated)
                previous = None
            if saves or stop.signal:
                notes = {"data": self.loader.state()}
                checkpoints.save(step, state, notes, self.config_text)
            if stop.signal and step < total:
                checkpoints.wait()
                raise Stopped(
                    f"stopped by {stop.signal} after step {step} of {total}, saved in"
                    f" {self.workdir}; the same command goes on"
                )
            if step < total:
                batch = self._next_batch()
        return state

    def _next_batch(self) -> Any:
        return self.setup.put_batch(next(self.loader))

    def _record(
        self,
        step: int,
        metrics: StepMetrics,
        clock: _Clock,
        writer: MetricsWriter,
        progress: Progress,
        evaluated: TrainState | None = None,
    ) -> None:
        """Waits for a step, checks and logs it; evaluates `evaluated` if given."""
        metrics = clock.wait(metrics)
        nll, tokens = metrics.sums.nll, metrics.sums.tokens
        loss = float(nll.sum() / max(tokens.sum(), 1.0))
        if not (math.isfinite(loss) and math.isfinite(float(metrics.grad_norm))):
            raise RunError(
                f"step {step}: loss {loss}, gradient norm {float(metrics.grad_norm)}."
                " Both must be finite. Nothing of this step was saved; lower"
                " Optimizer.learning_rate or set Optimizer.clip_norm."
            )
        progress.step(step)
        every = self.config.train.log_every
        if evaluated or step == 1 or _is_due(step, self.config.train.steps, every):
            values = self._values(step, loss, metrics, clock.seconds[-1])
            if evaluated:
                values |= self._evaluate(evaluated).figures
                clock.restart()
            writer.write(step, values)
            progress.log(step, values)

    def _values(
        self, step: int, loss: float, metrics: StepMetrics, step_s: float
    ) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        config, sums = self.config, metrics.sums
        positions = config.data.batch_size * config.model.sequence_length
        values = {
            "loss": loss,
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(np.asarray(self.rate(step - 1))),
            "step_s": step_s,
            "tokens_per_s": positions / step_s,
        }
        for task, nll, tokens in zip(TASKS, sums.nll, sums.tokens, strict=True):
            if tokens:
                values[f"loss_{task}"] = float(nll / tokens)
        stats = metrics.stats
        if stats is not None:
            load_LE = np.asarray(stats.load_E)
            groups = positions // config_lib.group_tokens(config.model, config.moe)
            values["balance_loss"] = float(stats.balance_loss.mean() / groups)
            values["z_loss"] = float(stats.z_loss.mean() / groups)
            values |= load_statistics(load_LE)
            values["dropped_fraction"] = float(
                stats.dropped.sum() / max(load_LE.sum(), 1)
            )
            values["expert_load"] = load_LE.tolist()
        return values

    def _evaluate(self, state: TrainState) -> Evaluation:
        return self.evaluator(state.params, state.buffers)

    def _finish(self, state: TrainState, writer: MetricsWriter) -> dict[str, Any]:
        """Evaluates, prints captions beside the truth, writes summary.json."""
        figures, captions = self._evaluate(state)
        if captions:
            print("\ncaptions of held-out images, written token by token:")
            for language in dict.fromkeys(caption.language for caption in captions):
                of_language = [c for c in captions if c.language == language]
                for caption in of_language[:SAMPLES]:
                    print(f"  truth {caption.truth!r:24} model {caption.generated!r}")
        summary = {
            "step": int(state.step),
            **figures,
            "mesh": str(self.sizes),
            "platform": self.platform,
            "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
            "compile_s": self.compile_s,
            **self.clock.summary(),
            "run_s": time.monotonic() - self.started_s,
        }
        writer.summary(summary)
        return summary


def evaluate_run(config: Config, workdir: Path) -> dict[str, float]:
    """Evaluates the newest complete checkpoint of a run, on the devices that are here.

    Raises:
      ConfigError: if there is none, or it does not fit the configuration.
    """
    mesh_lib.start_backend(config.mesh)
    sizes = mesh_lib.resolve_sizes(config, jax.device_count())
    vocab = vocab_size(config.data, config.model)
    setup = Setup(config, mesh_lib.make_mesh(sizes), vocab)
    weights = warm_start.load_weights(str(workdir), setup.abstract_state)
    return Evaluator(setup)(**weights).figures
