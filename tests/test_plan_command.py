# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe plan`: table, JSON, figure, the plan before, mistakes."""

import json

import numpy as np
import pytest

from jaxmoe import cli
from tests import helpers
from tests.eplb.test_plan import CASES, README_MAP

SIZES = ["--replicas=16", "--groups=4", "--nodes=2", "--devices=8"]


@pytest.fixture
def loads(tmp_path):
    """A file with the loads of the public example."""
    file = tmp_path / "loads.json"
    file.write_text(json.dumps(CASES["readme"]["load"]))
    return str(file)


def output(capsys, *arguments):
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_json(loads, capsys):
    """The last line is one object with these keys."""
    found = json.loads(output(capsys, loads, *SIZES, "--json").splitlines()[-1])
    assert list(found) == [
        "physical_to_logical",
        "logical_to_physical",
        "num_copies",
        "max_over_mean",
        "moved",
    ]
    assert found["physical_to_logical"] == README_MAP
    assert found["num_copies"] == CASES["readme"]["num_copies"]
    assert found["max_over_mean"] == pytest.approx([156 / 129.125, 179.5 / 144.5])
    assert len(found["moved"]) == 2
    assert found["logical_to_physical"][0][5][:3] == [0, 2, -1]


def test_table(loads, capsys):
    lines = output(capsys, loads, *SIZES).splitlines()
    assert lines[0] == "layer  device  load/mean  experts"
    ratio = (165 / 2 + 39) / 129.125
    assert lines[1].split() == ["0", "0", f"{ratio:.4f}", "5", "6"]
    assert lines[16].split()[3:] == ["3", "1"]
    assert lines[-3].split()[2:3] == [f"{156 / 129.125:.4f}"]
    assert lines[-1].startswith(" mean")


def test_other_files(loads, tmp_path, capsys):
    """A .npy file and the folder of a run give the same as the JSON file; of a run the
    last loads count."""
    load = CASES["readme"]["load"]
    np.save(tmp_path / "loads.npy", np.asarray(load))
    lines = [
        {"step": 1, "expert_load": [[1] * 12]},
        {"step": 2, "expert_load": load},
        {"step": 3, "loss": 1.0},
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    expected = output(capsys, loads, *SIZES)
    assert output(capsys, str(tmp_path / "loads.npy"), *SIZES) == expected
    assert output(capsys, str(run), *SIZES) == expected


def test_previous(loads, tmp_path, capsys):
    """The whole output, or the object alone, is a plan that can be gone on from; with
    the same load nothing moves."""
    out = output(capsys, loads, *SIZES, "--json")
    whole, alone = tmp_path / "whole.txt", tmp_path / "alone.json"
    whole.write_text(out)
    alone.write_text(out.splitlines()[-1])
    before = json.loads(out.splitlines()[-1])
    for file in (whole, alone):
        arguments = [loads, *SIZES, f"--previous={file}", "--json"]
        found = json.loads(output(capsys, *arguments).splitlines()[-1])
        assert found["moved"] == [0, 0]
        assert found["physical_to_logical"] == before["physical_to_logical"]


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_figure(name, loads, tmp_path, capsys):
    file = tmp_path / name
    output(capsys, loads, *SIZES, f"--figure={file}")
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[name[-3:]]
    assert file.read_bytes().startswith(start)


MISTAKES = [
    (["{loads}", "--replicas=18", "--devices=8"], ("--replicas=18", "--devices=8")),
    (["{loads}", "--replicas=8", "--devices=8"], ("--replicas=8", "12 experts", "16")),
    (
        ["{loads}", "--replicas=16", "--devices=8", "--groups=5"],
        ("--groups=5", "12 experts", "4"),
    ),
    (
        ["{loads}", "--replicas=16", "--devices=8", "--nodes=3"],
        ("--devices=8", "--nodes=3"),
    ),
    (["{loads}", "--replicas=16", "--devices=0"], ("--devices=0", "at least 1")),
    (["{loads}", *SIZES, "--policy=best"], ("--policy='best'", "reference, swap")),
    (["{loads}", *SIZES, "--figure=a.pdf"], ("a.pdf", "a.svg")),
    (["{loads}", *SIZES, "--figure={tmp}/no/a.svg"], ("a.svg", "cannot be written")),
    (["{loads}", "--devices=8"], ("--replicas",)),
    (["{tmp}/nowhere.json", *SIZES], ("nowhere.json", "cannot be read")),
    (["{tmp}/nowhere.npy", *SIZES], ("nowhere.npy", "cannot be read")),
    (["{tmp}/text.json", *SIZES], ("text.json", "not JSON")),
    (["{tmp}/text.npy", *SIZES], ("text.npy", "numpy.save")),
    (["{tmp}/binary.json", *SIZES], ("binary.json", "not text")),
    (["{tmp}/flat.json", *SIZES], ("flat.json", "[12]", "[layers, experts]")),
    (["{tmp}/ragged.json", *SIZES], ("ragged.json", "[layers, experts]")),
    (["{tmp}/nan.json", *SIZES], ("nan.json", "nan", "layer 1", "expert 2")),
    (["{tmp}/minus.json", *SIZES], ("minus.json", "-3", "layer 0")),
    (["{tmp}", *SIZES], ("no loads", "expert_load")),
    (["{loads}", *SIZES, "--previous={tmp}/flat.json"], ("[12]", "[2, 16]", "=16")),
    (["{loads}", *SIZES, "--previous={tmp}/empty.json"], ("physical_to_logical",)),
    (["{loads}", *SIZES, "--previous={tmp}/other.json"], ("12 experts", "layer 0")),
    (["{loads}", *SIZES, "--previous={tmp}/text.json"], ("text.json", "not JSON")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda x: " ".join(x))
def test_mistakes(arguments, parts, loads, tmp_path, capsys):
    """Exit code 2 and one message with numbers that would work."""
    row = list(range(12))
    files = {
        "text.json": "so many",
        "text.npy": "so many",
        "flat.json": json.dumps(row),
        "ragged.json": "[[1, 2], [3]]",
        "nan.json": json.dumps([row, [1, 2, float("nan"), *row[3:]]]),
        "minus.json": json.dumps([[-3, *row[1:]], row]),
        "empty.json": "{}",
        "other.json": json.dumps({"physical_to_logical": [[0] * 16] * 2}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    arguments = [argument.format(tmp=tmp_path, loads=loads) for argument in arguments]
    helpers.assert_told(["plan", *arguments], parts, capsys)


def test_help(capsys):
    assert cli.main(["plan", "--help"]) == 0
    assert "plan      place copies of experts" in capsys.readouterr().out
