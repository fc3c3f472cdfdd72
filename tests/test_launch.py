# SPDX-License-Identifier: Apache-2.0
"""The templates in launch/ do what they say: scripts run with stand-ins for what they
call, and every command of train goes through the real command line."""

import math
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxmoe import cli, cluster, config_checks, gin_config
from jaxmoe.config import Mesh
from jaxmoe.mesh import resolve_sizes
from tests.helpers import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])

# Writes down how it was called; its exit codes are given, one per call.
STAND_IN = """\
#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >> "{folder}/calls"
echo >> "{folder}/calls"
codes=({codes})
number=$(grep -c "^$(basename "$0") " "{folder}/calls")
exit "${{codes[number - 1]:-0}}"
"""


def run(script, *arguments, folder, codes, **environment):
    """(exit code, calls) of a script with stand-ins.

    Args:
      script: Its name in launch/.
      arguments: Its own.
      folder: For the stand-ins.
      codes: By program, the exit codes of its calls, then 0.
      environment: Further variables.
    """
    for name, numbers in codes.items():
        program = folder / name
        text = " ".join(map(str, numbers))
        program.write_text(STAND_IN.format(folder=folder, codes=text))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PAUSE_S": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [shlex.split(line) for line in lines]


def loaded(words, devices):
    """The configuration of a `python train.py ...`, which must fit so many devices."""
    at = words.index("train.py")
    assert words[at - 1] == "python"
    files, bindings, rest = gin_config.split_arguments(words[at + 1 :])
    options = cli._parser("train").parse_args(rest)
    assert options.workdir, "several processes need one"
    config = gin_config.load([str(ROOT / f) for f in files], bindings).config
    config_checks.check(config)
    assert resolve_sizes(config, devices).devices == devices
    return config


def manifest():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text("utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_read_and_run(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_text("utf-8").isascii()


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        ((0,), 0, 1),
        ((75, 75, 75, 75, 0), 0, 5),  # stopped by a signal: as often as it comes
        ((2,), 2, 1),  # a mistake: never again
        ((1, 134, 0), 0, 3),
        ((1, 75, 2), 2, 3),
        ((1, 1, 1, 1), 1, 3),  # for ever in vain: RETRIES=2
    ],
)
def test_a_host_starts_again_where_that_makes_sense(tmp_path, codes, code, starts):
    found = run(
        "run.sh", "--workdir=/r", folder=tmp_path, codes={"python": codes}, RETRIES="2"
    )
    assert found == (code, [["python", "train.py", "--workdir=/r"]] * starts)


def test_cloud_tpu_vms(tmp_path):
    """One gcloud command to all workers, whose shell gets the options unharmed."""
    code, [call] = run(
        "tpu_vm.sh",
        "my-tpu",
        "--workdir=/mnt/a run",
        "--gin.Train.steps=7",
        folder=tmp_path,
        codes={"gcloud": ()},
        ZONE="us-east5-a",
    )
    assert code == 0
    *called, command = call
    assert called == [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu"),
        *("--zone=us-east5-a", "--worker=all"),
    ]
    script, *options = shlex.split(command.removeprefix("--command="))
    assert script == "~/jaxmoe/launch/run.sh"
    assert "--workdir=/mnt/a run" in options
    config = loaded(["python", "train.py", *options], 16)
    assert (config.mesh.platform, config.train.steps) == ("tpu", 7)
    assert run("tpu_vm.sh", folder=tmp_path, codes={})[0] == 2


