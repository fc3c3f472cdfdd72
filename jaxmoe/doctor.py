# SPDX-License-Identifier: Apache-2.0
"""Floor 7. What is installed, which devices JAX finds, and what is wrong with either.

Nothing of JAX is imported here. Devices are looked for in a process of its own, which
is given up after a time: a driver that hangs, or a TPU that another process holds, does
not keep this one waiting. No file is changed, no lock removed, no process ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxmoe.cluster import has_tpu
from jaxmoe.versions import installed

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin"),
)
FLAGS = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
LOCK_FILE = "/tmp/libtpu_lockfile"
LEAST_FREE = 5 * 10**9  # bytes
_PROBE = """
import json, jax
def memory(device):
    try:
        return (device.memory_stats() or {}).get('bytes_limit')
    except Exception:
        return None
devices = jax.local_devices()
print(json.dumps({
    'platform': jax.default_backend(), 'device_count': jax.device_count(),
    'processes': jax.process_count(),
    'devices': [{'id': d.id, 'kind': d.device_kind, 'memory': memory(d)}
                for d in devices],
}))
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is looked at, so that a test can put something else in its place.

    Attributes:
      environment: Environment variables.
      versions: Installed packages.
      requirements: What the installed jax asks for, as in its metadata.
      accelerators: Names of accelerators that the operating system shows.
      timeout_s: For the search for devices.
      folder: Where a run would write.
    """

    environment: Mapping[str, str]
    versions: Mapping[str, str]
    requirements: tuple[str, ...]
    accelerators: tuple[str, ...]
    timeout_s: float
    folder: Path


def this_machine(folder: Path, timeout_s: float) -> Machine:
    """The machine on which this runs."""
    requirements: tuple[str, ...] = ()
    with contextlib.suppress(metadata.PackageNotFoundError):
        requirements = tuple(metadata.requires("jax") or ())
    return Machine(
        environment=dict(os.environ),
        versions=installed(PACKAGES),
        requirements=requirements,
        accelerators=tuple(_accelerators()),
        timeout_s=timeout_s,
        folder=folder,
    )


def _accelerators() -> Iterator[str]:
    """Accelerators by their device files."""
    if has_tpu():
        yield "tpu"
    if any(Path("/dev").glob("nvidia[0-9]*")):
        yield "gpu"


def examine(machine: Machine) -> dict[str, Any]:
    """Everything that is told, `problems` among it: sentences, the worst first."""
    found, failure = _probe(machine)
    free = shutil.disk_usage(_existing(machine.folder)).free
    problems = [
        *_flag_problems(machine),
        *_device_problems(machine, found, failure),
        *_version_problems(machine),
        *_late_flags(),
    ]
    if free < LEAST_FREE:
        problems.append(
            f"{machine.folder} has {free / 1e9:.1f} GB left. A checkpoint needs three"
            " times the bytes of the parameters. Make space, or name another --workdir."
        )
    return {
        "python": platform.python_version(),
        "versions": dict(machine.versions),
        **found,
        "environment": {n: machine.environment.get(n, "") for n in FLAGS},
        "folder": str(machine.folder),
        "free_bytes": free,
        "host_memory": _host_memory(),
        "processors": os.cpu_count(),
        "problems": problems,
    }


def _probe(machine: Machine) -> tuple[dict[str, Any], str]:
    """What JAX says of the devices; (nothing, why) if it does not come to that."""
    nothing = {"platform": None, "device_count": 0, "processes": 0, "devices": []}
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(
            command,
            env=dict(machine.environment),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=machine.timeout_s,
        )
    except subprocess.TimeoutExpired:
        return nothing, f"no answer within {machine.timeout_s:g} s"
    with contextlib.suppress(IndexError, ValueError):
        return json.loads(done.stdout.splitlines()[-1]), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    text = " ".join(lines[-3:])
    return nothing, text or f"the process ended with exit code {done.returncode}"


# What is wrong -----------------------------------------------------------------------


def _flag_problems(machine: Machine) -> Iterator[str]:
    for name in FLAGS:
        value = machine.environment.get(name, "")
        if strange := sorted({c for c in value if not c.isascii()}):
            shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in strange)
            yield (
                f"{name} contains {shown}, which is not ASCII. Flags begin with two"
                " plain hyphens; text from a web page often has another dash. Type"
                " it anew."
            )


def _device_problems(
    machine: Machine, found: Mapping[str, Any], failure: str
) -> Iterator[str]:
    if failure:
        if re.search(
            r"already in use|libtpu_lockfile|in use by", failure, re.IGNORECASE
        ):
            yield (
                f"the TPU is in use by another process: {failure}. {holder_in_words()}"
            )
        else:
            holder = f" {holder_in_words()}" if "tpu" in machine.accelerators else ""
            yield f"JAX could not find its devices: {failure}.{holder}"
        return
    asked = machine.environment.get("JAX_PLATFORMS", "").split(",")[0]
    if found["platform"] != "cpu" or asked == "cpu":
        return
    versions = machine.versions
    plugins = {
        "tpu": "libtpu" in versions,
        "gpu": any(name.startswith("jax-cuda") for name in versions),
    }
    for kind in machine.accelerators:
        extra = {"tpu": "jax[tpu]", "gpu": "jax[cuda13]"}[kind]
        reason = "it is installed but did not start" if plugins[kind] else "missing"
        yield (
            f"there is a {kind.upper()}, but JAX runs on the CPU. It needs {extra}:"
            f" {reason}. Run pip install -U '{extra}' and restart the runtime. With"
            f" Mesh.platform={kind!r} a run refuses to train on the CPU."
        )


def _version_problems(machine: Machine) -> Iterator[str]:
    """Packages that the installed jax does not go with, by its own requirements."""
    from packaging.requirements import Requirement

    told: set[str] = set()
    for wanted in map(Requirement, machine.requirements):
        here, extra = machine.versions.get(wanted.name), str(wanted.marker or "tpu")
        if here is None or wanted.name in told or not re.search("tpu|cuda", extra):
            continue
        if not wanted.specifier.contains(here, prereleases=True):
            told.add(wanted.name)
            yield (
                f"{wanted.name} {here} is installed, but jax"
                f" {machine.versions.get('jax', '?')} needs {wanted.name}"
                f"{wanted.specifier}. Run pip install -U jax and its extra together,"
                " and restart the runtime."
            )
    loaded = getattr(sys.modules.get("jax"), "__version__", None)
    if loaded and loaded != machine.versions.get("jax", loaded):
        yield (
            f"jax {loaded} is in use here, and {machine.versions['jax']} is installed."
            " Restart the runtime after pip."
        )


def _late_flags() -> Iterator[str]:
    """Flags that came after the start of a process which uses JAX, as in a notebook."""
    if "jax" not in sys.modules:
        return
    try:
        start = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return
    pairs = (item.partition("=") for item in start.split("\0"))
    then = {name: value for name, _, value in pairs}
    for name in FLAGS:
        if os.environ.get(name, "") != then.get(name, ""):
            yield (
                f"{name} was changed after this process began, and JAX is imported"
                " here. What comes after the first use of JAX is ignored in silence."
                " Set it in the first cell, before jax is imported, or restart."
            )


def holder_in_words() -> str:
    """Who holds the TPU, and how to free it."""
    holders = list(_holders())
    if not holders:
        lock = ""
        if Path(LOCK_FILE).exists():
            lock = (
                f" {LOCK_FILE} is left from a process that is gone; if no other one"
                " uses the TPU, you may remove it."
            )
        return f"No process of yours holds it.{lock}"
    names = "; ".join(f"process {pid} ({command})" for pid, command in holders)
    return f"It is held by {names}. End it, for instance with kill {holders[0][0]}."


def _holders() -> Iterator[tuple[int, str]]:
    """Other processes that have the TPU's device or lock file open."""
    wanted = re.compile(rf"/dev/accel\d+|/dev/vfio/\d+|{re.escape(LOCK_FILE)}")
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            links = {os.readlink(link) for link in (folder / "fd").iterdir()}
            if pid != os.getpid() and any(map(wanted.fullmatch, links)):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield pid, command.decode(errors="replace").strip()[:80]


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
