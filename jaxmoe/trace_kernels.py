# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Which events of a trace are kernels, on which device, and what they do.

Kernels are told as the profilers write them:

- PyTorch: events of the category 'kernel', copies and fills on a device;
- JAX on GPU: the streams of the processes '/device:GPU:N';
- JAX on TPU: the lines 'XLA Ops' and 'Async XLA Ops' of '/device:TPU:N'; there an
  exchange lasts from its '-start' to its '-done';
- JAX on CPU: events with an `hlo_op`, each with the number of its simulated device.

Operations that only hold or await others (loops, branches, '-start' and '-done' of
anything else), copies and fills are neither communication nor computation.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.config_base import mistake
from jaxmoe.trace_file import Line, Trace

COMPUTE, IGNORE = "compute", "ignore"  # classes of what is no communication

_XLA = r"^%?(?!.*fusion)(ragged[-_])?"
_DEEPEP = r"\b(deep_ep|dpsk::ep)::"
_NCCL = r"(?i:nccl|rccl)\w*"
_DIRECT = r"(one_shot|two_shot|multimem)\w*"

# The first pattern that is found in a kernel's name decides. Sources: kernel names of
# DeepEP, NCCL and PyTorch's symmetric memory; instructions of HLO and names of JAX.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("dispatch", _DEEPEP + r"\w+::dispatch\b"),
    ("combine", _DEEPEP + r"\w+::combine\b"),
    ("notify", _DEEPEP),
    ("all_to_all", f"{_XLA}all[-_]to[-_]all|{_NCCL}AllToAll"),
    ("all_gather", f"{_XLA}all[-_]gather|{_NCCL}AllGather|{_DIRECT}all_?gather"),
    (
        "reduce_scatter",
        f"{_XLA}((all[-_])?reduce[-_]scatter|psum[-_]scatter)"
        f"|{_NCCL}ReduceScatter|{_DIRECT}reduce_?scatter",
    ),
    (
        "all_reduce",
        f"{_XLA}(all[-_]reduce|psum|pmax|pmin)"
        f"|{_NCCL}AllReduce|{_DIRECT}all_?reduce|cross_device_reduce",
    ),
    (
        "permute",
        f"{_XLA}(collective[-_]permute|ppermute|(send|recv)(-done)?(\\.|$))"
        f"|{_NCCL}SendRecv|^(?i:memcpy) ?(PtoP|P2P)",
    ),
    (
        "other",
        f"{_XLA}(collective|async-collective)[-_]|\\b{_NCCL}(Kernel|Broadcast|Reduce)"
        r"|(?i:nvshmem)\w*|mscclpp",
    ),
)
_NEITHER = re.compile(
    r"^%?(while|conditional|call|cond|infeed|outfeed|[\w-]+-(start|done))"
    r"([.:]\w+)*$|^(?i:mem(cpy|set))"
)
_STREAM, _OPS, _ASYNC = "Stream", "XLA Ops", "Async XLA Ops"
_DEVICE = re.compile(r"/device:(\w+:\d+)(.*)")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Columns over all events of a trace; those that are no kernels have device -1.

    Attributes:
      devices: Their names.
      classes: Names of what kernels do; the first two are 'compute' and 'ignore'.
      start_ms: Since the first kernel.
      end_ms: Likewise; of an asynchronous exchange when it is done.
      kind: Index of the class.
      device: Index of the device.
      process: The device of a process of the trace, as index.
    """

    devices: list[str]
    classes: list[str]
    start_ms: np.ndarray
    end_ms: np.ndarray
    kind: np.ndarray
    device: np.ndarray
    process: dict[int | str, int]

    @property
    def computes(self) -> np.ndarray:
        """Whether an event computes, bool; only kernels can be asked."""
        return self.kind == 0

    @property
    def communicates(self) -> np.ndarray:
        """Whether an event communicates, bool; only kernels can be asked."""
        return self.kind > 1


def check_patterns(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Patterns from the texts CLASS=REGEX.

    Raises:
      ConfigError: if one has another form, or is no regular expression.
    """
    found = []
    for text in pairs:
        name, mark, pattern = text.partition("=")
        if not (mark and pattern and re.fullmatch(r"\w+", name)):
            raise mistake(
                f"--pattern={text!r} is no pattern",
                "it is CLASS=REGEX with a class of letters, digits and underscores",
                "Write, for example, --pattern=all_to_all=my_exchange_kernel",
            )
        check_regex("--pattern", pattern)
        found.append((name, pattern))
    return tuple(found)


