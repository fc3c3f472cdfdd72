# SPDX-License-Identifier: Apache-2.0
"""What a pipelined step costs, beside the plain step with the same global batch.

    python benchmarks/pipeline.py [--steps 5] [--schedules dualpipe,1f1b]
                                  [--gin.X.y=VALUE ...]

On 8 simulated devices: the plain step on data 4 x expert 2, the pipelined ones on
data 1 x expert 2 x pipe 4 with 16 microbatches. 8 layers of width 256, every second one
with experts, sequences of 128, no recomputation. All devices share the processors, so
that a bubble costs nothing here: what is measured is the work that a schedule adds.
Steps of all programs are run in turns; figures are medians.

The last line is JSON:
  cpu_ratio   schedule -> processor seconds of a step over those of the plain step
  peak_bytes  schedule (and 'plain') -> arguments, results and temporaries of a device
  compile_s   microbatches -> seconds to compile the dualpipe step
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from jaxmoe import gin_config
from jaxmoe.data.loader import Loader
from jaxmoe.mesh import make_mesh, resolve_sizes, start_backend
from jaxmoe.train_step import Setup

MODEL = (
    "Model.num_layers=8",
    "Model.width=256",
    "Model.num_heads=4",
    "Model.ffn_width=1024",
    "Model.layer_pattern='dense,moe'",
    "Model.sequence_length=128",
    "Model.num_patches=0",
    "Model.init_std=0.02",
    "Model.vocab_size=1024",
    "MoE.num_experts=8",
    "MoE.top_k=2",
    "MoE.capacity_factor=1.25",
    "Data.source='text'",
    "Data.lm_weight=1.0",
    "Data.text_denoise_weight=0.0",
)
BATCH = "Data.batch_size=64"
PLAIN = ("Mesh.data=4", "Mesh.expert=2", "Mesh.pipe=1")
PIPED = ("Mesh.data=1", "Mesh.expert=2", "Mesh.pipe=4")
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "dualpipe", "dualpipev")


class Program:
    """A compiled train step with a state and a batch."""

    def __init__(self, bindings: tuple[str, ...]):
        config = gin_config.load((), [*MODEL, *bindings]).config
        start_backend(config.mesh)
        mesh = make_mesh(resolve_sizes(config, jax.device_count()))
        setup = Setup(config, mesh, int(config.model.vocab_size))
        step = setup.train_step()
        lowered = step.lower(setup.abstract_state, setup.abstract_batch())
        before_s = time.perf_counter()
        self.compiled: Any = lowered.compile()
        self.compile_s = time.perf_counter() - before_s
        loader = Loader(
            config.data, model=config.model, microbatches=setup.microbatches
        )
        self.batch = setup.put_batch(next(loader))
        loader.close()
        self.state = setup.initial_state()

    def cpu_seconds(self) -> float:
        """Processor seconds of one step."""
        before_s = time.process_time()
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        assert np.isfinite(metrics.grad_norm)
        return time.process_time() - before_s

    def peak_bytes(self) -> int:
        """What a device needs at most, by the compiler's own account."""
        memory = self.compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return held + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def main() -> None:
    arguments = sys.argv[1:]
    steps = int(_take(arguments, "--steps", "5"))
    schedules = _take(arguments, "--schedules", ",".join(SCHEDULES)).split(",")
    _, bindings, rest = gin_config.split_arguments(arguments)
    assert not rest, rest
    programs = {"plain": Program((*PLAIN, BATCH, *bindings))}
    for name in schedules:
        schedule = f"Pipeline.schedule='{name}'"
        count = "Pipeline.microbatches=16"
        programs[name] = Program((*PIPED, schedule, count, BATCH, *bindings))
        print(f"{name}: compiled in {programs[name].compile_s:.1f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(steps + 1):
        for name, program in programs.items():
            spent = program.cpu_seconds()
            if turn:  # the first step of a program is not like the others
                seconds[name].append(spent)
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    print({name: round(value, 3) for name, value in medians.items()}, flush=True)
    figures = {
        "cpu_ratio": {name: medians[name] / medians["plain"] for name in schedules},
        "peak_bytes": {
            name: program.peak_bytes() for name, program in programs.items()
        },
        "compile_s": {},
    }
    for count in (8, 64):
        more = f"Pipeline.microbatches={count}", "Data.batch_size=128"
        program = Program((*PIPED, "Pipeline.schedule='dualpipe'", *more, *bindings))
        figures["compile_s"][str(count)] = program.compile_s
    print(json.dumps(figures))


def _take(arguments: list[str], name: str, default: str) -> str:
    """Removes an option and its value."""
    if name not in arguments:
        return default
    at = arguments.index(name)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


if __name__ == "__main__":
    main()
