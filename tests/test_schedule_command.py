# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe schedule`: figures, files, mistakes, and a start without JAX."""

import json
import subprocess
import sys

import pytest

from jaxmoe import cli
from tests import helpers
from tests.helpers import ROOT

ARGUMENTS = ["schedule", "dualpipe", "--ranks", "8", "--microbatches", "20"]


def figures(capsys, *arguments):
    """The JSON object of a command that ends well."""
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_json(capsys):
    """The last line is one object with these keys; the case of the published figure."""
    found = figures(capsys, *ARGUMENTS)
    first = {"F": 11, "B": 4, "Bi": 7, "W": 7, "F&B": 9}
    assert found.pop("operations")[::7] == [first, first]
    assert found == {
        "makespan": 66,
        "bubble": 6,
        "peak_activations": 9,
        "ticks": found["ticks"],
        "lockstep_makespan": 66,
    }
    assert 20 < found["ticks"] < 40


def test_costs(capsys):
    """(R/2 - 1)(F&B + B - 3W) = 3 x 1.4."""
    found = figures(capsys, *ARGUMENTS, "--costs", "F=1,Bi=1,W=1,FB=2.4")
    assert found["bubble"] == pytest.approx(4.2)
    assert found["makespan"] <= found["lockstep_makespan"] <= 1.011 * found["makespan"]


def test_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert "rank 7  f10f11f12f13f14f15f16F0-I0-W0-" in out
    assert "bubble               6 (9.1% of the makespan)" in out
    assert "rank 0             F 11  B 4  Bi 7  W 7  F&B 9" in out
    assert "\x1b" not in out


def test_files(tmp_path, capsys):
    """The CSV that a schedule is written to gives the same figures; the figure is
    drawn."""
    table, figure = tmp_path / "mine.csv", tmp_path / "mine.svg"
    one = figures(capsys, *ARGUMENTS, f"--csv={table}", f"--figure={figure}")
    assert figures(capsys, "schedule", str(table)) == one
    assert figures(capsys, "schedule", str(table), "--ranks=8") == one
    assert figure.read_text("utf-8").startswith("<svg")


MISTAKES = [
    (["dualpipe", "--ranks=3", "--microbatches=8"], ("--ranks=3", "even", "2 or 4")),
    (["dualpipe", "--ranks=4", "--microbatches=6"], ("=6", "--microbatches=8")),
    (["dualpipe", "--ranks=4", "--microbatches=9"], ("=9", "8 or 10")),
    (["dualpipev", "--ranks=4", "--microbatches=7"], ("=7", "--microbatches=8")),
    (["1f1b", "--ranks=0", "--microbatches=7"], ("--ranks=0", "--ranks=1")),
    (["1f1b", "--ranks=2", "--microbatches=0"], ("--microbatches=0",)),
    (["1f1b", "--ranks=two", "--microbatches=4"], ("--ranks", "'two'")),
    (["1f1b", "--ranks=9999", "--microbatches=9999"], ("at most 100000",)),
    (["1f1b", "--microbatches=4"], ("--ranks is missing", "--ranks=8")),
    (["dualpipe", "--ranks=4"], ("--microbatches is missing", "--microbatches=16")),
    (["dualpipe", "--ranks=5"], ("--ranks=5 is odd",)),
    (["dualpip", "--ranks=4", "--microbatches=8"], ("'dualpip'", "'dualpipe'")),
    ([], ("name",)),
    (["nowhere.csv"], ("nowhere.csv", "cannot be read")),
    (["{tmp}/bad.csv"], ("bad.csv", "'nonsense'")),
    (["{tmp}/stuck.csv"], ("stands still", "rank 0 at 0B0 for 0F0")),
    (["{tmp}/good.csv", "--ranks=3"], ("--ranks=3", "--ranks=1")),
    (["{tmp}/binary.csv"], ("binary.csv", "not text")),
    ([*ARGUMENTS[1:], "--costs=B=2"], ("'B'", "FB")),
    ([*ARGUMENTS[1:], "--costs=F=0"], ("F=0", "F=1")),
    ([*ARGUMENTS[1:], "--figure=a.pdf"], ("a.pdf", "a.svg")),
    ([*ARGUMENTS[1:], "--csv=nowhere/a.csv"], ("nowhere/a.csv", "Name another")),
    ([*ARGUMENTS[1:], "--steps=3"], ("--steps=3",)),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda x: " ".join(x))
def test_mistakes(arguments, parts, tmp_path, capsys):
    """Exit code 2 and one message with numbers that would work."""
    (tmp_path / "bad.csv").write_text("0F0,nonsense\n")
    (tmp_path / "stuck.csv").write_text("0B0,0F0\n")
    (tmp_path / "good.csv").write_text("0F0,0B0\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    helpers.assert_told(["schedule", *arguments], parts, capsys)


def test_help(capsys):
    assert cli.main(["schedule", "--help"]) == 0
    assert "schedule  simulate a pipeline schedule" in capsys.readouterr().out


def test_no_jax_is_imported():
    code = f"""
import sys
from jaxmoe import cli
assert cli.main({ARGUMENTS!r}) == 0
loaded = {{"jax", "flax", "optax", "orbax", "grain", "matplotlib"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