def check_regex(option: str, pattern: str) -> None:
    """Checks a regular expression.

    Raises:
      ConfigError: if it is none.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise mistake(
            f"{option} has {pattern!r}, which is no regular expression ({error})",
            "it has to be one of Python's module re",
            "Put a backslash before each of []()*+?.{}|^$ that stands for itself",
        ) from error


def find(trace: Trace, patterns: Sequence[tuple[str, str]] = ()) -> Kernels:
    """Finds and classifies the kernels of a trace.

    Args:
      trace: The events.
      patterns: (class, regular expression), looked for before `PATTERNS`; the classes
        'compute' and 'ignore' take kernels out of communication.

    Raises:
      ConfigError: if there is no kernel.
    """
    where = _place(trace)
    on_device = where.device >= 0
    if not on_device.any():
        raise mistake(
            f"{trace.path} has no kernels",
            "kernels are PyTorch's events of the category 'kernel', the device lines of"
            " jax.profiler, or on CPU its events with an hlo_op",
            "Profile with device activities on, while a compiled step runs",
        )
    patterns = (*patterns, *PATTERNS)
    names = dict.fromkeys((COMPUTE, IGNORE, *(name for name, _ in patterns)))
    classes = list(names)
    kind = _kinds(trace, patterns, classes)[trace.name]
    kind[where.only_exchange & (kind == 0)] = 1
    # Counted from the first kernel: microseconds since 1970 leave few digits.
    origin = trace.start_us[on_device].min()
    start, end = ((x - origin) / 1e3 for x in (trace.start_us, trace.end_us))
    found = Kernels(where.names, classes, start, end, kind, where.device, where.process)
    _join_pairs(trace, found)
    _drop_containers(trace, found)
    return found


# Where events ran --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where events ran.

    Attributes:
      names: Of the devices.
      device: Index per event, -1 where it is no kernel.
      only_exchange: Per event: on a line where nothing computes.
      process: The device of a process, as index.
    """

    names: list[str]
    device: np.ndarray
    only_exchange: np.ndarray
    process: dict[int | str, int]


def _place(trace: Trace) -> _Place:
    """Finds the kernels: PyTorch's, else those of device lines, else those on CPU."""
    names: dict[Any, str] = {}
    device = np.full(len(trace.name), -1)
    only_exchange = np.zeros(len(trace.name), bool)
    kernel = np.array([c.lower() in _KERNELS for c in trace.categories], bool)
    chosen = kernel[trace.category] if len(trace.name) else only_exchange
    process: dict[int | str, int] = {}
    if not chosen.any() and any(map(_is_device, trace.lines)):
        return _device_lines(trace)
    on_cpu = not chosen.any()
    if on_cpu:
        chosen = trace.hlo
    chosen = np.flatnonzero(chosen)
    pairs = np.stack([trace.line[chosen], trace.device[chosen]], axis=1)
    pairs, pair = np.unique(pairs, axis=0, return_inverse=True)
    keys: dict[Any, int] = {}
    of_pair = np.zeros(len(pairs), np.int64)
    for place, (number_of_line, number) in enumerate(pairs.tolist()):
        line = trace.lines[number_of_line]
        if on_cpu and number < 0:  # a device for each thread: rather too many
            key = line.process, "line", number_of_line
            name = line.thread_name or f"thread {number_of_line}"
        else:
            if number < 0 and isinstance(line.process, int):
                number = line.process
            key = line.process, number
            name = line.label or f"{'CPU' if on_cpu else 'GPU'} {max(number, 0)}"
        names[key] = name
        of_pair[place] = keys.setdefault(key, len(keys))
        if not on_cpu:
            process.setdefault(line.process, keys[key])
    device[chosen] = of_pair[pair.reshape(-1)]
    count = collections.Counter(names.values())
    unique = [
        f"{name} (process {key[0]})" if count[name] > 1 else name
        for key, name in names.items()
    ]
    return _Place(unique, device, only_exchange, process)


def _is_device(line: Line) -> bool:
    return _DEVICE.search(line.process_name) is not None


