# SPDX-License-Identifier: Apache-2.0
"""Small traces, and what `jaxmoe overlap` prints of them.

Times of the traces are microseconds, those of the figures milliseconds.
"""

import json

from jaxmoe import cli

DISPATCH = "void deep_ep::internode::dispatch<false, 8>(int4*, deep_ep::Meta)"
COMBINE = "void dpsk::ep::internode::combine<false>(int4*)"
NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int const*)"
GEMM = "sm90_xmma_gemm_bf16"


def event(name, ts, dur, *, pid=0, tid=7, **more):
    return {
        **{"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur},
        **more,
    }


def kernel(name, ts, dur, *, tid=7, device=0, number=None):
    """A kernel as the PyTorch profiler writes it."""
    args = {"device": device, "stream": tid}
    args |= {} if number is None else {"correlation": number}
    return event(name, ts, dur, pid=device, tid=tid, cat="kernel", args=args)


def described(process, threads, *, pid):
    """The names of a process and its threads."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    for tid, name in threads.items():
        args = {"name": name}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}


# Computes 0 to 400 and 600 to 1000. Dispatch 300 to 500: 100 hidden, 100 exposed.
# Combine 900 to 1100: 100 and 100. Notify 1050 to 1100 on another stream: exposed, and
# in the union already there.
PYTORCH = [
    kernel(GEMM, 0, 400),
    kernel("elementwise_kernel", 100, 200, tid=8),
    kernel(GEMM, 600, 400),
    kernel(DISPATCH, 300, 200, tid=23),
    kernel(COMBINE, 900, 200, tid=23),
    kernel(NOTIFY, 1050, 50, tid=27),
    event("Memcpy HtoD (Pageable -> Device)", 1100, 100, cat="gpu_memcpy"),
    event("aten::mm", 0, 2000, pid=99, tid=1, cat="cpu_op"),
    {},
]


def write(folder, events, name="trace.json"):
    """Writes a trace and returns its path."""
    file = folder / name
    file.write_text(json.dumps({"traceEvents": events}))
    return str(file)


def output(capsys, *arguments):
    assert cli.main(["overlap", *arguments]) == 0
    return capsys.readouterr().out


def figures(capsys, *arguments):
    return json.loads(output(capsys, *arguments, "--json").splitlines()[-1])
