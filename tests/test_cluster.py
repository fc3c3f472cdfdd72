# SPDX-License-Identifier: Apache-2.0
"""Which process of how many: from fields, variables, Slurm, Kubernetes, Cloud TPU."""

import dataclasses
import http.server
import os
import threading

import pytest

from jaxmoe import cluster
from jaxmoe.cluster import find, first_node
from jaxmoe.config import Config, ConfigError, Mesh

PREFIXES = ("JAX_", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "GCE_", "JOB_COMPLETION")

SLURM = {
    "SLURM_JOB_ID": "8193",
    "SLURM_STEP_NODELIST": "node[007-008,11]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
GKE = {"TPU_WORKER_HOSTNAMES": "a-0.svc,a-1.svc", "TPU_WORKER_ID": "1"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """No cluster, whatever the tests run in."""
    for name in list(os.environ):
        if name.startswith((*PREFIXES, "CUDA_VISIBLE_DEVICES")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, "has_tpu", lambda: False)


def place(mesh=None, **environment):
    """What is found where the environment has these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = find(mesh or Mesh())
    if found is None:
        return None
    return (
        found.coordinator,
        found.num_processes,
        found.process_id,
        found.local_devices,
        found.source,
    )


def told(mesh, **environment):
    """The message where that cannot be."""
    with pytest.raises(ConfigError) as error:
        place(mesh, **environment)
    return str(error.value)


def test_alone():
    """Nothing speaks of others: 'auto' is one process; True is a mistake that says what
    is missing."""
    assert place() is None
    assert place(Mesh(distributed=False), **SLURM) is None
    text = told(Mesh(distributed=True))
    assert "coordinator and number of processes and process id are unknown" in text
    for name in ("Mesh.coordinator", "JAX_NUM_PROCESSES", "Mesh.process_id"):
        assert name in text


def test_fields_and_variables():
    """Fields win over variables; one completes the other."""
    mesh = Mesh(coordinator="ten:1", num_processes=3, process_id=2)
    assert place(mesh) == ("ten:1", 3, 2, None, "the configuration")
    variables = {
        "JAX_COORDINATOR_ADDRESS": "[::1]:77",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert place(**variables) == ("[::1]:77", 2, 1, None, "the environment")
    mixed = place(Mesh(process_id=0), **variables)
    assert mixed == ("[::1]:77", 2, 0, None, "the configuration, the environment")
    assert cluster.Place(
        coordinator="[::1]:77",
        num_processes=2,
        process_id=0,
        local_devices=None,
        source="",
    ).address == ("::1", 77)


@pytest.mark.parametrize(
    ("mesh", "environment", "parts"),
    [
        (Mesh(coordinator="a:1"), {}, ["number of processes and process id are"]),
        (Mesh(num_processes=2), {}, ["coordinator and process id are unknown"]),
        (
            Mesh(coordinator="a:1", num_processes=2),
            {},
            ["process id is unknown (the configuration said the rest)"],
        ),
        (Mesh(), {"JAX_COORDINATOR_ADDRESS": "a:1"}, ["JAX_NUM_PROCESSES"]),
        (
            Mesh(),
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            ["coordinator is unknown (Open MPI said the rest)"],
        ),
        (
            Mesh(coordinator="a:1", num_processes=2, process_id=2),
            {},
            ["Mesh.process_id=2 of Mesh.num_processes=2", "from 0 to 1"],
        ),
        *(
            (Mesh(coordinator=c, num_processes=2, process_id=0), {}, [f"{c!r}", "HOST"])
            for c in ("host", ":1", "host:", "host:0", "host:70000", "host:x")
        ),
        (Mesh(), {"JAX_NUM_PROCESSES": "two"}, ['JAX_NUM_PROCESSES="two"']),
    ],
)
def test_half_of_it_is_a_mistake(mesh, environment, parts):
    """Never one process for want of an address: who speaks of several means it."""
    text = told(mesh, **environment)
    assert all(part in text for part in parts), text


def test_slurm():
    """A step of srun; the port follows from the job as JAX chooses it. Where tasks
    share a node each takes one GPU, unless Slurm has dealt them out; a task alone on
    its node takes all."""
    want = ("node007:61441", 6, 3, (1,), "Slurm")
    assert place(**SLURM) == want
    assert place(**SLURM, CUDA_VISIBLE_DEVICES="0,1") == want
    assert place(**SLURM, CUDA_VISIBLE_DEVICES="2")[3] is None
    alone = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1,3", "SLURM_LOCALID": "0"}
    assert place(**alone)[3] is None
    assert place(**SLURM, JAX_COORDINATOR_PORT="99")[0] == "node007:99"
    # A batch script, or a shell of salloc for six tasks, is one process.
    assert place(**(SLURM | {"SLURM_STEP_NUM_TASKS": "1"})) is None
    assert place(SLURM_JOB_ID="1", SLURM_NTASKS="6", SLURM_PROCID="0") is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[001-015],m2", "n001"),
        ("n[001,007-015]", "n001"),
        ("n[3]", "n3"),
        ("rack[1-2]-gpu,m", "rack1-gpu"),
    ],
)
def test_first_node(nodes, first):
    assert first_node(nodes) == first


def test_kubernetes():
    """An indexed job gives the number; the manifest says the rest."""
    mesh = Mesh(coordinator="run-0-0.run:8476", num_processes=4)
    got = place(mesh, JOB_COMPLETION_INDEX="3")
    assert got == ("run-0-0.run:8476", 4, 3, None, "the configuration, Kubernetes")
    assert place(JOB_COMPLETION_INDEX="0") is None, "any indexed job has an index"


def test_open_mpi():
    mesh = Mesh(coordinator="a:1")
    got = place(mesh, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")
    assert got == ("a:1", 2, 1, None, "the configuration, Open MPI")


def test_tpus_in_gke():
    """One slice, and the second host of the second of three slices."""
    assert place(**GKE) == ("a-0.svc:8482", 2, 1, None, "GKE")
    slices = {
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "b-0.svc:8081",
    }
    assert place(**GKE, **slices) == ("b-0.svc:8482", 6, 3, None, "GKE")
    one = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert place(**one) is None, "a host with TPUs of its own, as in a notebook"


class Metadata(http.server.BaseHTTPRequestHandler):
    answers: dict[str, str] = {}  # noqa: RUF012 - set by the test

    def do_GET(self):
        assert self.headers["Metadata-Flavor"] == "Google"
        text = self.answers.get(self.path.rpartition("/")[2])
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    """A metadata server; yields its address and its answers."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Metadata.answers = {}
    yield f"127.0.0.1:{server.server_port}", Metadata.answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_cloud_tpu_vm(metadata, monkeypatch):
    """Workers, own number and slices as the VM's metadata server gives them, in both
    forms; asked only where there is a TPU."""
    address, answers = metadata
    answers |= {
        "worker-network-endpoints": "x:1:10.0.0.4,y:2:10.0.0.5",
        "agent-worker-number": "1",
        "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'\nWORKER_ID: '1'\n",
    }
    assert place(GCE_METADATA_IP=address) is None, "no TPU is here"
    monkeypatch.setattr(cluster, "has_tpu", lambda: True)
    want = ("10.0.0.4:8482", 2, 1, None, "Cloud TPU")
    assert place(GCE_METADATA_IP=address) == want
    assert place(GCE_METADATA_IP=address, TPU_SKIP_MDS_QUERY="1") is None
    answers["worker-network-endpoints"] = "host-a,host-b"
    answers["tpu-env"] += "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    answers["tpu-env"] += "MEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9'\n"
    assert place(GCE_METADATA_IP=address)[:3] == ("10.9.9.9:8482", 4, 3)
    answers.pop("agent-worker-number")
    assert place(GCE_METADATA_IP=address) is None, "a TPU, but no Cloud TPU VM"


def test_what_is_saved_names_no_place():
    """config.gin of a run starts anywhere: it has no address and no number."""
    mesh = Mesh(coordinator="a:1", num_processes=2, process_id=1, distributed=True)
    assert cluster.without_place(Config(mesh=mesh)) == Config()
    kept = dataclasses.replace(mesh, data=4, start_timeout_s=9)
    assert cluster.without_place(Config(mesh=kept)).mesh == Mesh(
        data=4, start_timeout_s=9
    )
