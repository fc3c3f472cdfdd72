# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Which process of how many this one is, and where they meet.

JAX finds this out too, but tells nobody before it has started, and a start in which a
process is missing aborts the others with a stack trace. So it is found here first, from
the same variables and services; then the processes call their roll (`roll_call`), and
JAX is told what was found.

Looked at in this order, each for what is still unknown:
  the fields Mesh.coordinator, Mesh.num_processes, Mesh.process_id
  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
  Slurm (inside srun), Open MPI (mpirun), Kubernetes' completion index
  Cloud TPU: the variables of GKE, else the metadata server of the VM
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import urllib.request
from collections.abc import Iterator

from jaxmoe.config import Config, Mesh
from jaxmoe.config_base import mistake

# Ports of process 0 where nothing else is given: those that JAX uses there.
_TPU_PORT = 8482
_SLURM_PORTS = (61440, 4096)  # the first, and how many a job may fall on

_METADATA_TIMEOUT_S = 5
_NAMES = {
    "coordinator": ("Mesh.coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("Mesh.num_processes", "JAX_NUM_PROCESSES"),
    "process_id": ("Mesh.process_id", "JAX_PROCESS_ID"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """One process among several.

    Attributes:
      coordinator: 'HOST:PORT', where process 0 listens.
      num_processes: all of them.
      process_id: of this one, from 0 on.
      local_devices: numbers of the GPUs that are this process's; None: all it sees.
      source: who said so.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None
    source: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@dataclasses.dataclass(kw_only=True)
class _Found:
    """What one source says; None where it is silent."""

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: tuple[int, ...] | None = None


def find(mesh: Mesh) -> Place | None:
    """The place of this process; None if it is alone.

    Raises:
      ConfigError: if something is known of several processes, but not all, or if
        Mesh.distributed=True and nothing is.
    """
    if mesh.distributed is False:
        return None
    known = _Found(source="")
    sources: list[str] = []
    for found in _sources(mesh):
        new = [
            name
            for name in (*_NAMES, "local_devices")
            if getattr(known, name) is None and getattr(found, name) is not None
        ]
        for name in new:
            setattr(known, name, getattr(found, name))
        sources += [found.source] if new else []
        if all(getattr(known, name) is not None for name in _NAMES):
            break
    missing = [name for name in _NAMES if getattr(known, name) is None]
    # A completion index alone is what any indexed job of Kubernetes has.
    alone = known.coordinator is None and known.num_processes in (None, 1)
    if mesh.distributed == "auto" and alone and mesh.process_id == "auto":
        return None
    if missing:
        raise mistake(
            f"Mesh.distributed={mesh.distributed!r}: of the processes of this run"
            f" {_listed(missing)} unknown"
            + (f" ({', '.join(sources)} said the rest)" if sources else ""),
            "every process needs the address of process 0, the number of processes and"
            " its own number",
            "Set "
            + ", ".join(" or ".join(_NAMES[name]) for name in missing)
            + ", or Mesh.distributed=False for one process",
        )
    assert known.coordinator and known.num_processes and known.process_id is not None
    return _checked(known, known.num_processes, known.process_id, ", ".join(sources))


def without_place(config: Config) -> Config:
    """The configuration as it is in all processes, and in a later start elsewhere."""
    names = ("distributed", *_NAMES)
    usual = {name: getattr(Mesh, name) for name in names}
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **usual))


def _checked(known: _Found, num_processes: int, process_id: int, source: str) -> Place:
    coordinator = str(known.coordinator)
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise mistake(
            f"Mesh.coordinator={coordinator!r} ({source}) is not an address",
            "it is HOST:PORT of process 0, with a port that is free there",
            "Set Mesh.coordinator='HOST:12345', for example",
        )
    if process_id >= num_processes:
        raise mistake(
            f"Mesh.process_id={process_id} of Mesh.num_processes={num_processes}"
            f" ({source}) does not exist",
            f"processes are numbered from 0 to {num_processes - 1}",
            "Give every process its own number",
        )
    return Place(
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        local_devices=known.local_devices,
        source=source,
    )


def _sources(mesh: Mesh) -> Iterator[_Found]:
    """One source after another; the last ones cost a request to a server."""
    yield _Found(
        source="the configuration",
        coordinator=mesh.coordinator or None,
        num_processes=None if mesh.num_processes == "auto" else mesh.num_processes,
        process_id=None if mesh.process_id == "auto" else mesh.process_id,
    )
    yield _Found(
        source="the environment",
        coordinator=os.environ.get("JAX_COORDINATOR_ADDRESS"),
        num_processes=_number("JAX_NUM_PROCESSES"),
        process_id=_number("JAX_PROCESS_ID"),
    )
    for source in (_slurm, _open_mpi, _gke_tpu, _kubernetes, _tpu_vm):
        if found := source():
            yield found


def _slurm() -> _Found | None:
    """A step of `srun`. A batch script or a shell of `salloc` is one process."""
    tasks, rank = _number("SLURM_STEP_NUM_TASKS"), _number("SLURM_PROCID")
    nodes, job = os.environ.get("SLURM_STEP_NODELIST"), _number("SLURM_JOB_ID")
    if tasks is None or tasks == 1 or rank is None or not nodes or job is None:
        return None
    first, count = _SLURM_PORTS
    port = _number("JAX_COORDINATOR_PORT") or first + job % count
    return _Found(
        source="Slurm",
        coordinator=f"{first_node(nodes)}:{port}",
        num_processes=tasks,
        process_id=rank,
        local_devices=_slurm_gpu(),
    )


def first_node(nodes: str) -> str:
    """The first of a list as Slurm writes it: 'n[001-004,7],m1' gives 'n001'."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _slurm_gpu() -> tuple[int, ...] | None:
    """The GPU of this task, where tasks share a node and Slurm did not deal them out.

    One task on a node takes all of its GPUs. (JAX would take the first alone.)
    """
    local, node = _number("SLURM_LOCALID"), _number("SLURM_NODEID")
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    dealt_out = visible is not None and "," not in visible
    if local is None or node is None or node >= len(counts) or counts[node] == 1:
        return None
    return None if dealt_out else (local,)


def _open_mpi() -> _Found | None:
    size, rank = _number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_RANK")
    if size is None or size == 1 or rank is None:
        return None
    return _Found(source="Open MPI", num_processes=size, process_id=rank)


def _kubernetes() -> _Found | None:
    index = _number("JOB_COMPLETION_INDEX")
    return None if index is None else _Found(source="Kubernetes", process_id=index)


def _gke_tpu() -> _Found | None:
    """The variables that GKE gives to pods with TPUs."""
    names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get(
        "TPU_WORKER_HOSTNAMES"
    )
    worker = _number("TPU_WORKER_ID")
    if not names or worker is None:
        return None
    return _tpu("GKE", names.split(","), worker, dict(os.environ))


def _tpu_vm() -> _Found | None:
    """What the metadata server says to a Cloud TPU VM."""
    if not has_tpu() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return None
    try:
        names = _metadata("worker-network-endpoints").split(",")
        worker = int(_metadata("agent-worker-number"))
        pairs = (line.partition(":") for line in _metadata("tpu-env").splitlines())
        values = {name.strip(): value.strip(" '") for name, _, value in pairs}
    except (OSError, ValueError):  # no Cloud TPU VM
        return None
    # Each is a host's name, or NAME:ID:IP.
    hosts = [name.split(":")[2] if name.count(":") == 2 else name for name in names]
    return _tpu("Cloud TPU", hosts, worker, values)


def _tpu(
    source: str, hosts: list[str], worker: int, values: dict[str, str]
) -> _Found | None:
    """Processes of one slice, or of several that MEGASCALE_... variables describe."""
    try:
        slices = int(values.get("MEGASCALE_NUM_SLICES") or 1)
        slice_id = int(values.get("MEGASCALE_SLICE_ID") or 0)
    except ValueError:
        slices, slice_id = 1, 0
    if len(hosts) * slices == 1:
        return None
    host = (values.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).split(":")[0]
    return _Found(
        source=source,
        coordinator=f"{host}:{_number('JAX_COORDINATOR_PORT') or _TPU_PORT}",
        num_processes=len(hosts) * slices,
        process_id=worker + slice_id * len(hosts),
    )


def has_tpu() -> bool:
    """Whether this machine has the device files of a TPU."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def _metadata(name: str) -> str:
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # Never through a proxy: it would answer for another machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_METADATA_TIMEOUT_S) as answer:
        return answer.read().decode()


def _number(name: str) -> int | None:
    """A variable of the environment that holds a whole number."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise mistake(
            f"the environment variable {name}={json.dumps(text)} is not a number",
            "it tells how many processes there are, or which one this is",
            f"Set {name} right, or Mesh.distributed=False for one process",
        )
    return int(text)


def _listed(names: list[str]) -> str:
    words = [name.replace("_", " ").replace("num ", "number of ") for name in names]
    return " and ".join(words) + (" are" if len(words) > 1 else " is")
