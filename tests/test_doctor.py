# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe doctor`: what it finds, with stand-ins for what this machine has not."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxmoe import cli, doctor
from tests.helpers import assert_told

CPU = {"platform": "cpu", "device_count": 1, "processes": 1, "devices": []}


@pytest.fixture
def machine(tmp_path):
    """One on which nothing is wrong, and of which jax is a stand-in."""
    here = doctor.this_machine(tmp_path, timeout_s=30.0)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    return dataclasses.replace(here, environment=environment, accelerators=())


def problems_of(machine, monkeypatch=None, probe=CPU):
    if monkeypatch:
        monkeypatch.setattr(doctor, "_probe", lambda _: (probe, ""))
    monkeypatch and monkeypatch.setattr(doctor, "_late_flags", lambda: ())
    return doctor.examine(machine)["problems"]


def stand_in(machine, code):
    (machine.folder / "jax.py").write_text(code)


def test_this_machine(capsys, tmp_path):
    """Real devices, from a process of its own; the last line is JSON."""
    assert cli.main(["doctor", f"--workdir={tmp_path / 'new'}", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["versions"]["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint"} <= set(found["versions"])
    assert found["platform"] == "cpu"
    assert found["processes"] == 1
    assert found["device_count"] == len(found["devices"]) == 1
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"
    assert found["free_bytes"] > 0
    assert isinstance(found["problems"], list)
    assert not (tmp_path / "new").exists(), "it changes nothing"
    for text in ("platform", "cpu", jax.__version__):
        assert text in out


def test_nothing_is_wrong(machine, monkeypatch):
    assert problems_of(machine, monkeypatch) == []


@pytest.mark.parametrize(("kind", "extra"), [("tpu", "tpu"), ("gpu", "cuda13")])
def test_the_cpu_in_place_of_an_accelerator(machine, monkeypatch, kind, extra):
    versions = {k: v for k, v in machine.versions.items() if k != "libtpu"}
    machine = dataclasses.replace(machine, accelerators=(kind,), versions=versions)
    (problem,) = problems_of(machine, monkeypatch)
    assert f"there is a {kind.upper()}, but JAX runs on the CPU" in problem
    assert f"pip install -U 'jax[{extra}]'" in problem
    asked = {**machine.environment, "JAX_PLATFORMS": "cpu"}
    asked = dataclasses.replace(machine, environment=asked)
    assert problems_of(asked, monkeypatch) == [], "who asks for the CPU gets it"


@pytest.mark.parametrize(
    ("versions", "parts"),
    [
        ({"jaxlib": "0.4.1"}, ["jaxlib 0.4.1", "jax 0.10.2 needs jaxlib<=0.10.2"]),
        ({"libtpu": "0.0.3"}, ["libtpu 0.0.3", "needs libtpu==0.0.42.*"]),
    ],
)
def test_versions_that_do_not_go_together(machine, monkeypatch, versions, parts):
    requirements = (
        "jaxlib<=0.10.2,>=0.10.1",
        'jaxlib==0.10.1; extra == "minimum-jaxlib"',
        'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
        'libtpu==0.0.42.*; extra == "tpu"',
    )
    right = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    machine = dataclasses.replace(machine, requirements=requirements, versions=right)
    assert problems_of(machine, monkeypatch) == []
    machine = dataclasses.replace(machine, versions={**right, **versions})
    (problem,) = problems_of(machine, monkeypatch)
    assert all(part in problem for part in parts)


def test_an_update_under_a_running_process(machine, monkeypatch):
    versions = {**machine.versions, "jax": "99.0"}
    machine = dataclasses.replace(machine, versions=versions, requirements=())
    (problem,) = problems_of(machine, monkeypatch)
    assert "99.0 is installed. Restart" in problem


def test_a_dash_from_a_web_page(machine, monkeypatch):
    flags = {"XLA_FLAGS": "\N{EN DASH}\N{EN DASH}xla_dump_to=/tmp/x"}
    machine = dataclasses.replace(machine, environment=flags)
    (problem,) = problems_of(machine, monkeypatch)
    assert "XLA_FLAGS contains" in problem
    assert "U+2013" in problem


def test_flags_that_come_too_late(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    (problem,) = [p for p in doctor._late_flags() if p.startswith("XLA_FLAGS")]
    assert "ignored in silence" in problem


def test_a_full_disk(machine, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_FREE", 10**18)
    (problem,) = problems_of(machine, monkeypatch)
    assert "GB left" in problem


def test_devices_that_do_not_answer(machine):
    stand_in(machine, "import time; time.sleep(600)")
    problems = problems_of(dataclasses.replace(machine, timeout_s=0.5))
    assert "no answer within 0.5 s" in problems[0]


def test_a_jax_that_does_not_start(machine):
    stand_in(machine, "raise RuntimeError('Unknown flag in XLA_FLAGS: --xla_x')")
    assert "Unknown flag in XLA_FLAGS" in problems_of(machine)[0]


def test_a_tpu_in_use(machine, monkeypatch):
    """The holder is named if it lives; a lock file that is left is not removed."""
    stand_in(machine, "raise RuntimeError('The TPU is already in use')")
    lock = machine.folder / "lock"
    lock.touch()
    monkeypatch.setattr(doctor, "LOCK_FILE", str(lock))
    problem = problems_of(machine)[0]
    assert "the TPU is in use by another process" in problem
    assert f"{lock} is left from a process that is gone" in problem
    code = f"file = open({str(lock)!r}); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"open\n"
        problem = problems_of(machine)[0]
        assert f"It is held by process {holder.pid} (" in problem
        assert holder.poll() is None, "nobody is ended"
        holder.communicate(b"\n")
    assert Path(lock).exists()


def test_a_timeout_that_is_none(capsys):
    assert_told(["doctor", "--timeout=0"], ["--timeout=0", "Set --timeout=60"], capsys)
