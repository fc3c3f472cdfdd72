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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmoe import mesh as mesh_lib
from jaxmoe import plots, rebalance, tree_names, warm_start
from jaxmoe.checkpoint import Checkpointer
from jaxmoe.config import Balancer, Config
from jaxmoe.data.loader import Loader
from jaxmoe.data.records import vocab_size
from jaxmoe.evaluate import Evaluator
from jaxmoe.metrics import MetricsWriter, Progress
from jaxmoe.model import Batch, placement_of
from jaxmoe.profile import Profile
from jaxmoe.step_log import Clock, StepLog, is_due
from jaxmoe.train_step import Setup, StepMetrics, TrainState

SAMPLES = 3  # captions per language that are printed beside the truth


CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class Stopped(Exception):
    """A signal asked the run to stop; the state is saved: exit code 75."""


class _StopFlag:
    """Set by SIGTERM and SIGINT inside the `with`; looked at between steps.

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
        self.rebalancer = rebalance.Rebalancer(self.setup) if placed else None
        self.clock = Clock()
        self.compile_s = 0.0

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns what summary.json holds.

        Raises:
          RunError: if the loss is not finite.
          Stopped: after a signal, with the state saved.
        """
        config = self.config
        checkpoints = Checkpointer(
            self.workdir / "checkpoints",
            keep=config.checkpoint.keep,
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
            with ThreadPoolExecutor(1) as background:
                # While the step compiles, the first state is made or restored.
                step = background.submit(self._compile) if left > 0 else None
                state = make_state()
                train_step = step.result() if step else None
            with (
                MetricsWriter(self.workdir, resume_step=newest or 0) as writer,
                Progress(config.train.steps, newest or 0) as progress,
                Profile(config.train, self.workdir, progress.message) as profile,
            ):
                log = StepLog(config, writer, progress, self.clock)
                if train_step:
                    train_step = profile.around(train_step)
                    state = self._steps(train_step, state, checkpoints, log, stop)
                checkpoints.wait()
                summary = self._finish(state, log, writer)
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
        for change in _changes(checkpoints.config_text(newest), self.config_text):
            print(f"since step {newest}: {change}", flush=True)
        self.loader.restore(checkpoints.extra(newest)["data"])
        abstract, leaves = rebalance.of_checkpoint(abstract, checkpoints.leaves(newest))
        if tree_names.differences(leaves, abstract):
            checkpoints.restore(newest, abstract)  # raises, a line for each difference
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
        previous: StepMetrics | None = None
        for step in range(int(state.step) + 1, train.steps + 1):
            state, metrics = train_step(state, batch)
            if previous is not None:  # the figures of the step before, as this one runs
                log.record(step - 1, previous)
            previous = metrics
            if self.rebalancer and is_due(step, 0, self.config.balancer.interval):
                state, report = self.rebalancer(state)
                log.rebalanced(step, report)
            stopped_by = stop.signal  # once: it may come at any moment
            saves = is_due(step, train.steps, self.config.checkpoint.every_steps)
            evaluates = step < train.steps and is_due(step, 0, train.eval_every)
            if saves or evaluates or stopped_by:
                evaluate = partial(self._figures, state) if evaluates else None
                log.record(step, metrics, evaluate)
                previous = None
            if saves or stopped_by:
                notes = {"data": self.loader.state()}
                saved = self.rebalancer.to_logical(state) if self.rebalancer else state
                checkpoints.save(step, saved, notes, self.config_text)
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

    def _compile(self) -> CompiledStep:
        before_s = time.perf_counter()
        compiled = self.setup.traced_step().lower().compile()
        self.compile_s = time.perf_counter() - before_s
        return compiled

    def _next_batch(self) -> Any:
        return self.setup.put_batch(next(self.loader))

    def _figures(self, state: TrainState) -> dict[str, float]:
        return self.evaluator(state.params, state.buffers).figures

    def _finish(
        self, state: TrainState, log: StepLog, writer: MetricsWriter
    ) -> dict[str, Any]:
        """Evaluates, prints captions beside the truth, writes summary.json."""
        figures, captions = self.evaluator(state.params, state.buffers)
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


def _changes(then: str, now: str) -> list[str]:
    """The fields in which two texts of config.gin differ."""

    def fields(text: str) -> dict[str, str]:
        lines = (line.partition("#")[0] for line in text.splitlines())
        pairs = (line.partition("=") for line in lines)
        return {
            name.strip(): value.strip() for name, is_field, value in pairs if is_field
        }

    old, new = fields(then), fields(now)
    return [
        f"{name} was {old.get(name, 'absent')} and is {new.get(name, 'absent')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


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
