# SPDX-License-Identifier: Apache-2.0
"""Floor 1. Several processes as one run: JAX's multi-controller runtime.

Every process runs the same program on its part of the devices. What one alone can see,
its data, its files, its mistakes, is made known to all here, so that all go on or all
stop. Only the first one writes and prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from jaxmoe import __version__, roll_call
from jaxmoe.cluster import Place, without_place
from jaxmoe.config import Config
from jaxmoe.config_base import ConfigError
from jaxmoe.versions import installed

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
_READY_S = 3600  # for the slowest to compile
_LEAVE_S = 3.0  # for the others to leave too
_SHARED_S = 10.0  # for a file to be seen by all: network file systems keep lists

_Result = TypeVar("_Result")


def start(
    place: Place, facts: Mapping[str, str], timeout_s: float, heartbeat_s: int
) -> None:
    """Starts the runtime, when all processes are there and run the same.

    Call it before the first use of a device. Where the runtime was started already, by
    whoever called this program, only the facts are compared.

    Args:
      place: Which process this is.
      facts: What must be the same in all, by name.
      timeout_s: How long to wait for all, in seconds.
      heartbeat_s: After how long a silence a process counts as dead, in seconds; the
        runtime then ends the others.

    Raises:
      StartError: if they have not all come in time.
      ConfigError: if they differ.
    """
    if jax.distributed.is_initialized():
        compare(facts)
        return
    roll_call.meet(place, facts, timeout_s)
    # What crosses between the simulated devices of several processes; accelerators
    # have ways of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",  # found already
        initialization_timeout=int(max(timeout_s, 60)),
        heartbeat_timeout_seconds=heartbeat_s,
    )


def several() -> bool:
    """Whether other processes take part. Starts no backend, unlike process_count()."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def joined() -> bool:
    """Whether the runtime was started, even where no backend could be."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return not several() or jax.process_index() == 0


def name() -> str:
    """This process in words; '' if it is alone."""
    if not several():
        return ""
    number, count = jax.process_index(), jax.process_count()
    return f"process {number} of {count} ({socket.gethostname()}, pid {os.getpid()})"


def wait_until_ready() -> None:
    """Returns when every process has come here, with its program compiled.

    Simulated devices wait 30 s for each other in their first exchange, no longer.
    """
    if several():
        from orbax.checkpoint import multihost

        barrier = multihost.get_barrier_sync_fn()
        barrier(key="jaxmoe-ready", timeout_ms=1000 * _READY_S)


# Agreement -------------------------------------------------------------------------


def gather(value: Any) -> list[Any]:
    """The value of every process, in order. All call it, at the same point.

    Args:
      value: Fit for JSON.
    """
    if not several():
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # Powers of two: few programs are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def all_of(here: bool) -> bool:
    """Whether it holds in every process. All call it, at the same point."""
    if not several():
        return here
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.bool_(here))))


def compare(facts: Mapping[str, str]) -> None:
    """All processes find out whether something differs, and stop together if so.

    Raises:
      ConfigError: naming what differs, and who has which value.
    """
    mine = [socket.gethostname(), os.getpid(), dict(facts)]
    arrivals = [
        roll_call.Arrival(number, *each) for number, each in enumerate(gather(mine))
    ]
    if lines := roll_call.differences(arrivals):
        raise roll_call.difference_error(lines)


def together(action: Callable[[], _Result]) -> _Result:
    """Runs what can fail in one process by the user's mistake; then it fails in all.

    Raises:
      ConfigError: of this process, or naming those in which it failed.
    """
    if not several():
        return action()
    result, failure = None, ""
    try:
        result = action()
    except ConfigError as error:
        failure = str(error)
    failures = gather(failure)
    if not any(failures):
        return result  # type: ignore[return-value]
    if len(set(failures)) == 1:
        raise ConfigError(failure)
    lines = [f"process {n}: {text}" for n, text in enumerate(failures) if text]
    raise ConfigError("\n".join(lines))


def check_shared(folder: Path) -> None:
    """All processes must write to one folder: checkpoints have parts of each.

    Raises:
      ConfigError: if another process does not see a file that the first one writes.
    """
    if not several():
        return
    file = folder / f".seen-by-all-{secrets.token_hex(4)}"
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    (file_name, firsts) = gather([file.name, str(folder)])[0]
    file = folder / file_name
    until_s = time.monotonic() + _SHARED_S
    while not (seen := file.exists()) and time.monotonic() < until_s:
        time.sleep(0.1)
    everyone = gather([socket.gethostname(), seen])
    if is_first():
        file.unlink(missing_ok=True)
    blind = [
        f"process {number} ({host})"
        for number, (host, sees) in enumerate(everyone)
        if not sees
    ]
    if blind:
        raise ConfigError(
            f"the folder {firsts} of process 0 is not that of {', '.join(blind)}. All"
            " processes write their parts of a checkpoint to one folder. Choose a"
            " --workdir on a file system that all machines have mounted."
        )


# What must be the same -------------------------------------------------------------


def facts_of(config: Config) -> dict[str, str]:
    """What decides the program: every field, the code, the packages."""
    found = {}
    config = without_place(config)
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            label = f"{type(part).__name__}.{field.name}"
            found[label] = repr(getattr(part, field.name))
    found["jaxmoe"] = f"{__version__} (code {_code_version()})"
    found["python"] = platform.python_version()
    return found | dict.fromkeys(_PACKAGES, "not installed") | installed(_PACKAGES)


def _code_version() -> str:
    """A checksum of the package's sources: a changed line is another version."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# The end ---------------------------------------------------------------------------


class LostError(RuntimeError):
    """A computation over all processes failed, as another one ended: exit code 1."""


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """What JAX raises when another process has gone becomes a LostError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several():
            raise
        reason = str(error).strip().splitlines()[0]
        raise LostError(
            f"{name()}: a computation over all processes failed ({reason}). All must be"
            " there to the end; one has probably gone, and its own output says why."
            " Start all again with the same command: the run goes on from its last"
            " checkpoint."
        ) from error


def leave(code: int) -> NoReturn:
    """Ends this process after a failure, without waiting for the others for minutes.

    Where all end, they take leave of each other first: the runtime of those who stay
    behind would end them with a stack trace.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    goodbye = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    goodbye.start()
    goodbye.join(_LEAVE_S)
    os._exit(code)
