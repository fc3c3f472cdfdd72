# SPDX-License-Identifier: Apache-2.0
"""From the configuration to a mesh: chosen sizes, and mistakes with a remedy."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from jaxmoe import mesh as mesh_lib
from jaxmoe.config import Config, ConfigError, Data, Mesh, Model, MoE, Pipeline
from jaxmoe.mesh import Sizes, make_mesh, resolve_sizes, single_device_mesh
from tests.helpers import ROOT


def config_of(*, experts=8, batch_size=64, layers=4, pipeline=None, **mesh):
    return Config(
        mesh=Mesh(**mesh),
        model=Model(num_layers=layers, layer_pattern="moe"),
        moe=MoE(num_experts=experts),
        pipeline=Pipeline(**(pipeline or {})),
        data=Data(batch_size=batch_size),
    )


@pytest.mark.parametrize(
    ("devices", "experts", "given", "want"),
    [
        (8, 8, {}, (2, 2, 2)),
        (8, 4, {}, (2, 2, 2)),
        (8, 6, {}, (2, 2, 2)),
        (8, 7, {}, (4, 1, 2)),
        (1, 8, {}, (1, 1, 1)),
        (2, 8, {}, (2, 1, 1)),
        (4, 8, {}, (2, 2, 1)),
        (6, 9, {}, (2, 3, 1)),
        (8, 8, {"pipe": 1}, (2, 4, 1)),
        (8, 6, {"pipe": 1}, (4, 2, 1)),  # 4 does not divide 6
        (8, 7, {"pipe": 1}, (8, 1, 1)),
        (8, 8, {"pipe": 4}, (2, 1, 4)),
        (4, 8, {"pipe": 4}, (1, 1, 4)),
        (9, 9, {"pipe": 1}, (3, 3, 1)),
        (8, 8, {"data": 8}, (8, 1, 1)),  # no device is left for the pipeline
        (8, 8, {"data": 2}, (2, 2, 2)),
        (8, 8, {"data": 1}, (1, 4, 2)),  # the experts take all that is left
        (8, 8, {"expert": 8}, (1, 8, 1)),
        (8, 8, {"expert": 1}, (4, 1, 2)),
        (8, 8, {"data": 4, "expert": 2}, (4, 2, 1)),
        (8, 8, {"data": 2, "expert": 2}, (2, 2, 2)),
        (8, 8, {"data": 4, "expert": 2, "pipe": 1}, (4, 2, 1)),
        (8, 8, {"data": 2, "expert": 1, "pipe": 4}, (2, 1, 4)),
    ],
)
def test_sizes(devices, experts, given, want):
    """'auto': pipe is 2 from 8 devices on; expert takes the largest divisor that the
    experts allow, at most half of the devices that are left; data takes the rest. Given
    sizes are kept."""
    config = config_of(experts=experts, batch_size=144, **given)
    sizes = resolve_sizes(config, devices)
    assert (sizes.data, sizes.expert, sizes.pipe) == want
    assert sizes.devices == devices
    assert str(sizes) == "data {} x expert {} x pipe {}".format(*want)
    named = f", {', '.join(given)} given" if given else ""
    assert sizes.reason == f"{devices} devices{named}, {experts} experts to split"


@pytest.mark.parametrize(
    ("devices", "changes", "why"),
    [
        (4, {}, "fewer than 8 devices"),
        (8, {"layers": 1}, "Mesh.pipe=2 is more than Model.num_layers=1"),
        (8, {"batch_size": 24}, "Data.batch_size=24 / .* cannot be split over"),
        (8, {"data": 4, "expert": 2}, "Mesh.pipe=2 needs 16 devices"),
    ],
)
def test_automatic_sizes_without_a_pipeline(devices, changes, why):
    """Where 2 ranks do not fit, there is one; whoever set a schedule is told why."""
    sizes = resolve_sizes(config_of(**changes), devices)
    assert sizes.pipe == 1
    assert "pipeline" not in sizes.reason
    told = resolve_sizes(config_of(pipeline={"schedule": "1f1b"}, **changes), devices)
    assert dataclasses.replace(told, reason=sizes.reason) == sizes
    assert re.search(f"^{sizes.reason}, no pipeline: .*{why}", told.reason)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("experts", [2, 3, 6, 8, 60])
def test_automatic_sizes_always_fit(devices, experts):
    """For any devices and experts: the product is all devices, the experts divide."""
    config = config_of(experts=experts, batch_size=48)
    sizes = resolve_sizes(config, devices)
    assert sizes.devices == devices
    assert experts % sizes.expert == 0
    # 48 sequences / 4 microbatches cannot be split over 8 devices
    assert sizes.pipe == (2 if devices in (8, 12) else 1)


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        (8, {"data": 2, "expert": 1, "pipe": 1}),  # too few: 6 would be left out
        (8, {"data": 2, "expert": 1}),
        (8, {"data": 4, "expert": 4, "pipe": 1}),  # too many
        (1, {"data": 2, "expert": 2, "pipe": 1}),
        (8, {"data": 3}),
        (8, {"expert": 16}),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices(devices, given):
    """Too many and too few are both errors: fact, rule, remedy."""
    with pytest.raises(ConfigError) as error:
        resolve_sizes(config_of(experts=16, **given), devices)
    text = str(error.value)
    for axis, size in given.items():
        assert f"Mesh.{axis}={size}" in text
    assert f"{devices} cpu device(s)" in text
    assert "must multiply to the number of devices" in text
    assert f"with product {devices}" in text
    assert "Mesh.virtual_devices=" in text  # the way out on a CPU


def test_experts_that_cannot_take_what_is_left():
    """data is given and 6 experts cannot be split over the other 8 devices."""
    with pytest.raises(ConfigError, match=r"Mesh\.data=1 x Mesh\.expert=8") as error:
        resolve_sizes(config_of(experts=6, data=1), 8)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (config_of(batch_size=12), ("Data.batch_size=12", "8", "Mesh.data=2")),
        (config_of(experts=6, expert=4), ("MoE.num_experts=6", "Mesh.expert=4")),
        (config_of(pipe=8), ("Mesh.pipe=8", "Model.num_layers=4", "Set ")),
        (
            config_of(pipe=4, batch_size=8),
            (
                "Data.batch_size=8",
                "(8 with Mesh.pipe=4)",
                "Mesh.data=2 x Mesh.expert=1",
            ),
        ),
    ],
)
def test_what_does_not_divide_over_the_chosen_sizes(config, parts):
    """Batch and experts are checked against the sizes, before anything is compiled."""
    with pytest.raises(ConfigError) as error:
        resolve_sizes(config, 8)
    assert all(part in str(error.value) for part in parts), error.value


def test_mesh_holds_every_device_on_axes_the_compiler_may_partition():
    """The mesh has the three axes in order, all 8 devices, and type Auto."""
    mesh = make_mesh(Sizes(2, 4, 1, "test"))
    assert mesh.axis_names == ("data", "expert", "pipe")
    assert dict(mesh.shape) == {"data": 2, "expert": 4, "pipe": 1}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_never_leaves_devices_out():
    """jax.make_mesh((2, 1, 1)) on 8 devices silently takes 2; ours is an error."""
    with pytest.raises(ConfigError, match="needs 2 devices"):
        make_mesh(Sizes(2, 1, 1, "test"))


def test_single_device_mesh():
    mesh = single_device_mesh()
    assert dict(mesh.shape) == {"data": 1, "expert": 1, "pipe": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("platform", ["auto", "cpu"])
def test_start_on_a_cpu(platform):
    """A backend that runs already with enough devices is taken as it is."""
    assert mesh_lib.start_backend(Mesh(platform=platform)) == "cpu"
    assert jax.device_count() == 8


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_an_accelerator_that_is_not_there(platform):
    """Never a silent run on the CPU: versions and the remedy are told."""
    with pytest.raises(ConfigError) as error:
        mesh_lib.start_backend(Mesh(platform=platform))
    text = str(error.value)
    assert f"Mesh.platform='{platform}'" in text
    assert "'cpu'" in text
    assert f"jax {jax.__version__}" in text
    assert "jaxlib " in text
    assert "libtpu " in text
    assert "restart the runtime" in text


def python(code, **environment):
    """Runs code in a process whose JAX has not started."""
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_backend_that_was_started_too_early():
    """`import jax; jax.devices()` and then 8 devices: an error, never a mesh of one
    device; what it proposes works."""
    code = """
