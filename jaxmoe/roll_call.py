# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The processes of a run meet before JAX starts: all there, all the same.

Process 0 listens at the coordinator's address, the others go there and say who they
are and what they are about to run. When all have come, or when time is over, process 0
tells everybody the outcome, and the port is JAX's. Two lines of JSON per process cross.

JAX waits too, but cannot say who is missing: its runtime ends the process with a stack
trace. And processes that run different programs hang, or crash later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.cluster import Place
from jaxmoe.config_base import ConfigError

_GREETING = "jaxmoe"
_LINE_TIMEOUT_S = 10.0  # for one process to say its line, once connected
_RETRY_S = 0.2
_GRACE_S = 5.0  # for the answer, after the time is over
_MOST_BYTES = 1 << 20
_MOST_DIFFERENCES = 20


class StartError(RuntimeError):
    """The processes did not come together: exit code 1."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What one process says of itself.

    Attributes:
      process_id: its number.
      host: name of its machine.
      pid: its number there.
      facts: what must be the same everywhere, by name.
    """

    process_id: int
    host: str
    pid: int
    facts: Mapping[str, str]

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.host})"


def meet(place: Place, facts: Mapping[str, str], timeout_s: float) -> list[Arrival]:
    """Waits for all processes and compares them.

    Args:
      place: Which one this is.
      facts: What must be the same in all processes, by name.
      timeout_s: How long to wait, in seconds.

    Returns:
      On process 0 all processes in order, on the others this one alone.

    Raises:
      StartError: if they have not all come in time.
      ConfigError: if two differ, or have the same number; the message is the same in
        all processes that came.
    """
    facts = {"the number of processes": str(place.num_processes), **facts}
    me = Arrival(place.process_id, socket.gethostname(), os.getpid(), facts)
    until_s = time.monotonic() + timeout_s
    if place.process_id == 0:
        with _listener(place) as listener:
            return _call(place, me, listener, until_s, timeout_s)
    return _answer(place, me, until_s, timeout_s)


def differences(arrivals: Sequence[Arrival]) -> list[str]:
    """A line for each fact that is not the same everywhere, saying who has which."""
    lines = []
    for name in dict.fromkeys(name for each in arrivals for name in each.facts):
        holders: dict[str, list[Arrival]] = {}
        for each in arrivals:
            holders.setdefault(each.facts.get(name, "absent"), []).append(each)
        if len(holders) > 1:
            values = [f"{value} in {_who(who)}" for value, who in holders.items()]
            lines.append(f"{name} is {', '.join(values)}")
    if len(lines) > _MOST_DIFFERENCES:
        rest = len(lines) - _MOST_DIFFERENCES
        lines = [*lines[:_MOST_DIFFERENCES], f"and {rest} more"]
    return lines


def difference_error(lines: Sequence[str]) -> ConfigError:
    """The mistake of running different things, a line for each."""
    return ConfigError(
        "the processes of this run differ:\n  " + "\n  ".join(lines) + "\n"
        "All run one program on parts of one array, so they must have the same"
        " configuration, code, packages and data. Start all with the same command, from"
        " the same installation."
    )


# Process 0 -------------------------------------------------------------------------


def _listener(place: Place) -> socket.socket:
    port = place.address[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at port {port} of Mesh.coordinator="
            f"{place.coordinator!r}: {error.strerror}. The port must be free on the"
            " machine of process 0. End what uses it, or choose another port."
        ) from error


def _call(
    place: Place, me: Arrival, listener: socket.socket, until_s: float, timeout_s: float
) -> list[Arrival]:
    """Collects the others, and tells them how it went."""
    arrived: dict[int, Arrival] = {0: me}
    lines: dict[int, socket.socket] = {}
    failure: ConfigError | StartError | None = None
    with contextlib.ExitStack() as connections:
        while len(arrived) < place.num_processes and not failure:
            try:
                listener.settimeout(max(until_s - time.monotonic(), 1e-3))
                line = connections.enter_context(listener.accept()[0])
            except TimeoutError:
                break
            new = _read_arrival(line)
            if new is None:  # a port scanner, a health check
                line.close()
                continue
            number = new.process_id
            if number in arrived and not (number in lines and _has_gone(lines[number])):
                failure = _doubled(arrived[number], new)
                _send(line, _outcome(failure))
                continue
            arrived[number], lines[number] = new, line
        failure = failure or _verdict(place, arrived, timeout_s)
        for line in lines.values():
            _send(line, _outcome(failure))
    if failure:
        raise failure
    return [arrived[number] for number in sorted(arrived)]


