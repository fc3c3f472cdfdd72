# SPDX-License-Identifier: Apache-2.0
"""Floor 7. Operations of matrix products: of a traced step, and those a model needs.

Counted are products only, a multiplication and an addition each, as model FLOPs are.
Loops count as often as they turn, branches of a tick as often as the table runs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from jaxmoe import config_derived
from jaxmoe.config import Config
from jaxmoe.pipeline.execute import Work


@dataclasses.dataclass(frozen=True)
class Flops:
    """Of one step on one device.

    Attributes:
      step: mean over the ranks of the pipeline.
      works: of each branch of a tick; empty without a pipeline.
    """

    step: float
    works: tuple[float, ...] = ()


def step_flops(
    jaxpr: Jaxpr,
    *,
    devices: int,
    even_rows: int,
    works: tuple[list[Work], np.ndarray] | None = None,
    heads: int = 0,
) -> Flops:
    """Counts a traced train step.

    Args:
      jaxpr: of the whole step.
      devices: of the mesh; products outside of shard_map are shared by them.
      even_rows: rows that the experts of a device get when the load is even.
      works: of the pipeline, as `execute.list_works` gives them.
      heads: ticks in which a rank runs the head, over all ranks of a pipe.
    """
    if works is None:
        return Flops(_count(jaxpr, even_rows, devices, None))
    kinds, work_of = works
    ticks, ranks = work_of.shape
    found: list[tuple[float, ...]] = []

    def special(equation: Any) -> float | None:
        if equation.primitive.name != "scan" or equation.params["length"] != ticks:
            return None
        body = equation.params["jaxpr"].jaxpr
        steps = _steps_of(body, [bool(work.kinds) for work in kinds])
        if steps is None:
            return None
        head, works, rest = steps
        of_head = _count(head, even_rows, 1, None)
        inner = [_count(w, even_rows, 1, None) if w else 0.0 for w in works]
        found.append(tuple(inner))
        each_tick = sum(_equation(e, even_rows, 1, None) for e in rest)
        total = sum(inner[work] for work in work_of.ravel()) + heads * of_head
        return ticks * each_tick + total / ranks

    step = _count(jaxpr, even_rows, devices, special)
    return Flops(step, found[0] if found else ())


def model_flops(config: Config, vocab_size: int) -> float:
    """What a step of the model needs: the forward pass and twice as much backward.

    Attention counts over whole sequences, whatever the mask; patches are projected at
    their own positions; every token takes its experts.
    """
    model, moe = config.model, config.moe
    S, D = model.sequence_length, model.width
    heads = model.num_heads * model.head_size
    per_width = (3 if model.activation == "swiglu" else 2) * D
    attention = 4 * D * heads + 2 * S * heads
    dense = per_width * model.ffn_width
    experts = moe.top_k + moe.num_shared_experts
    expert_width = config_derived.expert_width(model, moe)
    mixture = per_width * expert_width * experts + D * moe.num_experts
    kinds = config_derived.layer_kinds(model)
    layers = sum(attention + (mixture if k == "moe" else dense) for k in kinds)
    patches = model.num_patches * model.patch_dim * D / S
    return 3 * 2 * config.data.batch_size * S * (layers + D * vocab_size + patches)


def _branches(equation: Any) -> list[Jaxpr]:
    return [branch.jaxpr for branch in equation.params["branches"]]


def _steps_of(body: Jaxpr, working: list[bool]):
    """(the head, per work its step or None, the equations beside them) of a tick.

    Args:
      body: of a loop; the result is None if it is not that over the ticks.
      working: of each work, whether it is not idle.
    """
    if not any(e.primitive.name == "ppermute" for e in body.eqns):
        return None
    taken = [e for e in body.eqns if e.primitive.name == "cond"]
    if taken:
        (_, head), works = map(_branches, taken)
    else:  # a loop for the head, and then one for each work
        loops = [e for e in body.eqns if e.primitive.name == "while"]
        taken = loops[: 1 + sum(working)]
        head, *rest = (e.params["body_jaxpr"].jaxpr for e in taken)
        of_work = iter(rest)
        works = [next(of_work) if works_here else None for works_here in working]
    apart = {id(e) for e in taken}
    return head, works, [e for e in body.eqns if id(e) not in apart]


Special = Callable[[Any], float | None] | None


def _count(jaxpr: Jaxpr, even_rows: int, devices: int, special: Special) -> float:
    return sum(_equation(e, even_rows, devices, special) for e in jaxpr.eqns)


def _equation(equation: Any, even_rows: int, devices: int, special: Special) -> float:
    name = equation.primitive.name
    if special and (found := special(equation)) is not None:
        return found
    if name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        size = math.prod(equation.outvars[0].aval.shape)
        return 2.0 * size * math.prod(shape[i] for i in contract) / devices
    if name in ("ragged_dot", "ragged_dot_general"):
        return _ragged(equation, even_rows) / devices
    inner_devices = 1 if name == "shard_map" else devices
    inner = [
        _count(jaxpr, even_rows, inner_devices, special)
        for jaxpr in _inner_jaxprs(equation)
    ]
    if name == "cond":
        return max(inner, default=0.0)
    return (equation.params["length"] if name == "scan" else 1) * sum(inner)


def _ragged(equation: Any, even_rows: int) -> float:
    """Rows [R, K] with weights [E, K, N], or rows with rows [R, N]."""
    x, w = (v.aval.shape for v in equation.invars[:2])
    rows = min(x[0], even_rows)
    return 2.0 * rows * math.prod(x[1:]) * w[-1 if w[-2] == x[-1] or len(w) < 3 else -2]


def _inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            candidate = getattr(candidate, "jaxpr", candidate)
            if hasattr(candidate, "eqns"):
                yield candidate
