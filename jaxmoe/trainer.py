# SPDX-License-Identifier: Apache-2.0
"""Floor 6. The training run: state in, steps, metrics, checkpoints, evaluation, out.

Metrics are read one step late: step n is dispatched before the figures of step n - 1
are fetched, so that the devices never wait for the host. On CPU this is also the limit
of what may be in flight: with many queued steps the simulated devices' collectives
time out.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmoe import config_changes, plots, rebalance, tree_names, warm_start
from jaxmoe import mesh as mesh_lib
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import Balancer, Config, ConfigError
from jaxmoe.data.loader import Loader
from jaxmoe.data.records import vocab_size
from jaxmoe.evaluate import EvaluationStopped, Evaluator
from jaxmoe.metrics import MetricsWriter, Progress
from jaxmoe.model import Batch, placement_of
from jaxmoe.nonfinite import FirstNonFinite
from jaxmoe.optim import updates_done
from jaxmoe.profile import Profile
from jaxmoe.step_log import Clock, RunError, StepLog, is_due
from jaxmoe.train_step import Setup, StepMetrics, TrainState

_BACKGROUND = "jaxmoe-start"  # name of the threads in which a run is made ready
SAMPLES = 3  # captions per language that are printed beside the truth


CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class Stopped(Exception):
    """A signal asked the run to stop; the state is saved: exit code 75."""


class _StopFlag:
    """Set by SIGTERM and SIGINT inside the `with`; looked at between steps, between
    the batches of an evaluation, and while the step compiles.

    Attributes:
      signal: Name of the signal, '' before one came.
    """

    def __init__(self):
        self.signal = ""

    def __enter__(self) -> _StopFlag:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._set) for number in numbers}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _set(self, number: int, _: Any) -> None:
        self.signal = signal.Signals(number).name

    def is_set(self) -> bool:
        """Whether a signal came."""
        return bool(self.signal)


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
        self.platform, self.sizes, self.setup = _start(config)
        self.loader = Loader(
            config.data,
            model=config.model,
            microbatches=self.setup.microbatches,
            rows=self.setup.local_rows(),
        )
        self.evaluator = Evaluator(self.setup)
        placed = placement_of(self.setup.abstract_state.buffers) is not None
        self.first_nonfinite = FirstNonFinite(self.setup)
        self.rebalancer = rebalance.Rebalancer(self.setup) if placed else None
        self.clock = Clock()
        self.compile_s = 0.0

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns what summary.json holds.

        Raises:
          RunError: if a loss or a gradient is not finite.
          DataError: if too many records are broken.
          Stopped: after a signal, with the state saved if there was a step.
        """
        config = self.config
        checkpoints = Checkpointer(
            self.workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            keep_best=config.checkpoint.keep_best,
            best_metric=config.checkpoint.best_metric,
            asynchronous=config.checkpoint.asynchronous,
        )
        with _StopFlag() as stop, checkpoints:
            newest = checkpoints.latest()
            left = config.train.steps - (newest or 0)
            if left <= 0 and (self.workdir / "summary.json").is_file():
                print(f"{self.workdir} has all {newest} steps already: nothing to do.")
                return {}
            # What can be the user's mistake comes first; then what is on disk changes.
            make_state = self._first_state(checkpoints, newest)
            (self.workdir / "config.gin").write_text(self.config_text, "utf-8")
            # While the step compiles, the first state is made or restored.
            compiling = _in_background(self._compile) if left > 0 else None
            state = _result(_in_background(make_state), stop)
            train_step = _result(compiling, stop) if compiling else None
            notes = checkpoints.extra(newest) if newest is not None else {}
            with (
                MetricsWriter(self.workdir, resume_step=newest or 0) as writer,
                Progress(config.train.steps, newest or 0) as progress,
                Profile(config.train, self.workdir, progress.message) as profile,
            ):
                self.loader.report = progress.message
                log = StepLog(
                    config,
                    writer,
                    progress,
                    self.clock,
                    skipped=int(state.step) - updates_done(state.optimizer),
                    losses=notes.get("losses", ()),
                    of_data=self.loader.figures,
                )
                if train_step:
                    train_step = profile.around(train_step)
                    state = self._steps(train_step, state, checkpoints, log, stop)
                checkpoints.wait()
                summary = self._finish(state, log, writer, stop)
        plots.write_plots(self.workdir)
        return summary

    def _first_state(
        self, checkpoints: Checkpointer, newest: int | None
    ) -> Callable[[], TrainState]:
        """What makes the state where the run goes on, or begins.

        Raises:
          ConfigError: if that state is not for this model, optimizer or data; nothing
            is compiled before.
        """
        abstract = self.setup.abstract_state
        if newest is None:
            run = self.config.train.init_from
            weights = warm_start.load_weights(run, abstract) if run else {}
            return lambda: warm_start.with_weights(self.setup.initial_state(), weights)
        changes = config_changes.changes(
            checkpoints.config_text(newest), self.config_text
        )
        for change in changes:
            print(f"since step {newest}: {change} ({change.consequence})", flush=True)
        abstract, leaves = rebalance.of_checkpoint(abstract, checkpoints.leaves(newest))
        try:
            if tree_names.differences(leaves, abstract):
                checkpoints.restore(newest, abstract)  # raises, a line for each
            self.loader.restore(checkpoints.extra(newest)["data"])
        except ConfigError as error:
            raise config_changes.with_changes(error, changes) from None
        config_changes.refuse_another_model(newest, changes)
        print(f"going on from step {newest} of {self.workdir}", flush=True)

        def restore() -> TrainState:
            state = checkpoints.restore(newest, abstract, partial=True)
            return self.rebalancer.restored(state) if self.rebalancer else state

        return restore

    def _steps(
        self,
        train_step: CompiledStep,
        state: TrainState,
        checkpoints: Checkpointer,
        log: StepLog,
        stop: _StopFlag,
    ) -> TrainState:
        """All steps that are left; `state` is given up to them."""
        train = self.config.train
        batch = self._next_batch()
        self.clock.restart()
        last: tuple[int, StepMetrics, Batch] | None = None  # not recorded yet
        for step in range(int(state.step) + 1, train.steps + 1):
            state, metrics = train_step(state, batch)
            if last:  # the figures of the step before, as this one runs
                self._record(log, last, state)
            last = step, metrics, batch
            if self.rebalancer and is_due(step, 0, self.config.balancer.interval):
                state, report = self.rebalancer(state)
                log.rebalanced(step, report)
            saves = is_due(step, train.steps, self.config.checkpoint.every_steps)
            if step < train.steps and is_due(step, 0, train.eval_every):
                self._record(log, last, state, partial(self._figures, state, stop))
                last = None
            stopped_by = stop.signal  # once: it may come at any moment
            if saves or stopped_by:
                if last:
                    self._record(log, last, state)
                    last = None
                self._save(step, state, checkpoints, log)
            if step == train.steps:
                break
            if stopped_by:
                checkpoints.wait()
                raise Stopped(
                    f"stopped by {stopped_by} after step {step} of {train.steps},"
                    f" saved in {self.workdir}; the same command goes on"
                )
            with self.clock.host():
                batch = self._next_batch()
        return state

    def _record(
        self,
        log: StepLog,
        done: tuple[int, StepMetrics, Batch],
        state: TrainState,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Ends a step; if it was not finite, it is made again in the newest state."""
        step, metrics, batch = done
        first = partial(self.first_nonfinite, step=step, state=state, batch=batch)
        log.record(step, metrics, first, evaluate)

    def _save(
        self, step: int, state: TrainState, checkpoints: Checkpointer, log: StepLog
    ) -> None:
        """Saves the state after a step of which the figures are known to be finite."""
        if name := self.first_nonfinite.of_state(state):
            raise RunError(
                f"step {step}: {name} is not finite after the update. A state must be"
                " finite. It was not saved; lower Optimizer.learning_rate."
            )
        notes = {
            "data": self.loader.state(),
            "losses": list(log.spikes.window),
            "figures": log.figures,
        }
        saved = self.rebalancer.to_logical(state) if self.rebalancer else state
        checkpoints.save(step, saved, notes, self.config_text)

    def _compile(self) -> CompiledStep:
        before_s = time.perf_counter()
        compiled = self.setup.traced_step().lower().compile()
        self.compile_s = time.perf_counter() - before_s
        return compiled

    def _next_batch(self) -> Any:
        return self.setup.put_batch(next(self.loader))

    def _figures(self, state: TrainState, stop: _StopFlag) -> Mapping[str, float]:
        """Of an evaluation; none if a signal ended it."""
        try:
            return self.evaluator(state.params, state.buffers, stop.is_set).figures
        except EvaluationStopped:
            return {}

    def _finish(
        self, state: TrainState, log: StepLog, writer: MetricsWriter, stop: _StopFlag
    ) -> dict[str, Any]:
        """Evaluates, prints captions beside the truth, writes summary.json."""
        try:
            evaluation = self.evaluator(state.params, state.buffers, stop.is_set)
        except EvaluationStopped:
            raise Stopped(
                f"stopped by {stop.signal} in the last evaluation, all steps saved in"
                f" {self.workdir}; the same command evaluates"
            ) from None
        figures, captions = evaluation
        if captions:
            print("\ncaptions of held-out images, written token by token:")
            for language in dict.fromkeys(caption.language for caption in captions):
                of_language = [c for c in captions if c.language == language]
                for caption in of_language[:SAMPLES]:
                    print(f"  truth {caption.truth!r:24} model {caption.generated!r}")
        summary = {
            "step": int(state.step),
            **log.last,
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


def _in_background(function: Callable[[], Any]) -> Future:
    """Runs a function in a thread that does not keep the process alive."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=_BACKGROUND, daemon=True).start()
    return future


def is_compiling() -> bool:
    """Whether a run that was stopped has left something behind that still works."""
    return any(thread.name == _BACKGROUND for thread in threading.enumerate())


def _result(future: Future, stop: _StopFlag) -> Any:
    """What comes out of a thread, unless a signal comes first."""
    while not future.done() and not stop.signal:
        wait([future], timeout=0.1)
    if stop.signal:
        raise Stopped(f"stopped by {stop.signal} before a step was made")
    return future.result()


def _start(config: Config) -> tuple[str, mesh_lib.Sizes, Setup]:
    """Platform, mesh sizes and setup for the devices that are here."""
    platform = mesh_lib.start_backend(config.mesh)
    sizes = mesh_lib.resolve_sizes(config, jax.device_count())
    mesh = mesh_lib.make_mesh(sizes)
    return platform, sizes, Setup(config, mesh, vocab_size(config.data, config.model))


def evaluate_run(config: Config, workdir: Path) -> dict[str, float]:
    """Evaluates the newest complete checkpoint of a run, on the devices that are here.

    Raises:
      ConfigError: if there is none, or it does not fit the configuration.
    """
    # Saved weights are in logical order: every expert in its own slot.
    _, _, setup = _start(dataclasses.replace(config, balancer=Balancer()))
    weights = warm_start.load_weights(str(workdir), setup.abstract_state)
    return Evaluator(setup)(**weights).figures