def _device_lines(trace: Trace) -> _Place:
    """Kernels of jax.profiler on GPU or TPU, from the lines of their devices."""
    found: dict[int | str, tuple[str, str]] = {}
    for line in trace.lines:
        if match := _DEVICE.search(line.process_name):
            found.setdefault(line.process, (match[1].replace(":", " "), match[2]))
    process: dict[int | str, int] = {}
    names: list[str] = []
    for pid, (name, part) in sorted(found.items(), key=lambda x: (bool(x[1][1]), x[1])):
        if part and name in names:  # a SparseCore belongs to the device of its name
            process[pid] = names.index(name)
            continue
        process[pid] = len(names)
        names.append(f"{name} (process {pid})" if name in names else name)
    streams = {
        line.process for line in trace.lines if line.thread_name.startswith(_STREAM)
    }
    of_line = np.full(len(trace.lines), -1)
    only_exchange = np.zeros(len(trace.lines), bool)
    for number, line in enumerate(trace.lines):
        if line.process in process:
            is_stream = line.thread_name.startswith(_STREAM)
            if is_stream or (
                line.process not in streams and line.thread_name in (_OPS, _ASYNC)
            ):
                of_line[number] = process[line.process]
            part = found[line.process][1]
            only_exchange[number] = line.thread_name == _ASYNC or bool(part)
    return _Place(names, of_line[trace.line], only_exchange[trace.line], process)


# What kernels do ---------------------------------------------------------------------


def _kinds(
    trace: Trace, patterns: Sequence[tuple[str, str]], classes: list[str]
) -> np.ndarray:
    """The index of the class of every name."""
    compiled = [(classes.index(name), re.compile(text)) for name, text in patterns]

    def kind(name: tuple[str, str]) -> int:
        for number, pattern in compiled:
            if any(pattern.search(word) for word in name):
                return number
        return int(any(_NEITHER.search(word) for word in name if word))

    return np.array([kind(name) for name in trace.names], np.int64)


def _join_pairs(trace: Trace, events: Kernels) -> None:
    """Lets a '-start' last until the end of its '-done', on one line.

    Both have the same number behind their names, or there are as many of the one as of
    the other and they come in the same order. Others stay as they are.
    """
    halves: dict[int, tuple[str, str, str]] = {}
    for number, (name, _) in enumerate(trace.names):
        if match := re.match(r"%?([\w-]+)-(start|done)((?:\.\w+)*)$", name):
            halves[number] = match[1], match[2], match[3]
    names = np.array([n in halves for n in range(len(trace.names))], bool)
    index = np.flatnonzero(
        (events.device >= 0) & names[trace.name] & events.communicates
    )
    index = index[np.argsort(events.start_ms[index], kind="stable")]
    place = {int(event): at for at, event in enumerate(index)}

    def in_order(halves: dict[str, list[int]]) -> list[int]:
        events = itertools.chain.from_iterable(halves.values())
        return sorted(events, key=place.__getitem__)

    groups: dict[Any, dict[str, dict[str, list[int]]]] = {}
    for event in index:
        base, half, number = halves[int(trace.name[event])]
        group = groups.setdefault((int(trace.line[event]), base), {})
        group.setdefault(half, {}).setdefault(number, []).append(int(event))
    for group in groups.values():
        starts, dones = group.get("start", {}), group.get("done", {})
        if set(starts) != set(dones):
            starts, dones = {"": in_order(starts)}, {"": in_order(dones)}
            if len(starts[""]) != len(dones[""]):
                continue
        for number, first in starts.items():
            waiting = collections.deque(first)
            for done in dones[number]:
                if waiting and events.start_ms[waiting[0]] <= events.start_ms[done]:
                    start = waiting.popleft()
                    events.end_ms[start] = max(
                        events.end_ms[start], events.end_ms[done]
                    )


def _drop_containers(trace: Trace, events: Kernels) -> None:
    """A computing operation with communication inside it on its own line is a loop or
    call under another name: left in, it would hide all that it holds."""
    on_device = events.device >= 0
    exchange = np.flatnonzero(on_device & events.communicates)
    keys = trace.line * (events.device.max() + 2) + events.device
    for key in np.unique(keys[exchange]):
        inner = exchange[keys[exchange] == key]
        inner = inner[events.end_ms[inner] > events.start_ms[inner]]
        inner = inner[np.argsort(events.start_ms[inner], kind="stable")]
        outer = np.flatnonzero((keys == key) & on_device & events.computes)
        first_end = np.minimum.accumulate(events.end_ms[inner][::-1])[::-1]
        at = np.searchsorted(events.start_ms[inner], events.start_ms[outer])
        ends = np.append(first_end, np.inf)[at]
        events.kind[outer[ends <= events.end_ms[outer]]] = 1
