# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe inspect`: steps, state and configuration, without devices; the weights."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxmoe import cli, gin_config
from jaxmoe.checkpoint import Checkpointer
from tests import helpers
from tests.helpers import ROOT, assert_told

CONFIG = helpers.tiny_config(
    model={"num_layers": 4, "layer_pattern": "dense,moe"},
    moe={"router": "grouped_sigmoid", "num_experts": 4},
)
UP = np.arange(2 * 3, dtype=np.float32).reshape(2, 3)
STATE = {
    "step": np.int32(20),
    "params": {
        "embedder": {"token": np.ones((5, 2), np.float32)},
        "dense": {"mlp": {"up": UP}},
        "moe": {"moe": {"experts": {"up": np.stack([UP, UP + 10])}}},
    },
    "buffers": {"moe": {"moe": {"router": {"router_bias": UP[:, :2]}}}},
    "optimizer": {"0": {"mu": np.zeros((7, 2), np.float32)}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 10 and 20 complete, 30 damaged, 40 not finished; 50 was left behind."""
    folder = tmp_path_factory.mktemp("inspect") / "run"
    with Checkpointer(folder / "checkpoints", keep=9) as checkpoints:
        for step in (10, 20, 30, 50):
            checkpoints.save(
                step, STATE, {"data": {"step": step}}, gin_config.to_gin(CONFIG)
            )
        checkpoints.discard_after(40)
    file = next((folder / "checkpoints" / "30" / "arrays" / "d").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (folder / "checkpoints" / "40").mkdir()
    return folder


def inspected(capsys, *arguments):
    assert cli.main(["inspect", *map(str, arguments), "--json"]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_steps_state_and_configuration(run, capsys):
    before = helpers.contents(run)
    out, found = inspected(capsys, run)
    assert helpers.contents(run) == before, "looking changes nothing"
    assert [(s["step"], s["complete"]) for s in found["steps"]] == [
        *((10, True), (20, True), (30, False), (40, False))
    ]
    problems = [step["problem"] for step in found["steps"]]
    assert problems[:2] == [None, None]
    assert "the checksum of the file arrays/d/" in problems[2]
    assert "the save was not finished" in problems[3]
    assert (found["latest"], found["step"], found["discarded"]) == (20, 20, [50])
    folder = run / "checkpoints" / "20"
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert found["steps"][1]["bytes"] == size
    assert found["parameters"] == 10 + 6 + 12
    assert found["parts"]["params/moe/experts"] == {
        "arrays": 1,
        "numbers": 12,
        "bytes": 48,
    }
    assert found["extra"] == {"data": {"step": 20}}
    leaves = {x["name"]: (x["dtype"], x["shape"]) for x in found["leaves"]}
    assert leaves["optimizer/0/mu"] == ("float32", [7, 2])
    assert gin_config.load((), [found["config"]]).config == CONFIG
    for text in ("broken: the checksum", "complete", "left behind", "28 parameters"):
        assert text in out


def test_another_step_and_the_folder_of_checkpoints(run, capsys):
    _, found = inspected(capsys, run / "checkpoints", "--step=10")
    assert (found["step"], found["latest"]) == (10, 20)


def test_weights_by_name(run, tmp_path, capsys):
    """Layers under their numbers in the model, router biases too, no optimizer."""
    file = tmp_path / "weights.safetensors"
    _, found = inspected(capsys, run, f"--export={file}")
    assert found["export"] == str(file)
    tensors = load_file(file)
    want = {
        "embedder.token": np.ones((5, 2)),
        "layers.0.mlp.up": UP[0],
        "layers.2.mlp.up": UP[1],
        "layers.1.moe.experts.up": UP,
        "layers.3.moe.experts.up": UP + 10,
        "layers.1.moe.router.router_bias": UP[0, :2],
        "layers.3.moe.router.router_bias": UP[1, :2],
    }
    assert set(tensors) == set(want)
    for name, value in want.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], value)
    with safe_open(file, "np") as opened:
        assert opened.metadata()["step"] == "20"
        assert "Model.layer_pattern" in opened.metadata()["config"]


def test_a_shared_layer_is_named_by_its_kind(tmp_path, capsys):
    config = helpers.changed(CONFIG, model={"share_layers": True})
    state = {"params": {"moe": {"moe": {"experts": {"up": UP[None]}}}}}
    state["params"]["embedder"] = {"token": jnp.ones((2, 2), jnp.bfloat16)}
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {}, gin_config.to_gin(config))
    file = tmp_path / "w.safetensors"
    inspected(capsys, tmp_path, f"--export={file}")
    tensors = load_file(file)
    assert set(tensors) == {"embedder.token", "layers.moe.moe.experts.up"}
    assert tensors["embedder.token"].dtype == np.float32


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["{run}/none"], ["holds no checkpoints", "Name such a folder"]),
        (["{run}", "--step=30"], ["--step=30", "these are: 10, 20"]),
        (["{run}", "--export=w.bin"], ["ends in .safetensors"]),
        (["{run}", "--export={run}/no/w.safetensors"], ["cannot be written"]),
        ([], ["folder"]),
    ],
)
def test_mistakes_are_told(run, capsys, options, parts):
    assert_told(["inspect", *(o.format(run=run) for o in options)], parts, capsys)


def test_no_jax_is_imported(run):
    code = (
        "import sys; from jaxmoe import cli; assert cli.main(sys.argv[1:]) == 0;"
        "assert not {'jax', 'orbax', 'flax'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "inspect", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
