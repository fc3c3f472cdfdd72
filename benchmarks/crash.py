# SPDX-License-Identifier: Apache-2.0
"""Kills training runs with SIGKILL at random moments, and goes on with each.

    python benchmarks/crash.py [--kills 200] [--steps 200] [--seed 0]

A run of a tiny model saves every second step, in the background. A process that trains
it is killed while it starts, after some step, or in the middle of a save; the next one
goes on in the same folder, and is killed in turn. After each kill every loss that is
written is compared, bitwise, with that of a run that nobody disturbed. A kill was
inside a write if it left a new step without its marker, or half of a file. At the end
each run goes on to its last step. The last line is JSON:

  kills           processes killed
  inside_a_write  of these, inside a write
  by_moment       of these, by the moment that was aimed at: start, step, save
  resumed         kills after which a later process went on from what was left; must
                  be all
  steps_lost      steps that were made, not saved yet and made again, over all kills
  steps           steps in all runs together
  mismatched      losses that differ from the undisturbed run's, and runs of which the
                  last weights do; must be 0
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

MOMENTS = ("start", "step", "save", "save")
TIMEOUT_S = 120.0
POLL_S = 0.001

OPTIONS = (
    "Mesh.virtual_devices=1",
    "Model.num_layers=1",
    "Model.layer_pattern='moe'",
    "Model.width=16",
    "Model.ffn_width=16",
    "Model.sequence_length=24",
    "MoE.num_experts=4",
    "Optimizer.warmup_steps=4",
    "Data.source='text'",
    "Data.batch_size=4",
    "Data.num_threads=0",
    "Data.text_denoise_weight=0.5",
    "Data.lm_weight=0.5",
    "Checkpoint.every_steps=2",
    "Checkpoint.keep=2",
    "Train.log_every=1",
    "Train.eval_batches=0",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(Path(folder), options.steps, options.seed)
        print(json.dumps(crashes.run(options.kills)))


def train(run: str, steps: int, cache: str) -> None:
    """What each process does: `jaxmoe train` in a run folder."""
    log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from jaxmoe import cli, plots

    plots.write_plots = lambda *_: None  # seconds for nothing, at the end only
    gin = (*OPTIONS, f"Train.steps={steps}", f"Train.compilation_cache={cache!r}")
    sys.exit(cli.main(["train", f"--workdir={run}", *(f"--gin.{x}" for x in gin)]))


class Crashes:
    """The experiment.

    Args:
      folder: Where the runs go.
      steps: Of each run.
      seed: Of the moments.
    """

    def __init__(self, folder: Path, steps: int, seed: int):
        self._folder, self._steps = folder, steps
        self._random = random.Random(seed)
        # Processes are forked from one that has imported everything, and started
        # nothing.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["jaxmoe.trainer", "orbax.checkpoint"])
        self._count: Counter[str] = Counter()
        self._aimed: Counter[str] = Counter()
        self._waiting = 0  # kills after which nobody has gone on yet

    def run(self, kills: int) -> dict[str, object]:
        """So many kills, and what came of them."""
        straight = self._folder / "straight"
        self._finish(straight)  # fills the compilation cache
        self._straight = losses(straight)
        self._weights = weights(straight, self._steps)
        self._start_s = self._time_to_first_step(self._folder / "timed")
        number = 0
        while self._count["kills"] < kills:
            run = self._folder / f"run{number}"
            while self._count["kills"] < kills and not (run / "summary.json").exists():
                self._life(run, self._random.choice(MOMENTS))
            self._finish(run)
            self._check(run)
            self._went_on()
            self._count["mismatched"] += weights(run, self._steps) != self._weights
            self._count["steps"] += self._steps
            number += 1
        names = ("kills", "inside_a_write", "resumed", "steps_lost")
        figures = {name: self._count[name] for name in names}
        last = {name: self._count[name] for name in ("steps", "mismatched")}
        return {**figures, "by_moment": dict(self._aimed), **last}

    def _life(self, run: Path, moment: str) -> None:
        """Starts a process and kills it; it may end before."""
        before, saved = left_by(run), newest(run)
        first = saved or 0
        process = self._start(run)
        wait = {"start": self._at_start, "step": self._at_step, "save": self._at_save}
        wait[moment](process, run, first)
        if process.exitcode is None:
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        self._check(run)
        after = left_by(run)
        # A process that goes on first writes metrics.jsonl anew, without lost steps.
        began = after.get("metrics.jsonl") != before.get("metrics.jsonl")
        if began and len(losses(run)) > first:
            self._went_on()
        if process.exitcode == 0:
            return
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(Path(f"{run}.log").read_text("utf-8"))
        self._waiting += 1
        self._count["kills"] += 1
        self._aimed[moment] += 1
        halves = {str(path.relative_to(run)) for path in unfinished(run)}
        new = [name for name in halves if after.get(name) != before.get(name)]
        self._count["inside_a_write"] += bool(new)
        if began:
            self._count["steps_lost"] += len(losses(run)) - (newest(run) or 0)
        print(dict(self._count), file=sys.stderr, flush=True)

    def _at_start(self, process: BaseProcess, run: Path, first: int) -> None:
        process.join(self._random.uniform(0, 1.2 * self._start_s))

    def _at_step(self, process: BaseProcess, run: Path, first: int) -> None:
        more = self._random.randint(1, 8)
        wait_for(process, lambda: len(losses(run)) >= first + more)
        process.join(self._random.uniform(0, 0.02))

    def _at_save(self, process: BaseProcess, run: Path, first: int) -> None:
        more = self._random.randint(1, 6)
        wait_for(process, lambda: len(losses(run)) >= first + more)
        wait_for(process, lambda: any(unfinished(run, new=first)))
        process.join(self._random.uniform(0, 0.03))

    def _time_to_first_step(self, run: Path) -> float:
        """Seconds in which a process starts, with what is compiled in the cache."""
        began_s = time.monotonic()
        process = self._start(run)
        wait_for(process, lambda: bool(losses(run)))
        start_s = time.monotonic() - began_s
        process.kill()
        process.join()
        return start_s

    def _went_on(self) -> None:
        self._count["resumed"] += self._waiting
        self._waiting = 0

    def _check(self, run: Path) -> None:
        found = losses(run)
        different = [a != b for a, b in zip(found, self._straight, strict=False)]
        self._count["mismatched"] += sum(different)

    def _start(self, run: Path) -> BaseProcess:
        cache = str(self._folder / "cache")
        process = self._context.Process(
            target=train, args=(str(run), self._steps, cache)
        )
        process.start()
        return process

    def _finish(self, run: Path) -> None:
        process = self._start(run)
        process.join()
        if process.exitcode != 0:
            raise SystemExit(Path(f"{run}.log").read_text("utf-8"))


def wait_for(process: BaseProcess, condition: Callable[[], bool]) -> None:
    """Until the condition holds or the process has ended."""
    end_s = time.monotonic() + TIMEOUT_S
    while process.exitcode is None and not condition():
        if time.monotonic() > end_s:
            raise SystemExit("a process hangs")
        time.sleep(POLL_S)


def losses(run: Path) -> list[float]:
    """Losses of the steps 1, 2, ... as they are written."""
    with contextlib.suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        rows = [json.loads(line) for line in lines]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]
    return []


def steps_of(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if path.name.isdecimal()]


def newest(run: Path) -> int | None:
    """The newest step with a marker."""
    done = [int(p.name) for p in steps_of(run) if (p / "complete.json").exists()]
    return max(done, default=None)


def left_by(run: Path) -> dict[str, int]:
    """What is in a run folder: names, and numbers that tell a file from a later one."""
    found = {}
    for path in run.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[str(path.relative_to(run))] = path.stat().st_ino
    return found


def unfinished(run: Path, new: int = -1) -> Iterator[Path]:
    """Steps after `new` without a marker, and half files."""
    for path in steps_of(run):
        if int(path.name) > new and not (path / "complete.json").exists():
            yield path
    yield from run.glob("**/*.tmp")


def weights(run: Path, step: int) -> str:
    """A checksum over the values of all arrays of a step."""
    import numpy as np

    from jaxmoe.checkpoint import Checkpointer
    from jaxmoe.tree_names import named_leaves

    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        tree = checkpoints.arrays(step)
    digest = hashlib.sha256()
    for name, leaf in sorted(named_leaves(tree).items()):
        digest.update(name.encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
