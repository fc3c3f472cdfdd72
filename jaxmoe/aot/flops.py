# SPDX-License-Identifier: Apache-2.0
"""Floor 7. Operations of matrix products: of a traced step, and those a model needs.

Counted are products only, a multiplication and an addition each, as model FLOPs are.
Loops count as often as they turn, branches of a tick as often as the table runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr

from jaxmoe import config_derived
from jaxmoe.config import Config
from jaxmoe.pipeline.works import Choice


def step_flops(
    jaxpr: Jaxpr,
    *,
    devices: int,
    even_rows: int,
    choices: list[Choice] | None = None,
    heads: int = 0,
) -> float:
    """Counts a traced train step: of one device, the mean over the ranks of a pipeline.

    Args:
      jaxpr: of the whole step.
      devices: of the mesh; products outside of shard_map are shared by them.
      even_rows: rows that the experts of a device get when the load is even.
      choices: of the pipeline, as `Pipeline.choices` gives them.
      heads: ticks in which a rank runs the head, over all ranks of a pipe.
    """
    if choices is None:
        return _count(jaxpr, even_rows, devices, None)
    ticks, ranks = choices[0].work_of.shape

    def special(equation: Any) -> float | None:
        if equation.primitive.name != "scan" or equation.params["length"] != ticks:
            return None
        tick = _tick(equation.params["jaxpr"].jaxpr, choices)
        if tick is None:
            return None
        head, steps, rest = tick
        total = heads * _count(head, even_rows, 1, None)
        for choice, steps_of_choice in zip(choices, steps, strict=True):
            each = [
                _count(s, even_rows, 1, None) if s else 0.0 for s in steps_of_choice
            ]
            total += sum(each[work] for work in choice.work_of.ravel())
        each_tick = sum(_equation(e, even_rows, 1, None) for e in rest)
        return ticks * each_tick + total / ranks

    return _count(jaxpr, even_rows, devices, special)


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


def _tick(body: Jaxpr, choices: list[Choice]):
    """(the head; per choice, of each work its step or None; the equations beside them).

    Args:
      body: of a loop; the result is None if it is not that over the ticks.
      choices: as for `step_flops`.
    """
    if not any(e.primitive.name == "ppermute" for e in body.eqns):
        return None
    switches = [e for e in body.eqns if e.primitive.name == "cond"]
    if switches:
        taken = switches
        (_, head), steps = map(_branches, switches)
        steps = [steps]
    else:  # a loop for the head, and then one for each work that is not idle
        works = [work for choice in choices for work in choice.works if work.kinds]
        loops = [e for e in body.eqns if e.primitive.name == "while"]
        taken = loops[: 1 + len(works)]
        head, *rest = (e.params["body_jaxpr"].jaxpr for e in taken)
        following = iter(rest)
        steps = [
            [next(following) if work.kinds else None for work in choice.works]
            for choice in choices
        ]
    apart = {id(e) for e in taken}
    return head, steps, [e for e in body.eqns if id(e) not in apart]


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
