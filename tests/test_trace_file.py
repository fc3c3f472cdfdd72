# SPDX-License-Identifier: Apache-2.0
"""Reading a trace: its forms, odd ones, mistakes, and large ones."""

import gzip
import json
import os
import subprocess
import sys
import time

import pytest

from jaxmoe import trace_file
from tests import helpers
from tests.traces import (
    COMBINE,
    DISPATCH,
    GEMM,
    PYTORCH,
    event,
    figures,
    kernel,
    output,
)

FORMS = {
    "plain": lambda events: json.dumps({"traceEvents": events}),
    "indented": lambda events: json.dumps({"traceEvents": events}, indent=1),
    "a list": json.dumps,
    "a list without its end": lambda events: json.dumps(events)[:-1],
    "a list that ends in a comma": lambda events: json.dumps(events)[:-1] + ",\n",
    "other keys": lambda events: json.dumps(
        {"a": [{"traceEvents": 1}], "traceEvents": events, "z": {"b": None}}
    ),
    "a byte order mark": lambda events: "\ufeff" + json.dumps(events),
}


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, chunk, write_trace, tmp_path, capsys, monkeypatch):
    """All forms of the file give the same, wherever its text is cut into pieces, and
    packed as well, whatever the name."""
    expected = figures(capsys, write_trace(PYTORCH))
    monkeypatch.setattr(trace_file, "_CHUNK", chunk)
    text = FORMS[form](PYTORCH).encode()
    for data in (text, gzip.compress(text)):
        file = tmp_path / "any.name"
        file.write_bytes(data)
        assert figures(capsys, str(file)) == expected


def test_pairs_of_begin_and_end(write_trace, capsys):
    """Nested on one thread, as events of the category 'kernel'."""

    def half(phase, name, ts):
        marks = {"cat": "kernel", "args": {"device": 0}} if phase == "B" else {}
        return {"ph": phase, "name": name, "pid": 0, "tid": 1, "ts": ts} | marks

    events = [
        half("B", GEMM, 0),
        half("B", "inner_kernel", 10),
        half("E", "inner_kernel", 20),
        half("E", GEMM, 100),
        half("E", "never begun", 200),
        half("B", "never ended", 300),
    ]
    found = figures(capsys, write_trace(events))
    assert (found["span_ms"], found["compute_ms"]) == (0.1, 0.1)
    assert found["left_out_events"] == 2


def test_odd_events(write_trace, capsys):
    """What has no usable time is left out and counted; the rest is read."""
    good = [kernel(GEMM, "0", "100"), kernel(DISPATCH, 50, 100) | {"tid": [7]}]
    lost = [
        kernel(GEMM, 0, -5),
        kernel(GEMM, float("nan"), 5),
        kernel(GEMM, 0, float("inf")),
        kernel(GEMM, "soon", 5),
        kernel(GEMM, True, 5),
        kernel(GEMM, 10**400, 5),
        {k: v for k, v in kernel(GEMM, 0, 5).items() if k != "dur"},
    ]
    other = [
        *(None, 7, "text", [1]),
        *({"ph": "M", "name": "process_name", "pid": 0}, {"ph": "M"}),
        {"ph": "M", "name": "thread_name", "pid": {}, "args": {}},
        {"ph": "i", "ts": 1, "name": "mark", "args": None},
        event(None, 0, 1, args=None),
        event("a\tname", 0, 1, args=3),
        kernel("zero_length", 120, 0),
    ]
    found = figures(capsys, write_trace(good + lost + other))
    assert found["left_out_events"] == len(lost)
    assert (found["compute_ms"], found["exposed_ms"]) == (0.1, 0.05)
    assert "7 events without a usable time" in output(capsys, write_trace(good + lost))


def test_large_timestamps(write_trace, capsys):
    """Microseconds since 1970 lose no more than a quarter of one."""
    late = [
        event | {"ts": event["ts"] + 1_740_461_679_471_346} if event else event
        for event in PYTORCH
    ]
    assert figures(capsys, write_trace(late)) == figures(capsys, write_trace(PYTORCH))


