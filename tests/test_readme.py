# SPDX-License-Identifier: Apache-2.0
"""README.md keeps its word: its commands, its lists, and (slow) the run that it shows.

The figures of that run stand in README.md and nowhere else: in the block of its output
below "Run it" and in the table below "Results".
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxmoe import gin_config, metrics_file
from jaxmoe.config import Config
from tests import helpers, test_docs
from tests.test_docs import ROOT, blocks, commands, read, table
from tests.test_floors import floor, modules

README = read("README.md")
MISSING = "TO BE MEASURED"

START = "pip install -e . && python train.py"
TEST = "pip install -e '.[test]' && pytest"

EXACT_MATCH = 0.95  # at least, in each language
LOSS_TOLERANCE = 0.05  # relative; rounding differs between machines
SHARE_TOLERANCE = 0.03  # absolute


# What can be checked without a run ---------------------------------------------------


def test_starts_with_two_commands():
    """Installing and running is one line, testing another."""
    bash = [line for block in blocks(README, "bash") for line in block.splitlines()]
    assert bash[0] == START
    assert TEST in bash


def test_ci_runs_what_developers_are_told_to_run():
    script = read(".ci/run").replace("pip install --quiet", "pip install")
    # What compiles for a TPU that is not there is installed besides.
    script = script.replace("[test,aot]", "[test]").splitlines()
    section = README.partition("\n## Develop\n")[2].partition("\n## ")[0]
    told = commands(section)
    assert told
    for command in told:
        found = [line for line in script if f"{line} ".startswith(f"{command} ")]
        assert found, f"{command} is not in .ci/run"


def test_reading_list_is_nine_files_from_low_floors_to_high():
    rows = table(README, "Read the code in this order")
    files = [re.search(r"\]\(jaxmoe/([\w/]+)\.py\)", row[0])[1] for row in rows]
    names = [file.replace("/", ".") for file in files]
    assert len(names) == len(set(names)) == 9
    assert set(names) <= set(modules())
    floors = [floor(name) for name in names]
    assert floors == sorted(floors)
    assert all(int(row[1]) > 0 for row in rows)


def test_references_are_those_of_the_code():
    number = r"(?:arXiv|arxiv\.org/abs/)\s*(\d{4}\.\d{5})"
    files = [*(ROOT / "jaxmoe").rglob("*.py"), *(ROOT / "configs").glob("*.gin")]
    cited = {n for file in files for n in re.findall(number, file.read_text("utf-8"))}
    listed = {
        n for row in table(README, "References") for n in re.findall(number, row[0])
    }
    assert cited == listed


def test_shown_mistake_is_the_real_message(capsys):
    from jaxmoe import cli

    block = next(b for b in blocks(README, "text") if b.startswith("$ "))
    command, message = block.splitlines()
    words = command.removeprefix("$ python train.py ").split()
    assert cli.main(["train", *words]) == cli.EXIT_MISTAKE
    assert capsys.readouterr().err.strip() == message


def test_every_figure_has_its_command():
    for figure, value, command in table(README, "Results"):
        assert re.fullmatch(r"`\w+`", figure), figure
        assert value, figure
        assert re.fullmatch(r"`python [\w/]+\.py`", command), command


# The run -----------------------------------------------------------------------------


class Run(NamedTuple):
    """`python train.py`, as README.md says, in an empty folder."""

    code: int
    seconds: float
    output: str
    errors: str
    folder: Path
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    # The run folder is made in the current folder, so this keeps the clone clean.
    folder = tmp_path_factory.mktemp("readme")
    before_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")],
        cwd=folder,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"}
        | helpers.COMPILING,
        capture_output=True,
        encoding="utf-8",
        timeout=1800,
    )
    seconds = time.perf_counter() - before_s
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    workdir = Path(re.search(r"^run folder: (.*)$", done.stdout, re.MULTILINE)[1])
    return Run(
        done.returncode,
        seconds,
        done.stdout,
        done.stderr,
        workdir,
        metrics_file.read(workdir),
        json.loads((workdir / "summary.json").read_text("utf-8")),
    )


def shown_output() -> str:
    """The lines of a run that README.md shows."""
    text = README.partition("\n## Run it\n")[2]
    if MISSING in README:
        pytest.fail(
            f"README.md still says {MISSING!r}: run `python train.py` on a machine that"
            " does nothing else, and `python benchmarks/train_step.py`, and write the"
            " figures down."
        )
    return blocks(text, "text")[0]


def losses(text: str) -> list[tuple[int, float]]:
    """(step, loss) of every progress line."""
    found = re.findall(r"^step +(\d+)/\d+ .*?loss ([\d.]+)", text, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in found]


def captions(text: str) -> list[tuple[str, str]]:
    """(truth, model) of every printed caption."""
    return re.findall(r"^  truth '([^']+)' +model '([^']*)'$", text, re.MULTILINE)


@pytest.mark.slow
def test_it_ends_well(run, capsys):
    """Its seconds are printed for the reader: they say as much about the machine."""
    with capsys.disabled():
        print(f"\npython train.py: {run.seconds:.1f} s in all, of which", end=" ")
        print(", ".join(f"{k} {run.summary[k]:.3g}" for k in ("compile_s", "run_s")))
    assert run.code == 0
    assert "Traceback" not in run.errors


@pytest.mark.slow
def test_captions_are_right(run):
    """At least 95 % of the held-out captions, word for word, in each language."""
    for language in ("en", "zh"):
        assert run.summary[f"caption_exact_match_{language}"] >= EXACT_MATCH
    printed = captions(run.output)
    assert len(printed) == 6
    assert any(truth.isascii() for truth, _ in printed)
    assert any(not truth.isascii() for truth, _ in printed)
    assert sum(truth == model for truth, model in printed) >= 5


@pytest.mark.slow
def test_the_run_folder_holds_what_was_promised(run):
    files = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*")}
    last = str(Config().train.steps)
    assert run.folder.parent.name == "runs"
    assert run.folder.name.startswith("m6_digits-")
    assert gin_config.load([str(run.folder / "config.gin")]).config == Config()
    assert {f"checkpoints/{last}/complete.json", "metrics.jsonl"} <= files
    for name in ("loss", "learning_rate", "expert_load", "balance"):
        content = (run.folder / "plots" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000, name
    assert any(name.startswith("tensorboard/events") for name in files)


@pytest.mark.slow
def test_metrics_are_those_of_the_page(run):
    assert run.rows[0]["step"] == 1
    assert run.rows[-1]["step"] == run.summary["step"] == Config().train.steps
    written = {key for row in run.rows for key in row}
    for key in written:
        assert test_docs.is_documented(key, "metrics.jsonl"), key
    for key in run.summary:  # the last line of metrics.jsonl is in it
        pages = ("summary.json", "metrics.jsonl")
        assert any(test_docs.is_documented(key, page) for page in pages), key
    for key, _, condition in table(read("docs/metrics.md"), "metrics.jsonl"):
        if condition in ("always", "MoE layers"):
            assert all(key.strip("`") in row for row in run.rows), key
    for key in test_docs.documented_keys("summary.json"):
        one = key.replace("<task>", "caption").replace("<language>", "zh")
        assert one in run.summary, key


@pytest.mark.slow
def test_readme_shows_this_run(run):
    shown = shown_output()
    (first, first_loss), *_, (last, last_loss) = losses(shown)
    (row, *_), end = run.rows, run.rows[-1]
    assert (first, last) == (row["step"], end["step"])
    assert first_loss == pytest.approx(row["loss"], rel=LOSS_TOLERANCE)
    assert last_loss == pytest.approx(end["loss"], rel=LOSS_TOLERANCE)
    assert losses(run.errors)[-1][0] == last  # these lines are printed, too
    assert shown.splitlines()[0] in run.output.splitlines()
    truths = [truth for truth, _ in captions(shown)]
    assert truths and set(truths) <= {truth for truth, _ in captions(run.output)}
    printed = dict(re.findall(r"^(\w+) {2,}([\d.]+)$", shown, re.MULTILINE))
    assert {"caption_exact_match_en", "caption_exact_match_zh"} <= set(printed)
    values = {row[0].strip("`"): row[1] for row in table(README, "Results")}
    for figures in (printed, values):
        for key, value in figures.items():
            if key.startswith("caption_exact_match"):
                near = pytest.approx(run.summary[key], abs=SHARE_TOLERANCE)
                assert float(value) == near, key
    assert int(values["parameters"].replace(",", "")) == run.summary["parameters"]