import jax
assert jax.device_count() == 1
from jaxmoe import cli, mesh
from jaxmoe.config import Mesh
code = cli.main(["train", "--workdir=/nowhere/run"])
assert mesh.start_backend(Mesh(virtual_devices=1)) == "cpu"
raise SystemExit(code)
"""
    done = python(code)
    assert done.returncode == 2, done.stderr
    assert (
        "JAX was started before with 1 CPU device(s), and 8 are needed" in done.stderr
    )
    assert "Restart the runtime" in done.stderr
    assert "Mesh.virtual_devices=1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not os.path.exists("/nowhere")


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ("Mesh(data=2, expert=3, pipe=1)", 6),
        pytest.param("Mesh(virtual_devices=3)", 3, marks=pytest.mark.slow),
        pytest.param("Mesh(data=4, platform='cpu')", 8, marks=pytest.mark.slow),
    ],
)
def test_simulated_devices(mesh, devices):
    """On a CPU there are as many devices as the product of the given sizes, or
    virtual_devices."""
    code = f"""
from jaxmoe.config import Config, Mesh, MoE, Data
from jaxmoe import mesh as m
config = Config(mesh={mesh}, moe=MoE(num_experts=6), data=Data(batch_size=48))
assert m.start_backend(config.mesh) == "cpu"
import jax
sizes = m.resolve_sizes(config, jax.device_count())
print(jax.device_count(), m.make_mesh(sizes).size)
"""
    done = python(code)
    assert done.stdout.split() == [str(devices)] * 2, done.stderr