def test_xpk(tmp_path):
    """Again after 75 and failures, not after 2; time to save after SIGTERM."""
    code, [call] = run(
        "xpk.sh",
        "first",
        "--workdir=/runs/first",
        folder=tmp_path,
        codes={"xpk": ()},
        CLUSTER="c",
        IMAGE="gcr.io/p/i",
    )
    assert code == 0
    assert call[:3] == ["xpk", "workload", "create"]
    options = dict(word[2:].split("=", 1) for word in call[3:])
    assert (options["workload"], options["cluster"]) == ("first", "c")
    assert set(options["restart-on-exit-codes"].split(",")) == {"1", "75"}
    assert int(options["max-restarts"]) > 1
    assert int(options["termination-grace-period-seconds"]) >= 120
    cores = int(re.fullmatch(r"v5p-(\d+)", options["tpu-type"])[1])
    words = shlex.split(options["command"].replace("&&", " "))
    assert loaded(words, cores // 2).mesh.platform == "tpu"
    assert run("xpk.sh", "first", folder=tmp_path, codes={})[0] == 2


def directives():
    """The #SBATCH lines."""
    text = (LAUNCH / "slurm.sbatch").read_text("utf-8")
    pairs = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    return dict(pairs)


@pytest.mark.parametrize(
    ("ended", "restarts", "code", "requeued"),
    [
        (0, 0, 0, False),
        (75, 50, 0, True),
        (2, 0, 2, False),
        (1, 3, 0, True),
        (1, 10, 1, False),
    ],
)
def test_slurm(tmp_path, ended, restarts, code, requeued):
    """One srun; then back to the queue after 75, never after 2, not for ever else."""
    found, calls = run(
        "slurm.sbatch",
        "--workdir=/r",
        folder=tmp_path,
        codes={"srun": (ended,), "scontrol": ()},
        SLURM_JOB_ID="123",
        SLURM_RESTART_COUNT=str(restarts),
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert found == code
    assert calls[1:] == [["scontrol", "requeue", "123"]] * requeued
    assert calls[0][0] == "srun"
    sizes = directives()
    devices = int(sizes["nodes"]) * int(sizes["gpus-per-node"])
    assert loaded(calls[0], devices).mesh.platform == "gpu"


@pytest.mark.parametrize("tasks", [1, 8])
def test_slurm_gives_every_process_its_gpus(monkeypatch, tasks):
    """With the template's one task per node, all GPUs; with eight, one each."""
    sizes = directives()
    nodes = int(sizes["nodes"])
    assert sizes["ntasks-per-node"] == "1"
    assert sizes["signal"].startswith("TERM@") and "requeue" in sizes
    for name, value in {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_PROCID": str(tasks),
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    place = cluster.find(Mesh())
    assert (place.num_processes, place.process_id) == (nodes * tasks, tasks)
    assert place.local_devices == (None if tasks == 1 else (0,))


def test_jobset():
    """Pods as there are hosts in the slice, each with its chips; the exit codes; what
    GKE tells the pods is found, at a port that is open; a volume that all share."""
    spec = manifest()["spec"]
    [job] = spec["replicatedJobs"]
    template = job["template"]["spec"]
    pod = template["template"]["spec"]
    [container] = pod["containers"]
    selector = pod["nodeSelector"]
    topology = selector["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    per_host = container["resources"]["limits"]["google.com/tpu"]
    hosts = template["completions"]
    assert template["parallelism"] == hosts == chips // per_host
    assert template["completionMode"] == "Indexed"
    assert "v5p" in selector["cloud.google.com/gke-tpu-accelerator"]

    assert pod["restartPolicy"] == "Never" and template["backoffLimit"] == 0
    [rule] = template["podFailurePolicy"]["rules"]
    codes = {
        "containerName": container["name"],
        "operator": "In",
        "values": [cli.EXIT_MISTAKE],
    }
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    policy = spec["failurePolicy"]
    assert policy["maxRestarts"] > 1
    never = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert policy["rules"] == [never]
    assert pod["terminationGracePeriodSeconds"] >= 120

    words = [*container["command"], *container["args"]]
    assert loaded(words, chips * job["replicas"]).mesh.platform == "tpu"
    workdir = next(w for w in words if w.startswith("--workdir=")).partition("=")[2]
    [mount] = container["volumeMounts"]
    assert Path(workdir).is_relative_to(mount["mountPath"])
    [volume] = pod["volumes"]
    assert volume["name"] == mount["name"] and "persistentVolumeClaim" in volume


def test_pods_of_the_jobset_find_each_other(monkeypatch):
    [job] = manifest()["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    hosts = template["completions"]
    names = [f"jaxmoe-workers-0-{n}.jaxmoe" for n in range(hosts)]
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(names))
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    for name in ("TPU_PROCESS_ADDRESSES", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    place = cluster.find(Mesh())
    assert (place.num_processes, place.process_id) == (hosts, 2)
    host, port = place.address
    assert host == names[0]
    [container] = template["template"]["spec"]["containers"]
    assert port in [each["containerPort"] for each in container["ports"]]
