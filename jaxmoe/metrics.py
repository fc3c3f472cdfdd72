# SPDX-License-Identifier: Apache-2.0
"""Floor 5. What a run tells: metrics.jsonl, summary.json, TensorBoard, the terminal.

metrics.jsonl (see metrics_file) reads as one unbroken run: a run that resumes at step k
first drops the lines of later steps.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxmoe.checkpoint_folder import write_atomically
from jaxmoe.metrics_file import METRICS, lines, numbers, plain
from jaxmoe.metrics_file import read as read

SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"


# Statistics ------------------------------------------------------------------------


def load_statistics(load_LE: np.ndarray) -> dict[str, float]:
    """How evenly the tokens are spread over the experts.

    Args:
      load_LE: Tokens per MoE layer and expert, over all devices.

    Returns:
      load_max_over_mean: Largest over mean load, of the worst layer; 1 is even, E is
        all tokens on one expert.
      load_cv: Standard deviation over the mean, averaged over the layers; 0 is even.
      dead_experts: Experts without a token, summed over the layers.

      Layers in which nothing was counted do not enter; if none is left, load counts as
      even. What is not finite in the load makes the first two NaN.
    """
    load_LE = np.asarray(load_LE, np.float64)
    total_L = load_LE.sum(-1)
    load_LE = load_LE[total_L != 0]
    if not load_LE.size:
        return {"load_max_over_mean": 1.0, "load_cv": 0.0, "dead_experts": 0.0}
    if not np.isfinite(load_LE).all():
        return {
            "load_max_over_mean": math.nan,
            "load_cv": math.nan,
            "dead_experts": 0.0,
        }
    mean_L = load_LE.mean(-1)
    return {
        "load_max_over_mean": float((load_LE.max(-1) / mean_L).max()),
        "load_cv": float((load_LE.std(-1) / mean_L).mean()),
        "dead_experts": float((load_LE == 0).sum()),
    }


def load_statistics_by_layer(load_LE: np.ndarray) -> dict[str, list[float]]:
    """The figures of `load_statistics`, a list with an entry per layer."""
    layers = [load_statistics(load_E[None]) for load_E in load_LE]
    return {
        "load_max_over_mean_by_layer": [row["load_max_over_mean"] for row in layers],
        "load_cv_by_layer": [row["load_cv"] for row in layers],
        "dead_experts_by_layer": [row["dead_experts"] for row in layers],
    }


# Files -----------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets an error of the disk say which file it was about."""
    try:
        yield
    except OSError as error:
        text = f"metrics cannot be written: {error.strerror}"
        raise OSError(error.errno, text, str(path)) from error


def _entries(value: Any) -> Iterator[float]:
    """The numbers in a value or in a list of any depth."""
    if isinstance(value, list):
        for item in value:
            yield from _entries(item)
    elif isinstance(value, int | float):
        yield float(value)


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """A number by its name; of a list the smallest, mean and largest entry."""
    found = np.fromiter(_entries(value), np.float64)
    if not isinstance(value, list) or not found.size:
        return [(name, float(number)) for number in found]
    with np.errstate(invalid="ignore"):  # of infinities
        parts = {"min": found.min(), "mean": found.mean(), "max": found.max()}
    return [(f"{name}/{part}", float(number)) for part, number in parts.items()]


