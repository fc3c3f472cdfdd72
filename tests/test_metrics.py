# SPDX-License-Identifier: Apache-2.0
"""Metrics: one valid line per logged step, whatever was killed or not finite."""

import io
import json
import math
import resource
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import metrics
from jaxmoe.metrics import MetricsWriter, Progress


def lines(workdir):
    """The file as it stands, each line through a parser that refuses NaN."""

    def refuse(name):
        raise ValueError(name)

    text = (workdir / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_one_object_per_step_with_the_step_first(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(10, {"loss": 2.5, "expert_load": [[1, 2], [3, 0]]})
        assert lines(tmp_path) == [
            {"step": 10, "loss": 2.5, "expert_load": [[1, 2], [3, 0]]}
        ]
        writer.write(20, {"loss": 2.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.splitlines()[1] == '{"step": 20, "loss": 2.0}'
    assert metrics.read(tmp_path) == lines(tmp_path)


def test_every_kind_of_number_is_plain(tmp_path):
    values = {
        "float32": np.float32(0.5),
        "bfloat16": jnp.bfloat16(0.25),
        "int64": np.int64(2**40),
        "device": jnp.float32(3.0),
        "array": np.arange(3, dtype=np.int32),
        "matrix": jnp.ones((1, 2)),
        "tuple": (1, np.float64(2.5)),
        "flag": np.bool_(True),
        "none": None,
    }
    with MetricsWriter(tmp_path) as writer:
        writer.write(np.int32(1), values)
    assert lines(tmp_path) == [
        {
            "step": 1,
            "float32": 0.5,
            "bfloat16": 0.25,
            "int64": 2**40,
            "device": 3.0,
            "array": [0, 1, 2],
            "matrix": [[1.0, 1.0]],
            "tuple": [1, 2.5],
            "flag": True,
            "none": None,
        }
    ]


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    bad = [math.nan, math.inf, -math.inf]
    with MetricsWriter(tmp_path) as writer:
        layers = [bad, jnp.array(bad), [np.float64(x) for x in bad]]
        writer.write(1, {"loss": np.float32(math.nan), "layers": layers})
    (line,) = lines(tmp_path)
    assert line["loss"] == "NaN"
    assert line["layers"] == [["NaN", "Infinity", "-Infinity"]] * 3
    (values,) = metrics.read(tmp_path)
    np.testing.assert_equal(
        values, {"step": 1, "loss": math.nan, "layers": [bad, bad, bad]}
    )
    assert math.isnan(float(line["loss"])), "as Python's float() reads it"


def test_a_resumed_run_reads_as_one(tmp_path):
    """Steps after the one gone on from are dropped, the others stay as they were."""
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        for step in (10, 20, 30):
            writer.write(step, {"loss": step / 3})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with MetricsWriter(tmp_path, resume_step=20) as writer:
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:2])
        writer.write(30, {"loss": 0.0})
    assert [line["step"] for line in metrics.read(tmp_path)] == [10, 20, 30]
    with MetricsWriter(tmp_path) as writer:
        writer.write(40, {"loss": 0.0})
    assert [line["step"] for line in metrics.read(tmp_path)] == [10, 20, 30, 40]
    with MetricsWriter(tmp_path, resume_step=0):
        pass
    assert metrics.read(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "tensorboard",
    ]


@pytest.mark.parametrize("cut", range(1, 40))
def test_half_a_line_at_the_end_is_left_out_and_not_written_to(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 10, "loss": 1.0}\n'
    half = '{"step": 20, "loss": 1.0, "x": "ä"}\n'.encode()
    path.write_bytes(whole.encode() + half[: -min(cut, len(half))])
    assert [line["step"] for line in metrics.read(tmp_path)] == [10]
    with MetricsWriter(tmp_path):
        assert path.read_text() == whole


def test_a_broken_line_inside_is_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n\0\0garbage\n{"step": "x"}\n{"loss": 1}\n{"step": 2}\n'
    )
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]
    assert [record.args[0] for record in caplog.records] == [2, 3, 4]


def test_what_is_not_a_number_is_refused(tmp_path):
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(TypeError, match="not a metric"),
    ):
        writer.write(1, {"loss": object()})


def test_inactive_writes_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", active=False, resume_step=3) as writer:
        writer.write(1, {"loss": 1.0})
        writer.summary({"loss": 1.0})
    assert not (tmp_path / "run").exists()
    assert metrics.read(tmp_path / "run") == []