def _verdict(
    place: Place, arrived: Mapping[int, Arrival], timeout_s: float
) -> ConfigError | StartError | None:
    """What is wrong with those who came, if anything."""
    # They may differ in what tells why others are not there.
    if lines := differences([arrived[number] for number in sorted(arrived)]):
        return difference_error(lines)
    if len(arrived) == place.num_processes:
        return None
    missing = sorted(set(range(place.num_processes)) - set(arrived))
    return StartError(
        f"{len(arrived)} of {place.num_processes} processes arrived at"
        f" {place.coordinator} within {timeout_s:g} s (Mesh.start_timeout_s); missing:"
        f" {_numbers(missing)}. A run begins when all processes are there. See whether"
        " they were started and can reach that address, or set Mesh.num_processes to"
        " those there are."
    )


def _doubled(old: Arrival, new: Arrival) -> ConfigError:
    return ConfigError(
        f"two processes have the number {new.process_id}: pid {old.pid} on {old.host}"
        f" and pid {new.pid} on {new.host}. Each process of a run has its own. Give"
        " each its own Mesh.process_id."
    )


def _outcome(failure: ConfigError | StartError | None) -> dict[str, str]:
    if failure is None:
        return {}
    key = "mistake" if isinstance(failure, ConfigError) else "failure"
    return {key: str(failure)}


def _read_arrival(connection: socket.socket) -> Arrival | None:
    connection.settimeout(_LINE_TIMEOUT_S)
    message = _receive(connection)
    try:
        if message is None or message["greeting"] != _GREETING:
            return None
        facts = {str(name): str(value) for name, value in message["facts"].items()}
        number = int(message["process_id"])
        return Arrival(number, str(message["host"]), int(message["pid"]), facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _has_gone(connection: socket.socket) -> bool:
    """Whether who waited there has ended (and may have been started again)."""
    try:
        connection.settimeout(0.0)
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# The others ------------------------------------------------------------------------


def _answer(
    place: Place, me: Arrival, until_s: float, timeout_s: float
) -> list[Arrival]:
    """Goes to process 0 until it is there, and waits for what it says."""
    reason = ""
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            with socket.create_connection(place.address, min(left_s, 10.0)) as line:
                _send(line, {"greeting": _GREETING, **dataclasses.asdict(me)})
                line.settimeout(max(until_s - time.monotonic(), 0.0) + _GRACE_S)
                answer = _receive(line)
        except OSError as error:  # it is not there yet, or its name is not known yet
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if answer is None:  # it went away in between: it may come again
            reason = "the connection ended"
            time.sleep(_RETRY_S)
            continue
        if "mistake" in answer:
            raise ConfigError(str(answer["mistake"]))
        if "failure" in answer:
            raise StartError(str(answer["failure"]))
        return [me]
    raise StartError(
        f"process 0 did not answer at {place.coordinator} within {timeout_s:g} s"
        f" (Mesh.start_timeout_s; {reason or 'no connection'}), and this is process"
        f" {place.process_id} of {place.num_processes}. A run begins when all processes"
        " are there. See whether process 0 was started, and whether this machine can"
        " reach that address."
    )


# Lines of JSON ---------------------------------------------------------------------


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who has gone needs no answer
        connection.settimeout(_LINE_TIMEOUT_S)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One line; None if what comes is none, or nothing does."""
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as file:
        line = file.readline(_MOST_BYTES)
        message = json.loads(line) if line.endswith(b"\n") else None
        return message if isinstance(message, dict) else None
    return None


def _who(arrivals: Sequence[Arrival]) -> str:
    """'process 3 (host)', or the numbers of several."""
    if len(arrivals) == 1:
        return str(arrivals[0])
    return _numbers([each.process_id for each in arrivals])


def _numbers(numbers: Sequence[int]) -> str:
    """'process 3', or 'processes 0, 2-7': runs are drawn together."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(str(n) for n in run) for run in runs)
    return f"process{'es' if len(numbers) > 1 else ''} {text}"
