# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe overlap`: small traces whose figures are counted by hand.

Times of the traces are microseconds, those of the figures milliseconds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmoe import cli, overlap, trace_file, trace_kernels
from tests import helpers
from tests.traces import (
    COMBINE,
    DISPATCH,
    GEMM,
    NOTIFY,
    PYTORCH,
    described,
    event,
    figures,
    kernel,
    output,
)


def analysed(write_trace, events, *patterns, section=""):
    found = trace_kernels.check_patterns(patterns)
    return overlap.analyse(trace_file.read(write_trace(events)), found, section)


def part(busy, hidden, exposed, kernels=1):
    return {
        "kernels": kernels,
        "busy_ms": busy,
        "hidden_ms": hidden,
        "exposed_ms": exposed,
        "hidden_fraction": pytest.approx(hidden / busy),
    }


# The figures -------------------------------------------------------------------------


def test_pytorch(write_trace, capsys):
    """Unions over streams: nothing counts twice. A copy only lengthens the span."""
    found = figures(capsys, write_trace(PYTORCH))
    assert found["span_ms"] == 1.2
    assert found["compute_ms"] == 0.8
    assert found["communication_ms"] == 0.4
    assert found["hidden_ms"] == 0.2
    assert found["hidden_fraction"] == 0.5
    assert found["exposed_ms"] == 0.2
    assert found["classes"] == {
        "dispatch": part(0.2, 0.1, 0.1),
        "combine": part(0.2, 0.1, 0.1),
        "notify": part(0.05, 0.0, 0.05),
    }
    assert [device["device"] for device in found["devices"]] == ["GPU 0"]
    assert found["left_out_events"] == 0


def test_the_table(write_trace, capsys):
    lines = [line.split() for line in output(capsys, write_trace(PYTORCH)).splitlines()]
    assert ["GPU", "0", "1.20", "0.80", "0.40", "50.0%", "0.20"] in lines
    assert ["notify", "1", "0.05", "0.0%", "0.05"] in lines


def test_two_devices(write_trace, capsys):
    """A device is not hidden by what another one computes; the whole is the mean."""
    events = [
        kernel(GEMM, 0, 100),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 50, tid=9),
        kernel(GEMM, 0, 100, device=1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 50, device=1),
    ]
    found = figures(capsys, write_trace(events))
    assert [d["hidden_fraction"] for d in found["devices"]] == [1.0, 0.0]
    assert [d["span_ms"] for d in found["devices"]] == [0.1, 0.15]
    assert (found["span_ms"], found["hidden_fraction"]) == (0.125, 0.5)
    assert found["classes"] == {"all_reduce": part(0.05, 0.025, 0.025)}


def test_processes_are_told_apart(write_trace):
    """Merged files of two hosts have a device 0 each."""
    events = [kernel(GEMM, 0, 100), kernel(GEMM, 50, 100) | {"pid": 1000}]
    found = analysed(write_trace, events)
    assert [d.name for d in found.devices] == [
        "GPU 0 (process 0)",
        "GPU 0 (process 1000)",
    ]


def test_patterns(write_trace, capsys):
    """Patterns of the command line come first; 'compute' and 'ignore' take out."""
    file = write_trace(PYTORCH)
    whole = figures(capsys, file, r"--pattern=transfer=ep::\w+::(dispatch|combine)<")
    assert list(whole["classes"]) == ["transfer", "notify"]
    assert whole["classes"]["transfer"] == part(0.4, 0.2, 0.2, 2)
    less = figures(capsys, file, "--pattern=ignore=notify", "--pattern=compute=combine")
    assert list(less["classes"]) == ["dispatch"]
    assert less["compute_ms"] == 0.9


def test_no_communication(write_trace, capsys):
    found = figures(capsys, write_trace([kernel(GEMM, 0, 10)]))
    assert (found["communication_ms"], found["hidden_fraction"]) == (0, None)
    assert "no communication" in output(capsys, write_trace([kernel(GEMM, 0, 10)]))