MISTAKES = [
    (["{tmp}/nowhere.json"], ("nowhere.json", "cannot be read", "No such file")),
    (["{tmp}/folder"], ("folder", "has no trace", "trace.json.gz")),
    (["{tmp}/hosts"], ("2 traces", "a.trace.json")),
    (["{tmp}/empty.json"], ("empty.json is empty",)),
    (["{tmp}/text.json"], ("text.json is not JSON",)),
    (["{tmp}/binary.pb"], ("binary.pb is not JSON", ".trace.json.gz")),
    (["{tmp}/deep.json"], ("deep.json is not JSON",)),
    (["{tmp}/number.json"], ("number.json is JSON but no trace",)),
    (["{tmp}/words.json"], ("words.json is JSON but no trace",)),
    (["{tmp}/nothing.json"], ("nothing.json is JSON but no trace",)),
    (["{tmp}/object.json"], ("object.json has no list traceEvents",)),
    (["{tmp}/mapping.json"], ("mapping.json has no list traceEvents",)),
    (["{tmp}/void.json"], ("void.json has no list traceEvents",)),
    (["{tmp}/half.json"], ("half.json", "in the middle of an event")),
    (["{tmp}/open.json"], ("open.json is cut off", "bracket")),
    (["{tmp}/tail.json"], ("tail.json is not JSON",)),
    (["{tmp}/comma.json"], ("comma.json is not JSON",)),
    (["{tmp}/cut.json.gz"], ("cut.json.gz is damaged or cut off",)),
    (["{tmp}/bad.json.gz"], ("bad.json.gz is damaged or cut off",)),
    (["{tmp}/host.json"], ("host.json has no kernels", "hlo_op")),
    (["{good}", "--pattern=nccl"], ("--pattern='nccl'", "CLASS=REGEX")),
    (["{good}", "--pattern=a b=x"], ("--pattern='a b=x'", "CLASS=REGEX")),
    (["{good}", "--pattern=a="], ("--pattern='a='", "CLASS=REGEX")),
    (["{good}", "--pattern=a=(x"], ("'(x'", "no regular expression", "backslash")),
    (["{good}", "--section=*"], ("'*'", "no regular expression")),
    (["{good}", "--figure=a.pdf"], ("a.pdf", "a.svg")),
    (["{good}", "--figure={tmp}/no/a.svg"], ("a.svg", "cannot be written")),
    ([], ("trace", "jaxmoe --help")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda x: " ".join(x))
def test_mistakes(arguments, parts, tmp_path, write_trace, capsys):
    """Exit code 2 and one message of fact, rule and remedy."""
    whole = json.dumps({"traceEvents": PYTORCH})
    packed = gzip.compress(whole.encode())
    files = {
        "empty.json": b"",
        "text.json": b"so many",
        "binary.pb": b"\x0a\xff\xfe\x00",
        "deep.json": b'{"a":' + b"[" * 100_000,
        "number.json": b"12",
        "words.json": b'["a", {"name": "x"}]',
        "nothing.json": b"[]",
        "object.json": b'{"events": [{"ph": "X"}]}',
        "mapping.json": b'{"traceEvents": {"ph": "X"}}',
        "void.json": b"{}",
        "half.json": whole[:200].encode(),
        "open.json": whole[:-2].encode(),
        "tail.json": whole[:-1].encode() + b", x",
        "comma.json": whole.replace("}, {", "} {").encode(),
        "cut.json.gz": packed[:-20],
        "bad.json.gz": packed[:30] + bytes(20) + packed[50:],
        "host.json": json.dumps([event("aten::mm", 0, 1, cat="cpu_op")]).encode(),
        "hosts/a.trace.json": b"[]",
        "hosts/b.trace.json": b"[]",
    }
    for folder in ("folder", "hosts"):
        (tmp_path / folder).mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    good = write_trace(PYTORCH, "good.json")
    arguments = [argument.format(tmp=tmp_path, good=good) for argument in arguments]
    helpers.assert_told(["overlap", *arguments], parts, capsys)


@pytest.mark.slow
def test_100_megabytes(tmp_path):
    """In 30 seconds and 2 GB, as a process of its own."""
    file = tmp_path / "large.json"
    names = [f"{GEMM}_{'x' * 100}_{n}" for n in range(50)] + [DISPATCH, COMBINE]
    with open(file, "w") as out:
        out.write('{"traceEvents": [')
        for number in range(380_000):
            name = names[number % len(names)]
            one = kernel(name, 10 * number, 15, tid=number % 3, number=number)
            out.write(f"{json.dumps(one)},\n")
        out.write(json.dumps(kernel(GEMM, 0, 1)) + "]}")
    assert file.stat().st_size > 100e6
    before_s = time.monotonic()
    code = (
        "from pathlib import Path; from jaxmoe import cli;"
        f"assert cli.main(['overlap', {str(file)!r}, '--json']) == 0;"
        "print(Path('/proc/self/status').read_text())"  # ru_maxrss counts the parent
    )
    command = [sys.executable, "-c", code]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - before_s < 30
    told, _, status = lines.partition("Name:")
    peak = status.split("VmHWM:")[1].split()[0]
    assert int(peak) < 2e6  # kilobytes
    found = json.loads(told.splitlines()[-1])
    assert found["classes"]["dispatch"]["kernels"] == 380_000 // 52


def test_the_newest_of_a_folder(tmp_path, write_trace):
    for age, name in enumerate(("b", "a", "c")):
        folder = tmp_path / "profile" / "plugins" / "profile" / name
        folder.mkdir(parents=True)
        file = folder / "host.trace.json.gz"
        file.write_bytes(b"")
        os.utime(file, (1000 - age, 1000 - age))
    assert trace_file.find(tmp_path).parent.name == "b"
