# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe aot`: the step that trains, compiled for machines that are not there."""

import json

import numpy as np
import pytest

from jaxmoe import cli
from jaxmoe.aot import estimate as estimate_lib
from jaxmoe.aot.chips import CHIPS
from jaxmoe.aot.search import candidates
from jaxmoe.aot.topology import Topology, topology
from jaxmoe.config import ConfigError
from jaxmoe.mesh import Sizes, resolve_sizes
from jaxmoe.train_step import Setup
from jaxmoe.trainer import Trainer
from tests import helpers
from tests.helpers import changed, tiny_config

KEYS = {
    *("topology", "chips", "mesh", "microbatches", "compile_s", "bytes_per_chip"),
    *("memory_per_chip", "fits", "flops_per_chip", "model_flops", "recomputed"),
    *("step_s", "exposed_s", "tokens_per_s", "mfu", "hidden_fraction", "operations"),
    *("collectives", "assumed"),
}
SMALL = tiny_config(
    model={
        "num_layers": 2,
        "layer_pattern": "moe",
        "width": 256,
        "num_heads": 2,
        "ffn_width": 256,
        "compute_dtype": "bfloat16",
        "use_bias": False,
    },
    data={"batch_size": 32},
)


def run(capsys, *arguments):
    code = cli.main(["aot", *arguments])
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--topology"),
        (["--topology=v99:4x4"], "v5e, v5p"),
        (["--topology=v5e"], "a chip and the sizes of its grid"),
        (["--topology=v5e:2x4", "--figure=x.png"], ".html"),
        (["--topology=v5e:2x4", "--gin.Model.widht=3"], "width"),
    ],
)
def test_mistakes(capsys, arguments, words):
    """Fact, rule and remedy, exit code 2, no stack trace."""
    code, captured = run(capsys, *arguments)
    assert code == 2
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("name", "extra"), [("v5p:4x4x4", "aot"), ("h200:1x8x8", "aot-gpu")]
)
def test_a_missing_compiler_names_the_extra(monkeypatch, capsys, name, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, captured = run(capsys, f"--topology={name}")
    assert code == 2
    assert f"pip install -e '.[{extra}]'" in captured.err


def test_the_program_is_that_of_training(tmp_path, monkeypatch):
    """What is estimated and what the trainer compiles is the same text, on CPU."""
    texts = []
    original = Setup.traced_step

    def listen(self):
        traced = original(self)
        texts.append(traced.lower().as_text())
        return traced

    monkeypatch.setattr(Setup, "traced_step", listen)
    config = helpers.run_config()
    Trainer(config, tmp_path, "")._lower()
    devices = tuple(helpers.mesh_of(4, 2).devices.flat)
    machine = Topology("cpu", CHIPS["v5e"], devices, "gpu")
    monkeypatch.setattr(estimate_lib, "_times", lambda *_: {})
    estimate_lib.estimate(config, machine)
    assert texts[0] == texts[1]


def test_report_of_a_pipeline(capsys, tmp_path):
    """A small DualPipe step on 8 chips: every figure is there and fits the others."""
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    config = changed(
        SMALL,
        mesh={"data": 1, "expert": 4, "pipe": 2},
        pipeline={"schedule": "dualpipe", "microbatches": 4},
    )
    picture = tmp_path / "tick.html"
    code, captured = run(
        capsys,
        *("--topology=v5e:2x4", "--json", f"--figure={picture}"),
        *helpers.arguments(config),
    )
    assert code == 0, captured.err
    found = json.loads(captured.out.splitlines()[-1])
    assert set(found) == KEYS
    assert found["chips"] == 8
    assert found["mesh"] == {"data": 1, "expert": 4, "pipe": 2}
    assert found["fits"]
    assert 0 < found["bytes_per_chip"] < 2**30
    assert found["step_s"] > found["exposed_s"] >= 0
    tokens = config.data.batch_size * config.model.sequence_length
    assert found["tokens_per_s"] == pytest.approx(tokens / found["step_s"])
    assert found["mfu"] == pytest.approx(
        found["model_flops"] / (8 * 197e12 * found["step_s"])
    )
    assert {"F", "F&B", "B", "head"} == set(found["operations"])
    # Every row of tokens crosses twice forward and twice backward, in every layer.
    exchanged = [
        row
        for row in found["collectives"]
        if row["kind"] == "ragged-all-to-all" and row["axis"] == "expert"
    ]
    rows = tokens * config.moe.top_k / 4
    width = config.model.width
    crossing = sum(row["bytes"] for row in exchanged)
    assert crossing == pytest.approx(4 * config.model.num_layers * rows * width * 2 / 2)
    assert {row["inside"] for row in exchanged} >= {"F", "F&B"}
    assert all(0 <= v <= 1 for v in found["hidden_fraction"].values())
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_report_of_a_balancer(capsys):
    """The step of a run with a balancer: it moves experts, and says so."""
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    config = changed(
        SMALL,
        mesh={"data": 1, "expert": 8, "pipe": 1},
        model={"num_layers": 1},
        balancer={"interval": 10, "num_replicas": 16},
    )
    arguments = helpers.arguments(config)
    code, captured = run(capsys, "--topology=v5e:2x4", "--json", *arguments)
    assert code == 0, captured.err
    rows = json.loads(captured.out.splitlines()[-1])["collectives"]
    moves = [row for row in rows if row["inside"] == "move"]
    assert {(r["kind"], r["axis"]) for r in moves} == {("collective-permute", "expert")}
    assert all(row["bytes"] > 0 for row in moves)


@pytest.mark.slow
def test_report_of_two_slices(capsys):
    """Two slices of 8: tokens are exchanged inside a slice; what goes between the two
    takes longer per byte than what stays inside."""
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    config = changed(
        SMALL,
        mesh={"data": 2, "expert": 8, "pipe": 1},
        model={"num_layers": 1},
        moe={"num_experts": 16},
    )
    arguments = helpers.arguments(config)
    code, captured = run(capsys, "--topology=v5e:2x4*2", "--json", *arguments)
    assert code == 0, captured.err
    found = json.loads(captured.out.splitlines()[-1])
    assert found["chips"] == 16
    rows = [row for row in found["collectives"] if row["bytes"]]
    exchanges = [r for r in rows if r["kind"] == "ragged-all-to-all"]
    assert {row["axis"] for row in exchanges} == {"expert"}
    between = [r["seconds"] / r["bytes"] for r in rows if "data" in r["axis"]]
    inside = [row["seconds"] / row["bytes"] for row in exchanges]
    assert min(between) > max(inside)


def test_axes_of_tpu7x(libtpu):
    """A chip has two devices: twice as many as the sizes say, each in the mesh once."""
    machine = topology("tpu7x:2x2x1")
    assert len(machine.devices) == 8
    mesh = machine.mesh(Sizes(2, 4, 1, ""))
    assert len({device.id for device in mesh.devices.flat}) == 8
    assert machine.network(mesh).lengths == (2, 2, 1)


def test_report_for_gpus(capsys):
    """16 GPUs on two hosts: bytes, fit and collectives, and what the times rest on."""
    pytest.importorskip("jax_cuda13_plugin", reason="pip install -e '.[aot-gpu]'")
    config = changed(SMALL, mesh={"data": 2, "expert": 8, "pipe": 1})
    arguments = helpers.arguments(config)
    code, captured = run(capsys, "--topology=h200:1x2x8", "--json", *arguments)
    assert code == 0, captured.err
    found = json.loads(captured.out.splitlines()[-1])
    assert set(found) == KEYS
    assert found["fits"]
    exchanges = [r for r in found["collectives"] if "all-to-all" in r["kind"]]
    assert exchanges
    assert all(row["axis"] == "expert" for row in exchanges)
    assert "no kernel was run" in captured.out


def test_candidates_of_a_search():
    """All three sizes, those that the model allows; what is given stays."""
    free = changed(SMALL, mesh={"data": "auto", "expert": "auto", "pipe": "auto"})
    found = list(candidates(free, 8))
    meshes = {(c.mesh.data, c.mesh.expert, c.mesh.pipe) for c in found}
    assert {(8, 1, 1), (2, 4, 1), (1, 4, 2)} <= meshes
    assert all(resolve_sizes(c, 8).devices == 8 for c in found)
    given = changed(free, mesh={"expert": 2})
    assert {c.mesh.expert for c in candidates(given, 8)} == {2}


@pytest.fixture
def libtpu(monkeypatch):
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def test_axes_may_share_a_dimension_of_the_torus(libtpu):
    """64 chips of 4 x 4 x 4 as 1 x 32 x 2: every chip once."""
    machine = topology("v5p:4x4x4")
    mesh = machine.mesh(Sizes(1, 32, 2, ""))
    assert mesh.devices.shape == (1, 32, 2)
    assert len({device.id for device in mesh.devices.flat}) == 64
    assert machine.network(mesh).rings == (True, True, True)


@pytest.mark.parametrize(("sizes", "axis"), [((2, 16, 1), 0), ((1, 16, 2), 2)])
def test_two_slices_differ_along_one_axis(libtpu, sizes, axis):
    """Along data if it divides, else along pipe; never along expert."""
    machine = topology("v5e:4x4*2")
    mesh = machine.mesh(Sizes(*sizes, ""))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    first, second = np.split(slices, 2, axis=axis)
    assert np.unique(first).size == np.unique(second).size == 1
    assert first.flat[0] != second.flat[0]


def test_experts_do_not_cross_slices(libtpu):
    with pytest.raises(ConfigError, match=r"Set Mesh\.data=2"):
        topology("v5e:4x4*2").mesh(Sizes(1, 32, 1, ""))


def test_no_topology_is_invented():
    with pytest.raises(ValueError, match="v5e:4x4"):
        topology("v5p")