class _Board:
    """TensorBoard's event file, one record at a time, in the calling thread.

    Do not simplify to tensorboardX.SummaryWriter: its thread dies in silence when the
    disk is full, and from then on its queue blocks the training for ever.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        events: Any = (
            event_pb2  # their classes are made at run time, unseen by checkers
        )
        summaries: Any = summary_pb2
        self._Event, self._Summary = events.Event, summaries.Summary
        folder.mkdir(exist_ok=True)
        # Two runs that start in one second must not write to one file.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        if resume_step is not None:  # TensorBoard hides what came later before
            start = events.SessionLog(status=events.SessionLog.START)
            self._add(resume_step + 1, session_log=start)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers as scalars; of lists, the smallest, mean and largest entry."""
        found = [
            self._Summary.Value(tag=name, simple_value=number)
            for key, value in values.items()
            for name, number in _scalars(key, numbers(value))
        ]
        self._add(step, summary=self._Summary(value=found))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        event = self._Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # write() has flushed, or failed
            self._writer.close()


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard's files; every write is flushed.

    Args:
      workdir: The run folder; made if need be.
      active: False writes nothing at all: every process but the first.
      resume_step: Updates done when the run starts or goes on; lines of later steps are
        dropped. None drops nothing, for who only adds to a finished run.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        active: bool = True,
        resume_step: int | None = None,
    ):
        self._workdir = Path(os.path.abspath(workdir))
        self._path = self._workdir / METRICS
        self._resume_step = resume_step
        self._active = active
        self._closed = False
        self._board: _Board | None = None
        if active:
            with _naming(self._path):
                self._workdir.mkdir(parents=True, exist_ok=True)
                self._droplines()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends what was measured at a step.

        Args:
          step: Updates done.
          values: Numbers, or lists of them (per layer, per expert), numpy arrays too.
            TensorBoard gets the smallest, mean and largest entry of a list.

        Raises:
          OSError: naming the file, if it cannot be written.
        """
        if not self._active:
            return
        assert not self._closed, "write() after close()"
        assert "step" not in values, "the step is an argument of its own"
        values = plain(values)
        line = json.dumps({"step": int(step), **values}, allow_nan=False)
        with _naming(self._path):
            self._append(line + "\n")
        with _naming(self._workdir / TENSORBOARD):
            if self._board is None:
                self._board = _Board(self._workdir / TENSORBOARD, self._resume_step)
            self._board.write(int(step), values)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes summary.json: at any moment the old or the new one is there, whole."""
        if self._active:
            text = json.dumps(plain(values), indent=1, allow_nan=False)
            with _naming(self._workdir / SUMMARY):
                write_atomically(self._workdir / SUMMARY, text + "\n")

    def close(self) -> None:
        """Closes the files. A second time does nothing."""
        self._closed = True
        if self._board is not None:
            self._board.close()
            self._board = None

    def _append(self, line: str) -> None:
        """Adds a line, or on a full disk nothing."""
        content = memoryview(line.encode())
        with open(self._path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while content:
                    content = content[file.write(content) :]
            except OSError:
                file.truncate(size)
                raise

    def _droplines(self) -> None:
        """Leaves the whole lines up to the step the run goes on from."""
        if not self._path.exists():
            return
        last = math.inf if self._resume_step is None else self._resume_step
        temporary = self._path.with_name(METRICS + ".tmp")
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            for line, values in lines(self._path):
                if values["step"] <= last:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


# Terminal --------------------------------------------------------------------------


class Progress:
    """One line about where the run stands: a live bar, or plain lines in a log file.

    On a terminal, a bar at the bottom that every step moves. Elsewhere, lines without
    control characters: the first, the last, and between them one when `interval_s`
    seconds or a tenth of the run have passed.

    Args:
      total: Updates of the whole run.
      initial: Updates done when it starts.
      stream: Where to; standard error if None.
      active: False prints nothing: every process but the first.
      interval_s: Seconds between lines.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        *,
        stream: IO[str] | None = None,
        active: bool = True,
        interval_s: float = 10.0,
    ):
        self._total = total
        self._initial = initial
        self._stream = sys.stderr if stream is None else stream
        self._active = active
        self._interval_s = interval_s
        self._started_s = time.monotonic()
        self._printed_s = -math.inf
        self._printed_step = -math.inf
        self._bar: Any = None
        if active and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=initial,
                file=self._stream,
                dynamic_ncols=True,
                unit="step",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
                "{postfix}",
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def step(self, step: int) -> None:
        """Moves the bar; called after every update. Prints no line."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows the newest metrics: `loss`, `tokens_per_s`, `load_max_over_mean`."""
        if self._bar is not None:
            self.step(step)
            self._bar.set_postfix_str(_figures(values))
        elif self._active and self._is_due(step):
            self._printed_s, self._printed_step = time.monotonic(), step
            width = len(str(self._total))
            share = step / self._total if self._total else 1.0
            line = (
                f"step {step:>{width}}/{self._total} {share:4.0%}  {_figures(values)}"
            )
            print(line.rstrip() + self._left(step), file=self._stream, flush=True)

    def message(self, text: str) -> None:
        """Prints a line of its own without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._active:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands and ends its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._active = False

    def _is_due(self, step: int) -> bool:
        return (
            step >= self._total
            or time.monotonic() - self._printed_s >= self._interval_s
            or step - self._printed_step >= self._total / 10
        )

    def _left(self, step: int) -> str:
        """The time that is left if it goes on as up to now."""
        done = step - self._initial
        if done <= 0 or step >= self._total:
            return ""
        left_s = (time.monotonic() - self._started_s) * (self._total - step) / done
        return f", {_duration(left_s)} left"


def _figures(values: Mapping[str, Any]) -> str:
    """The part of a line that says how it goes."""
    parts = []
    if (loss := values.get("loss")) is not None:
        parts.append(f"loss {float(loss):.4f}")
    if (rate := values.get("tokens_per_s")) is not None:
        parts.append(f"{_short(float(rate))} tokens/s")
    if (balance := values.get("load_max_over_mean")) is not None:
        parts.append(f"balance {float(balance):.2f}")
    return ", ".join(parts)


def _short(number: float) -> str:
    """Three digits and a letter: 950, 45.1k, 1.20M."""
    if not math.isfinite(number):
        return str(number)
    for letter in ("", "k", "M", "G"):
        if abs(number) < 999.5 or letter == "G":
            break
        number /= 1000
    digits = 0 if not letter or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{letter}"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