CLASSES = {
    "dispatch": (DISPATCH,),
    "combine": (COMBINE,),
    "notify": (NOTIFY, "void dpsk::ep::cuda::get_dispatch_layout<256>(long*)"),
    "all_to_all": (
        *("all-to-all.3", "all_to_all", "%all-to-all-start.1", "ragged-all-to-all"),
        "ragged_all_to_all.2",
    ),
    "all_gather": (
        *("all-gather.7", "all_gather.1.clone", "ncclDevKernel_AllGather_RING_LL(a)"),
        "multimem_all_gather_kernel",
    ),
    "reduce_scatter": (
        *("reduce-scatter.1", "reduce_scatter", "psum_scatter.3", "all-reduce-scatter"),
        "ncclKernel_ReduceScatter_RING_LL_Sum_half",
    ),
    "all_reduce": (
        *("all-reduce", "psum_invariant.21", "pmax", "all-reduce-done.4"),
        "void ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
        *("one_shot_all_reduce_kernel", "void vllm::cross_device_reduce_1stage<bf16>"),
    ),
    "permute": (
        *("collective-permute-start", "ppermute.3", "send.1", "recv-done.2", "send"),
        *("ncclDevKernel_SendRecv(ncclDevKernelArgs)", "Memcpy PtoP", "MemcpyP2P"),
    ),
    "other": (
        *("collective-broadcast.1", "ncclDevKernel_Broadcast_RING_LL"),
        *("ncclDevKernel_Reduce_Sum_f32", "nvshmemi_transfer", "rcclGenericKernel"),
    ),
    "ignore": (
        *("while.12", "conditional", "call.3.clone", "copy-start.1", "slice-done"),
        *("async-done.4", "Memcpy DtoD (Device -> Device)", "Memset (Device)"),
        "MemcpyD2D",
    ),
    "compute": (
        *(GEMM, "fusion.12", "bitcast_gather_fusion", "all-gather_bitcast_fusion.3"),
        *("wrapped_reduce", "scatter.1", "sendable", "copy.3", "reduce_kernel<512>"),
        *("async-collective-fusion.1", "dot_general", "custom-call.4", "call_gemm"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in CLASSES.items() for name in names]
)
def test_names(kind, name, write_trace):
    """What the kernels of libraries and the instructions of XLA are taken for."""
    trace = trace_file.read(write_trace([kernel(name, 0, 1)]))
    found = trace_kernels.find(trace)
    assert found.classes[found.kind[0]] == kind


# The formats of jax.profiler ---------------------------------------------------------


def operation(name, ts, dur, device, **more):
    """An operation of JAX on a simulated device."""
    args = {"hlo_op": name, "device_ordinal": str(device), "hlo_module": "jit_f"}
    return event(name, ts, dur, pid=701, args=args, **more)


CPU = [
    *described("/host:CPU", {7: "tf_XLAPjRtCpuClient/1", 1: "python"}, pid=701),
    operation("while.3", 0, 1000, 0),  # holds all of device 0: computes nothing
    operation("dot.1", 0, 300, 0),
    operation("all-to-all.1", 200, 400, 0, tid=8),
    event("end: dot.1", 300, 1, pid=701),
    event("Rendezvous", 250, 300, pid=701, tid=8),
    operation("loop_by_another_name", 0, 1000, 1),  # holds a psum
    operation("dot.1", 0, 100, 1),
    operation("psum.7", 100, 100, 1),
    event("train", 0, 450, pid=701, tid=1, args={"step_num": "3"}),
    event("part", 500, 100, pid=701, tid=1),
    event("$array.py:1 f", 0, 450, pid=701, tid=1),
]


def test_cpu(write_trace, capsys):
    """Loops hide nothing of what is in them, whatever their name; a step of the host is
    a window of time, and what it cuts counts as far as it is inside."""
    found = figures(capsys, write_trace(CPU), "--section=^part$")
    first, second = found["devices"]
    assert (first["device"], second["device"]) == ("CPU 0", "CPU 1")
    assert (first["compute_ms"], first["exposed_ms"]) == (0.3, 0.3)
    assert first["classes"] == {"all_to_all": part(0.4, 0.1, 0.3)}
    assert (second["compute_ms"], second["exposed_ms"]) == (0.1, 0.1)
    assert set(found["sections"]) == {"train", "part"}
    train = found["sections"]["train"]
    assert (train["count"], train["span_ms"], train["compute_ms"]) == (1, 0.45, 0.2)
    assert train["exposed_ms"] == (0.15 + 0.1) / 2
    half = found["sections"]["part"]
    assert (half["compute_ms"], half["exposed_ms"]) == (0, 0.1)  # on device 0 alone


def test_cpu_without_numbers_of_devices(write_trace):
    """Threads are devices then: too little is hidden rather than too much."""
    events = [operation("dot", 0, 9, "?"), operation("psum", 0, 9, "?", tid=8)]
    found = analysed(write_trace, events)
    assert [d.figures.compute_ms for d in found.devices] == [0.009, 0]
    assert found.figures.communication.hidden_fraction == 0


TPU = [
    *described(
        "/device:TPU:0",
        {1: "Steps", 2: "XLA Modules", 3: "XLA Ops", 4: "Async XLA Ops"},
        pid=3,
    ),
    *described("/device:TPU:0 SparseCore 0", {1: "XLA Ops"}, pid=9),
    *described("/host:CPU", {1: "python"}, pid=701),
    event("12", 0, 1000, pid=3, tid=1),
    event("jit_step(1)", 0, 1000, pid=3, tid=2),
    event("while.1", 0, 1000, pid=3, tid=3, args={"hlo_category": "while"}),
    event("all-to-all-start.1", 0, 10, pid=3, tid=3),
    event("fusion.1", 10, 200, pid=3, tid=3),
    event("all-to-all-done.1", 300, 100, pid=3, tid=3),
    event("all-to-all-start.1", 400, 10, pid=3, tid=3),
    event("all-to-all-done.1", 410, 90, pid=3, tid=3),
    # Named unlike each other, but one of each.
    event("all-gather-start.8", 500, 10, pid=3, tid=3),
    event("fusion.2", 510, 90, pid=3, tid=3),
    event("all-gather-done.9", 600, 0, pid=3, tid=3),
    event("x.1", 700, 50, pid=3, tid=3, args={"hlo_category": "all-reduce"}),
    event("copy-done.4", 750, 50, pid=3, tid=3, args={"hlo_category": "copy-done"}),
    event("copy-start.4", 10, 700, pid=3, tid=4),
    event("fusion.9", 500, 500, pid=9, tid=1),
    event("reduce-scatter.1", 800, 100, pid=9, tid=1),
    event("dot.1", 0, 1000, pid=701, args={"hlo_op": "dot.1"}),
    event("train", 0, 5, pid=701, args={"step_num": "12"}),
]


def test_tpu(write_trace, capsys):
    """An exchange lasts from start to done: 0 to 400, 400 to 500, 500 to 600; besides
    700 to 750 by its category, and 800 to 900 on the SparseCore. What is computed
    there, waited for, copied, or said by the host hides nothing. Steps are those on
    the device."""
    found = figures(capsys, write_trace(TPU))
    assert [device["device"] for device in found["devices"]] == ["TPU 0"]
    assert found["compute_ms"] == 0.29
    assert found["communication_ms"] == 0.75
    assert found["classes"] == {
        "all_to_all": part(0.5, 0.2, 0.3, 4),
        "all_gather": part(0.1, 0.09, 0.01, 2),
        "all_reduce": part(0.05, 0, 0.05),
        "reduce_scatter": part(0.1, 0, 0.1),
    }
    assert list(found["sections"]) == ["12"]
    assert found["sections"]["12"]["exposed_ms"] == found["exposed_ms"]


def test_pairs_that_do_not_fit_stay_as_they_are(write_trace):
    names = ["all-gather-start.1", "all-gather-start.2", "all-gather-done.3"]
    events = [*described("/device:TPU:0", {3: "XLA Ops"}, pid=3)]
    events += [event(n, 100 * i, 10, pid=3, tid=3) for i, n in enumerate(names)]
    busy = analysed(write_trace, events).figures.communication.busy_ms
    assert busy == pytest.approx(0.03)


def gpu(*more):
    """A step of JAX on a GPU, launched long before it ran."""
    streams = {1: "Steps", 2: "XLA Ops", 13: "Stream #13(Compute)", 14: "Stream #14"}

    def on_gpu(name, ts, dur, tid, number):
        args = {"correlation_id": str(number), "hlo_op": name}
        return event(name, ts, dur, pid=1, tid=tid, args=args)

    def launch(number, ts):
        args = {"correlation_id": number}
        return event("cuLaunchKernel", ts, 1, pid=701, tid=1, args=args)

    return [
        *described("/device:GPU:0", streams, pid=1),
        *described("/host:CPU", {1: "python"}, pid=701),
        event("fusion.1", 0, 1000, pid=1, tid=2),
        on_gpu("gemm_fusion_dot", 100, 200, 13, 5),
        on_gpu("ncclDevKernel_AllGather_RING_LL", 200, 200, 14, 6),
        on_gpu("MemcpyD2D", 400, 100, 13, 7),
        on_gpu("gemm_fusion_dot", 600, 100, 13, 8),
        *(launch(number, 10 * number) for number in (5, 6, 7, 8)),
        *more,
    ]


def test_gpu(write_trace, capsys):
    """Streams count, the lines that are derived from them do not. Launches tell what a
    step holds, though it ended on the host before it ran."""
    step = event("train", 45, 20, pid=701, tid=1, args={"step_num": "1"})
    found = figures(capsys, write_trace(gpu(step)))
    assert [device["device"] for device in found["devices"]] == ["GPU 0"]
    assert (found["span_ms"], found["compute_ms"]) == (0.6, 0.3)
    assert found["classes"] == {"all_gather": part(0.2, 0.1, 0.1)}
    train = found["sections"]["train"]
    assert (train["span_ms"], train["compute_ms"]) == (0.3, 0.2)
    assert train["exposed_ms"] == 0.1


@pytest.mark.parametrize(
    "step",
    [
        event("train", 250, 100, pid=701, tid=9, args={"step_num": "1"}),
        event("train", 250, 100, pid=1, tid=1),  # the line of the device for steps
    ],
)
def test_gpu_steps_around_no_launch(step, write_trace, capsys):
    """They are windows of time, though launches are known."""
    train = figures(capsys, write_trace(gpu(step)))["sections"]["train"]
    assert (train["span_ms"], train["compute_ms"]) == (0.1, 0.05)
    assert (train["communication_ms"], train["exposed_ms"]) == (0.1, 0.05)


def test_pytorch_sections(write_trace, capsys):
    """A kernel belongs to the annotations around its launch; it is hidden under all
    that the device computes. The spans of two occurrences are added."""

    def launch(number, ts, tid=1):
        args = {"correlation": number}
        return event(
            "cudaLaunchKernel", ts, 1, pid=9, tid=tid, cat="cuda_runtime", args=args
        )

    def section(name, ts, dur, tid=1):
        return event(name, ts, dur, pid=9, tid=tid, cat="user_annotation")

    events = [
        kernel(GEMM, 1000, 100, number=1),
        kernel(COMBINE, 1050, 100, tid=8, number=2),
        kernel(COMBINE, 2000, 100, tid=8, number=3),
        kernel(GEMM, 2500, 100, number=4),
        kernel(GEMM, 3000, 100, number=55),  # launched before the profile began
        *(launch(number, 10 * number) for number in (1, 2, 3)),
        launch(4, 25, tid=2),
        section("combine", 15, 10),
        section("combine", 25, 10),
        section("all", 0, 100),
        section("empty", 0, 1),
    ]
    found = figures(capsys, write_trace(events))["sections"]
    assert set(found) == {"combine", "all"}
    assert found["combine"]["count"] == 2
    assert found["combine"]["span_ms"] == 0.2
    assert found["combine"]["compute_ms"] == 0
    assert found["combine"]["classes"] == {"combine": part(0.2, 0.05, 0.15, 2)}
    assert found["all"]["compute_ms"] == 0.1


def test_a_real_trace(tmp_path, capsys):
    """jax.profiler on 8 simulated devices: each has its collectives, by their kinds,
    and annotated steps. The folder is found by its newest trace."""
    mesh = helpers.mesh_of(8, 1)

    def body(x):
        for _ in range(2):
            x = jax.lax.psum(jnp.tanh(x @ x.T) @ x, "data") / 8
            x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        return jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    x = jnp.ones((512, 64))
    f(x).block_until_ready()
    jax.profiler.start_trace(tmp_path)
    for step in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            f(x).block_until_ready()
    jax.profiler.stop_trace()
    assert trace_file.find(tmp_path) == trace_file.find(tmp_path / "plugins")
    found = figures(capsys, str(tmp_path))
    assert [d["device"] for d in found["devices"]] == [f"CPU {n}" for n in range(8)]
    assert found["compute_ms"] > 0
    counts = {name: part["kernels"] for name, part in found["classes"].items()}
    assert counts == {"all_reduce": 6, "all_to_all": 6, "permute": 3}
    assert found["sections"]["train"]["count"] == 3
    assert found["sections"]["train"]["communication_ms"] == pytest.approx(
        found["communication_ms"]
    )
    assert 0 < found["communication_ms"] <= found["span_ms"]


# Figure ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.svg", "trace.png"])
def test_figure(name, write_trace, tmp_path, capsys):
    file = tmp_path / name
    output(capsys, write_trace(PYTORCH), f"--figure={file}")
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[name[-3:]]
    assert file.read_bytes().startswith(start)


# Intervals ---------------------------------------------------------------------------

MOMENTS = 40
SPANS = st.lists(
    st.tuples(st.integers(0, MOMENTS), st.integers(0, 9)).map(
        lambda pair: (pair[0], min(pair[0] + pair[1], MOMENTS))
    ),
    max_size=12,
)


def covered(spans):
    """The moments that intervals cover, one by one."""
    return {moment for start, end in spans for moment in range(int(start), int(end))}


@given(a=SPANS, b=SPANS)
def test_intervals(a, b):
    """Union, intersection and difference are those of the moments; in order."""
    of_a, of_b = (
        overlap.union(*np.array(spans, float).reshape(-1, 2).T) for spans in (a, b)
    )
    wanted = {
        "union": (of_a, covered(a)),
        "common": (overlap.common(of_a, of_b), covered(a) & covered(b)),
        "without": (overlap.without(of_a, of_b), covered(a) - covered(b)),
    }
    for found, moments in wanted.values():
        assert covered(found) == moments
        assert overlap.length(found) == len(moments)
        assert (found[:, 1] > found[:, 0]).all()
        assert (found[1:, 0] > found[:-1, 1]).all()


def test_help(capsys):
    assert cli.main(["overlap", "--help"]) == 0
    assert "overlap   tell how much communication" in capsys.readouterr().out