def test_summary_is_replaced_whole(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.summary({"loss": np.float32(1.5)})
        writer.summary({"loss": math.inf, "evaluation": {"accuracy": jnp.float32(0.5)}})
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == {"loss": "Infinity", "evaluation": {"accuracy": 0.5}}
    assert [p.name for p in tmp_path.glob("summary*")] == ["summary.json"]


def test_tensorboard_gets_scalars_and_the_range_of_lists(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricsWriter(tmp_path, resume_step=0) as writer:
        values = {
            "loss": jnp.bfloat16(2.5),
            "expert_load": [[1, 2], [9]],
            "name": "x",
        }
        writer.write(10, values)
    (path,) = (tmp_path / "tensorboard").iterdir()
    content, found, position = path.read_bytes(), {}, 0
    while position < len(content):  # length, its checksum, the event, its checksum
        size = int.from_bytes(content[position : position + 8], "little")
        event = Event.FromString(content[position + 12 : position + 12 + size])
        found |= {
            value.tag: (event.step, value.simple_value) for value in event.summary.value
        }
        position += 16 + size
    assert found == {
        "loss": (10, 2.5),
        "expert_load/min": (10, 1.0),
        "expert_load/mean": (10, 4.0),
        "expert_load/max": (10, 9.0),
    }


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path):
    """For metrics.jsonl and TensorBoard's file; nothing hangs, then or at the end."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        for limit, values in (
            (size + 5, {"a": "x" * 99}),
            (1 << 12, dict.fromkeys("abcd", 1)),
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with pytest.raises(
                    OSError, match=f"metrics cannot be written.*{tmp_path}"
                ):
                    for _ in range(1000):
                        writer.write(2, values)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert len(lines(tmp_path)) == len(metrics.read(tmp_path))
            assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    writer.close()


def test_a_folder_that_went_away_is_an_error(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"loss": 1.0})
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(OSError, match=r"metrics cannot be written.*metrics\.jsonl"):
            writer.write(2, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_two_writers_in_one_second_keep_their_board_files(tmp_path):
    for step in range(3):
        with MetricsWriter(tmp_path, resume_step=step) as writer:
            writer.write(step, {"loss": 1.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_tensorboardx_is_imported_when_first_needed():
    code = (
        "import sys, jaxmoe.metrics;"
        "assert not {'jax', 'tensorboardX', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Statistics --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "max_over_mean", "cv", "dead"),
    [
        ([[4, 4, 4, 4]], 1.0, 0.0, 0),
        ([[16, 0, 0, 0]], 4.0, math.sqrt(3), 3),
        ([[6, 2], [4, 4]], 1.5, 0.25, 0),  # the worst layer; the mean of 0.5 and 0
        ([[8, 8, 0, 0, 0, 0, 0, 0]], 4.0, math.sqrt(3), 6),
        ([[0, 0], [6, 2]], 1.5, 0.5, 0),  # a layer that counted nothing is left out
        ([[0, 0], [0, 0]], 1.0, 0.0, 0),
        (np.zeros((0, 4)), 1.0, 0.0, 0),
        (np.zeros((2, 0)), 1.0, 0.0, 0),
        (np.full((2, 2), 2**31 - 1, np.int32), 1.0, 0.0, 0),  # no overflow
        ([[1, math.nan]], math.nan, math.nan, 0),
        ([[1, math.inf]], math.nan, math.nan, 0),
    ],
)
def test_load_statistics(load, max_over_mean, cv, dead):
    expected = {
        "load_max_over_mean": max_over_mean,
        "load_cv": cv,
        "dead_experts": dead,
    }
    found = metrics.load_statistics(np.asarray(load))
    assert found == pytest.approx(expected, nan_ok=True)
    assert all(type(value) is float for value in found.values())


def test_load_statistics_by_layer_has_an_entry_per_layer():
    """An even layer, one with everything on expert 0, one where nothing was counted."""
    found = metrics.load_statistics_by_layer(np.array([[2, 2], [4, 0], [0, 0]]))
    assert found == {
        "load_max_over_mean_by_layer": [1.0, 2.0, 1.0],
        "load_cv_by_layer": [0.0, 1.0, 0.0],
        "dead_experts_by_layer": [0.0, 1.0, 0.0],
    }


# Terminal ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


VALUES = {"loss": 2.34567, "tokens_per_s": 45123.0, "load_max_over_mean": 1.234}


def test_a_log_file_gets_plain_lines_at_intervals():
    stream = io.StringIO()
    with Progress(1000, 100, stream=stream) as progress:
        for step in range(101, 1001):
            progress.step(step)
            if step % 10 == 0:
                progress.log(step, VALUES)
        progress.message("saved")
    printed = stream.getvalue().splitlines()
    assert len(printed) == 11
    assert printed[0].startswith(
        "step  110/1000  11%  loss 2.3457, 45.1k tokens/s, balance 1.23, "
    )
    assert printed[0].endswith(" left")
    assert (
        printed[-2] == "step 1000/1000 100%  loss 2.3457, 45.1k tokens/s, balance 1.23"
    )
    assert printed[-1] == "saved"
    assert not set("\r\b\x1b\t") & set(stream.getvalue())


def test_slow_steps_give_a_line_per_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(100_000, stream=stream)
    for step in range(1, 100):
        now[0] += 3.0
        progress.log(step, {"loss": math.nan})
    printed = stream.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in printed[:4]] == [1, 5, 9, 13]
    assert printed[0] == "step      1/100000   0%  loss nan, 83:19:57 left"


def test_a_terminal_gets_a_live_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(100, 40, stream=stream) as progress:
        progress.step(41)
        progress.log(50, VALUES)
        progress.message("saved checkpoint 50")
    shown = stream.getvalue()
    assert "loss 2.3457, 45.1k tokens/s, balance 1.23" in shown
    assert "50/100" in shown
    assert "\r" in shown
    assert "saved checkpoint 50\n" in shown
    assert shown.endswith("\n")


def test_a_dumb_terminal_and_other_processes(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Progress(10, stream=stream).log(10, {"loss": 1})
    assert stream.getvalue() == "step 10/10 100%  loss 1.0000\n"
    silent = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    with Progress(10, stream=silent, active=False) as progress:
        progress.step(1)
        progress.log(10, {"loss": 1})
        progress.message("x")
    assert silent.getvalue() == ""


def test_a_run_of_no_steps_prints_without_dividing_by_zero():
    stream = io.StringIO()
    Progress(0, stream=stream).log(0, {})
    assert stream.getvalue() == "step 0/0 100%\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0"), (950, "950"), (999.6, "1.00k"), (45123, "45.1k"), (99960, "100k")),
        *((1.2e6, "1.20M"), (3.4e9, "3.40G"), (5.6e12, "5600G"), (math.nan, "nan")),
    ],
)
def test_short_numbers(number, text):
    assert metrics._short(number) == text
