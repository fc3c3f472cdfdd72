# SPDX-License-Identifier: Apache-2.0
"""Floor 6. The training run: state in, steps, metrics, checkpoints, evaluation, out.

Metrics are read one step late: step n is dispatched before the figures of step n - 1
are fetched, so that the devices never wait for the host. On CPU this is also the limit
of what may be in flight: with many queued steps the simulated devices' collectives
time out.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmoe import config_changes, plots, processes, rebalance, tree_names, warm_start
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
from jaxmoe.pipeline.simulate import Timeline, of_config, simulate
from jaxmoe.profile import Profile
from jaxmoe.step_log import Clock, RunError, StepLog, is_due
from jaxmoe.stop import StopFlag
from jaxmoe.train_step import Setup, StepMetrics, TrainState
from jaxmoe.watchdog import Watchdog

_BACKGROUND = "jaxmoe-start"  # name of the threads in which a run is made ready
SAMPLES = 3  # captions per language that are printed beside the truth


CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class Stopped(Exception):
    """A signal asked the run to stop; the state is saved: exit code 75."""


class Trainer:
    """One run in one folder.

    Args:
      config: Checked configuration.
      workdir: The run folder; a run found there goes on.
      config_text: The resolved configuration, written to config.gin.

    Raises:
      ConfigError: for what does not fit the devices or the data, or differs between the
        processes, before anything is compiled or written.
      StartError: if not all processes came.
    """

    def __init__(self, config: Config, workdir: Path, config_text: str):
        self.config, self.workdir, self.config_text = config, workdir, config_text
        self.started_s = time.monotonic()
        if config.train.compilation_cache:
            cache = str(Path(config.train.compilation_cache).absolute())
            jax.config.update("jax_compilation_cache_dir", cache)
        self.platform, self.sizes, self.setup = _start(
            config, {"--workdir": str(workdir)}
        )
        self.loader = processes.together(self._make_loader)
        stream = self.loader.state()["fingerprint"]
        processes.compare({name: repr(value) for name, value in stream.items()})
        self.evaluator = Evaluator(self.setup)
        placed = placement_of(self.setup.abstract_state.buffers) is not None
        self.first_nonfinite = FirstNonFinite(self.setup)
        self.rebalancer = rebalance.Rebalancer(self.setup) if placed else None
        self.clock = Clock()
        self.watchdog = Watchdog(config.train.watchdog_s, processes.name())
        self.compile_s = 0.0

    def _make_loader(self) -> Loader:
        return Loader(
            self.config.data,
            model=self.config.model,
            microbatches=self.setup.microbatches,
            rows=self.setup.local_rows(),
        )

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns what summary.json holds.

        Raises:
          RunError: if a loss or a gradient is not finite.
          DataError: if too many records are broken.
          Stopped: after a signal, with the state saved if there was a step.
        """
        config, first = self.config, processes.is_first()
        processes.check_shared(self.workdir)
        checkpoints = Checkpointer(
            self.workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            keep_best=config.checkpoint.keep_best,
            best_metric=config.checkpoint.best_metric,
            asynchronous=config.checkpoint.asynchronous,
        )
        with StopFlag() as stop, checkpoints, processes.failing_together():
            newest = checkpoints.latest()
            left = config.train.steps - (newest or 0)
            if left <= 0 and (self.workdir / "summary.json").is_file():
                print(f"{self.workdir} has all {newest} steps already: nothing to do.")
                return {}
            # What can be the user's mistake comes first; then what is on disk changes.
            make_state = self._first_state(checkpoints, newest)
            if first:
                (self.workdir / "config.gin").write_text(self.config_text, "utf-8")
            compiling = None
            if left > 0:
                # First and with nothing beside it: Python does one thing at a time, and
                # the compiler should not wait for it.
                lowered = _result(_in_background(self._lower), stop)
                compiling = _in_background(partial(self._compile, lowered))
            # While the step compiles, the first state is made or restored.
            state = _result(_in_background(make_state), stop)
            train_step = _result(compiling, stop) if compiling else None
            processes.wait_until_ready()
            notes = checkpoints.extra(newest) if newest is not None else {}
            with (
                MetricsWriter(
                    self.workdir, resume_step=newest or 0, active=first
                ) as writer,
                Progress(config.train.steps, newest or 0, active=first) as progress,
                Profile(
                    config.train, self.workdir, progress.message, active=first
                ) as profile,
                self.watchdog,
            ):
                self.loader.report = progress.message if first else _warn
                log = StepLog(
                    config,
                    writer,
                    progress,
                    self.clock,
                    expert_devices=self.sizes.expert,
                    skipped=int(state.step) - updates_done(state.optimizer),
                    losses=notes.get("losses", ()),
                    of_data=self.loader.figures,
                )
                if train_step:
                    train_step = profile.around(train_step)
                    state = self._steps(train_step, state, checkpoints, log, stop)
                checkpoints.wait()
                summary = self._finish(state, log, writer, stop)
        if first:
            plots.write_plots(self.workdir, _timeline(config, self.sizes.pipe))
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
        stop: StopFlag,
    ) -> TrainState:
        """All steps that are left, or as many as the data has; `state` is given up."""
        train = self.config.train
        batch, first = self._next_batch(), int(state.step) + 1
        self.clock.restart()
        last: tuple[int, StepMetrics, Batch] | None = None  # not recorded yet
        for step in range(first, train.steps + 1):
            if batch is None:
                if last:
                    self._record(log, last, state)
                if step > first:
                    self._save(step - 1, state, checkpoints, log)
                log.tell(f"the data ended after step {step - 1} of {train.steps}")
                break
            state, metrics = train_step(state, batch)
            if last:  # the figures of the step before, as this one runs
                self._record(log, last, state)
            self.watchdog.beat(f"step {step - 1}")
            last = step, metrics, batch
            if self.rebalancer and is_due(step, 0, self.config.balancer.interval):
                state, report = self.rebalancer(state)
                log.rebalanced(step, report)
            saves = is_due(step, train.steps, self.config.checkpoint.every_steps)
            if step < train.steps and is_due(step, 0, train.eval_every):
                self._record(log, last, state, partial(self._figures, state, stop))
                last = None
            stopped_by = stop.at(step)
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

    def _lower(self) -> jax.stages.Lowered:
        before_s = time.perf_counter()
        lowered = self.setup.traced_step().lower()
        self.compile_s = time.perf_counter() - before_s
        return lowered

    def _compile(self, lowered: jax.stages.Lowered) -> CompiledStep:
        before_s = time.perf_counter()
        compiled = lowered.compile()
        self.compile_s += time.perf_counter() - before_s
        return compiled

    def _next_batch(self) -> Batch | None:
        """The next batch; None when the data of one of the processes has ended."""
        if not self.loader.ends:
            return self.setup.put_batch(next(self.loader))
        before = self.loader.state()
        batch = next(self.loader, None)
        if not processes.all_of(batch is not None) or batch is None:
            self.loader.restore(before)  # what no step will use stays unread
            return None
        return self.setup.put_batch(batch)

    def _figures(self, state: TrainState, stop: StopFlag) -> Mapping[str, float]:
        """Of an evaluation; none if a signal ended it."""
        try:
            return self.evaluator(state.params, state.buffers, stop.is_set).figures
        except EvaluationStopped:
            return {}

    def _finish(
        self, state: TrainState, log: StepLog, writer: MetricsWriter, stop: StopFlag
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


def _warn(text: str) -> None:
    """Tells what another process than the first one has to say."""
    print(f"{processes.name()}: {text}", file=sys.stderr, flush=True)


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


def _result(future: Future, stop: StopFlag) -> Any:
    """What comes out of a thread, unless a signal comes first."""
    while not future.done() and not stop.signal:
        wait([future], timeout=0.1)
    if stop.signal:
        raise Stopped(f"stopped by {stop.signal} before a step was made")
    return future.result()


def _timeline(config: Config, ranks: int) -> Timeline | None:
    """When each rank of the pipeline does what, by the costs; None without one."""
    if ranks == 1:
        return None
    return simulate(*of_config(config.pipeline, ranks))


def _start(config: Config, facts: dict[str, str]) -> tuple[str, mesh_lib.Sizes, Setup]:
    """Platform, mesh sizes and setup for the devices that are here.

    Several processes must have the same configuration, code, packages and `facts`.
    """
    facts = processes.facts_of(config) | facts
    platform = mesh_lib.start_backend(config.mesh, facts)
    sizes = mesh_lib.resolve_sizes(config, jax.device_count())
    mesh = mesh_lib.make_mesh(sizes)
    return platform, sizes, Setup(config, mesh, vocab_size(config.data, config.model))


def evaluate_run(config: Config, workdir: Path) -> dict[str, float]:
    """Evaluates the newest complete checkpoint of a run, on the devices that are here.

    Raises:
      ConfigError: if there is none, or it does not fit the configuration.
    """
    # Saved weights are in logical order: every expert in its own slot.
    config = dataclasses.replace(config, balancer=Balancer())
    _, _, setup = _start(config, {"--workdir": str(workdir)})
    weights = warm_start.load_weights(str(workdir), setup.abstract_state)
    return Evaluator(setup)(**weights).figures
