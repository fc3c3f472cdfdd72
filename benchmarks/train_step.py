# SPDX-License-Identifier: Apache-2.0
"""Times the default run from outside: start, first loss, step, host work.

    python benchmarks/train_step.py [--runs 3] [--gin.X.y=VALUE ...]

The last line is JSON with medians over the runs:
  import_s      seconds of `import jaxmoe.cli` in a new process, interpreter included
  first_loss_s  seconds from the start of `train.py --gin.Train.steps=5` to its first
                logged loss
  step_s        median seconds of a step of a run of 60 steps
  host_share    processor seconds of the host's own work per step, over step_s
  tokens_per_s  positions of the batch per second
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    arguments = sys.argv[1:]
    runs = 3
    if "--runs" in arguments:
        at = arguments.index("--runs")
        runs = int(arguments[at + 1])
        del arguments[at : at + 2]
    figures = {
        "import_s": median(import_seconds, runs),
        "first_loss_s": median(lambda: first_loss_seconds(arguments), runs),
    }
    print(json.dumps(figures | step_figures(arguments)))


def median(measure, runs: int) -> float:
    return statistics.median(measure() for _ in range(runs))


def import_seconds() -> float:
    before_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jaxmoe.cli"], check=True, cwd=ROOT)
    return time.perf_counter() - before_s


def first_loss_seconds(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        before_s = time.perf_counter()
        run = train(folder, ["--gin.Train.steps=5", *arguments])
        metrics = Path(folder) / "metrics.jsonl"
        while not (metrics.is_file() and "loss" in metrics.read_text()):
            if run.poll() is not None:
                raise SystemExit(f"the run ended with {run.returncode}, without a loss")
            time.sleep(0.01)
        seconds = time.perf_counter() - before_s
        run.wait()
    return seconds


def step_figures(arguments: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = train(folder, ["--gin.Train.steps=60", *arguments])
        if run.wait():
            raise SystemExit(f"the run ended with {run.returncode}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    positions = last["tokens_per_s"] * last["step_s"]
    return {
        "step_s": summary["step_s"],
        "host_share": summary["host_share"],
        "tokens_per_s": positions / summary["step_s"],
    }


def train(folder: str, arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, "train.py", f"--workdir={folder}", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
