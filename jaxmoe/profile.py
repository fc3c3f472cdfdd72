# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Profiles some steps of a run, and tells how much communication was hidden.

The steps are those of `Train.profile_steps`. Each is waited for, so that it lies inside
its annotation; what it computes is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxmoe import trace_file
from jaxmoe.config import Train
from jaxmoe.config_base import ConfigError
from jaxmoe.config_checks import profiled_steps
from jaxmoe.overlap import analyse
from jaxmoe.train_step import TrainState

FOLDER, FIGURES = "profile", "overlap.json"  # in the run folder
_MOST_EVENTS = 1_000_000  # jax.profiler writes no more into a .trace.json.gz

_Result = TypeVar("_Result")


class Profile:
    """Profiles a train step inside the `with`.

    Args:
      train: Says which steps.
      workdir: The run folder; gets profile/ with the trace and overlap.json.
      tell: Prints a line.
      active: False profiles nothing: every process but the first.
    """

    def __init__(
        self,
        train: Train,
        workdir: Path,
        tell: Callable[[str], None],
        *,
        active: bool = True,
    ):
        self._steps = profiled_steps(train) if active else range(0)
        self._folder, self._tell = workdir / FOLDER, tell
        self._running = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._finish()  # of what stopped in between there is a trace, too

    def around(
        self, train_step: Callable[[TrainState, Any], _Result]
    ) -> Callable[[TrainState, Any], _Result]:
        """The same step, profiled where it has to be."""
        if not self._steps:
            return train_step
        step = 0

        def profiled(state: TrainState, batch: Any) -> _Result:
            nonlocal step
            step = step + 1 if step else int(state.step) + 1
            if step not in self._steps:
                return train_step(state, batch)
            jax.block_until_ready(state)  # the step before is not part of it
            self._start()
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                result = jax.block_until_ready(train_step(state, batch))
            if step == self._steps[-1]:
                self._finish()
            return result

        return profiled

    def _start(self) -> None:
        if not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls would fill the trace
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True

    def _finish(self) -> None:
        """Ends the profile, writes overlap.json and tells the figures."""
        if not self._running:
            return
        self._running = False
        jax.profiler.stop_trace()
        try:
            trace = trace_file.read(trace_file.find(self._folder))
            figures = analyse(trace).to_json()
        except ConfigError as error:  # no reason to lose the run
            self._tell(f"profile: {error}")
            return
        text = json.dumps(figures, indent=1) + "\n"
        (self._folder / FIGURES).write_text(text, "utf-8")
        share = figures["hidden_fraction"]
        hidden = "none" if share is None else f"{share:.1%} of it"
        self._tell(
            f"profile: communication {figures['communication_ms']:.1f} ms, hidden"
            f" {hidden}, exposed {figures['exposed_ms']:.1f} ms of"
            f" {figures['span_ms']:.1f} ms; `jaxmoe overlap {self._folder}` tells more"
        )
        if len(trace.name) > 0.99 * _MOST_EVENTS:
            self._tell(
                "profile: the profiler writes at most a million events, so some steps"
                " may be missing; profile fewer"
            )
