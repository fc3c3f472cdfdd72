# SPDX-License-Identifier: Apache-2.0
"""The one program that runs a table of ticks: what stands in it, and long runs."""

import collections
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.pipeline.buffers import Shelf, full
from jaxmoe.pipeline.stage import needed
from jaxmoe.pipeline.works import Work
from jaxmoe.train_step import Setup
from tests import helpers, oracle
from tests.helpers import changed, tiny_config

DENSE = tiny_config(model={"num_layers": 8, "layer_pattern": "dense"})
MOE = tiny_config(model={"num_layers": 8}, moe={"capacity_factor": 1.25})


def trace(config, mesh, loops=True):
    """(jaxpr of the gradients, what is chosen in its ticks; none without a pipeline).

    Equations inside shard_map have local shapes.
    """
    setup = Setup(config, helpers.mesh_of(*mesh), 264)
    if setup.pipelined:
        setup.pipelined.loops = loops
    state = setup.abstract_state
    numbered = lambda batch: setup.numbered(batch, jnp.int32(0))  # noqa: E731
    gradients = lambda p, b, batch: setup.loss_and_gradients(  # noqa: E731
        p, b, numbered(batch)
    )
    batch = setup.abstract_batch()
    jaxpr = jax.make_jaxpr(gradients)(state.params, state.buffers, batch).jaxpr
    choices = setup.pipelined.traced.choices() if setup.pipelined else []
    return jaxpr, choices


def inner_jaxprs(equation):
    for value in equation.params.values():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            candidate = getattr(candidate, "jaxpr", candidate)
            if hasattr(candidate, "eqns"):
                yield candidate


def find(jaxpr, name):
    """The equations of a kind, not looking into those found."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from find(inner, name)


def unconditional(jaxpr):
    """Every equation that is in no branch and in no loop of unknown length."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("cond", "while"):
            for inner in inner_jaxprs(equation):
                yield from unconditional(inner)


class Step(NamedTuple):
    """A work, the jaxpr that does it, and how often, over all ranks."""

    work: Work
    jaxpr: Any
    times: int


class Tick(NamedTuple):
    """The loop over the ticks, and in its body: the head, the works, and the loops that
    add or write beside them."""

    scan: Any
    body: Any
    head: Any
    steps: list[Step]
    beside: list


def tick_of(jaxpr, choices):
    (scan,) = (
        e for e in find(jaxpr, "scan") if any(find(e.params["jaxpr"].jaxpr, "ppermute"))
    )
    body = scan.params["jaxpr"].jaxpr
    of_kind = lambda name: [e for e in body.eqns if e.primitive.name == name]  # noqa: E731
    loops = [e.params["body_jaxpr"].jaxpr for e in of_kind("while")]
    switches = [e.params["branches"] for e in of_kind("cond")]
    if switches:
        (_, head), branches = ([b.jaxpr for b in branches] for branches in switches)
    else:
        head, *loops = loops
    steps = []
    for choice in choices:
        times = np.bincount(choice.work_of.ravel()).tolist()
        for number, work in enumerate(choice.works):
            if work.kinds:
                jaxpr = branches[number] if switches else loops.pop(0)
                steps.append(Step(work, jaxpr, times[number]))
    return Tick(scan, body, head, steps, loops)


def pipelined(config, name, mesh=(1, 2, 4), **options):
    return tick_of(
        *trace(changed(config, pipeline={"schedule": name}), mesh, **options)
    )


def products(jaxpr):
    """Multiplications in the matrix products of a jaxpr, loops counted out."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(equation.outvars[0].aval.shape)
            total += size * math.prod(shape[i] for i in contract)
            continue
        assert equation.primitive.name != "while", "of unknown length"
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(map(products, inner_jaxprs(equation)))
    return total


BOTH = pytest.mark.parametrize("loops", [True, False], ids=["loops", "switch"])


@BOTH
@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "dualpipe", "dualpipev"])
def test_as_many_products_as_the_plain_step(name, loops):
    """Products of all ranks together, the head included, are those of the plain step.

    Each work counts as often as the table runs it. Nothing is computed twice, bubbles
    compute nothing, and the head runs once per microbatch. Within 1 % (equal, but that
    every rank embeds whole microbatches).
    """
    plain, _ = trace(DENSE, (1, 1, 1))
    config = changed(DENSE, pipeline={"schedule": name})
    whole, choices = trace(config, (1, 1, 4), loops)
    tick = tick_of(whole, choices)
    total = sum(step.times * products(step.jaxpr) for step in tick.steps)
    assert not any(map(products, tick.beside))
    microbatches = 8
    total += microbatches * products(tick.head)
    (mapped,) = find(whole, "shard_map")
    jaxpr = mapped.params["jaxpr"]
    outside = [e for e in jaxpr.eqns if e is not tick.scan]
    total += 4 * products(jaxpr.replace(eqns=outside))
    assert total == pytest.approx(products(plain), rel=0.01)


@BOTH
@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_what_is_outside_the_works(name, loops):
    """Messages and ring buffers: no ppermute in any work, whatever it depends on, and
    no work writes into an array with the slots of a buffer."""
    tick = pipelined(MOE, name, loops=loops)
    outside = list(unconditional(tick.body))
    assert [e for e in outside if e.primitive.name == "ppermute"]
    outside += [e for loop in tick.beside for e in oracle.equations(loop)]
    buffers = {
        e.outvars[0].aval.shape
        for e in outside
        if e.primitive.name == "dynamic_update_slice"
    }
    assert len(buffers) > 2
    inside = [tick.head, *(step.jaxpr for step in tick.steps)]
    for jaxpr in (*inside, *tick.beside):
        names = {e.primitive.name for e in oracle.equations(jaxpr)}
        assert "ppermute" not in names
    for jaxpr in inside:
        written = {
            e.outvars[0].aval.shape
            for e in oracle.equations(jaxpr)
            if e.primitive.name in ("dynamic_update_slice", "scatter")
        }
        assert not written & buffers


def test_a_loop_carries_only_what_it_makes():
    """No forward touches the sums of weight gradients, and no W what travels: nothing
    is written for what a work does not make."""
    travels, experts = (2, 40, 16), (4, 16, 32)  # [b, S, D], [slots, D, F]
    seen = set()
    for step in pipelined(MOE, "zb_h1").steps:
        carried = {v.aval.shape for v in step.jaxpr.outvars}
        kinds = set(step.work.kinds)
        assert (experts in carried) == bool({"B", "W"} & kinds), kinds
        assert (travels in carried) == bool({"F", "B", "Bi"} & kinds), kinds
        seen |= kinds
    assert seen >= {"F", "Bi", "W"}


def test_a_branch_leaves_unwritten_what_it_does_not_make():
    """A branch of the switch has no number for it, not even a zero."""
    travels, experts = (2, 40, 16), (4, 16, 32)  # [b, S, D], [slots, D, F]
    for step in pipelined(MOE, "zb_h1", loops=False).steps:
        equations = [e for e in step.jaxpr.eqns if e.primitive.name == "empty"]
        empty = {v for e in equations for v in e.outvars}
        written = [v for v in step.jaxpr.outvars if v not in empty]
        shapes = {v.aval.shape for v in written}
        kinds = set(step.work.kinds)
        assert (experts in shapes) == bool({"B", "W"} & kinds), kinds
        assert (travels in shapes) == bool({"F", "B", "Bi"} & kinds), kinds


def test_halves_of_an_overlapped_work_do_not_meet():
    """In F&B no product that the sent activation needs is needed by the sent gradient,
    or by the gradients of the weights: the compiler may run them in any order."""
    seen = 0
    for step in pipelined(MOE, "dualpipe", loops=False).steps:
        if not {"F", "B"} <= set(step.work.kinds):
            continue
        seen += 1
        jaxpr = step.jaxpr
        activation, gradient = made_first(jaxpr)
        forward = {id(e) for e in needed(jaxpr.eqns, [activation])}
        backward = {id(e) for e in needed(jaxpr.eqns, [gradient])}
        heavy = [e for e in jaxpr.eqns if is_heavy(e)]
        assert [e for e in heavy if id(e) in forward]
        assert [e for e in heavy if id(e) in backward]
        assert not [e for e in heavy if id(e) in forward and id(e) in backward]
    assert seen == 2  # a forward to the right, and one to the left


def made_first(jaxpr):
    """The variables of `Made.activation` and `Made.gradient` that an F&B gives."""
    there = {*jaxpr.invars, *jaxpr.constvars}
    made = [v for v in jaxpr.outvars if v not in there]
    found = [v for v in made if v.aval.shape == (2, 40, 16)]  # [b, S, D]
    return found[:2]


def is_heavy(equation):
    names = {e.primitive.name for inner in inner_jaxprs(equation) for e in inner.eqns}
    return bool({equation.primitive.name, *names} & {"dot_general", "all_to_all"})


def test_a_shelf_shares_places_between_programs():
    """Arrays of one shape have one place; a program of few leaves the rest filled."""
    a, b = (
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    shelf = Shelf([[a, b, a], [a], []], slots=2, fill=math.nan)
    assert [x.shape for x in shelf.empty()] == [(3, 2), (3, 3), (3, 2)]
    nothing = [full(x.shape, x.dtype, math.nan) for x in shelf.shapes()]
    packed = shelf.pack(1, [jnp.ones(2)], nothing)
    np.testing.assert_array_equal(packed[0], [1, 1])
    assert np.isnan(packed[2]).all()
    assert not packed[1].any()  # integers are filled with 0
    buffers = [x.at[1].set(v) for x, v in zip(shelf.empty(), packed, strict=True)]
    (read,) = shelf.read(1, buffers, jnp.int32(1))
    np.testing.assert_array_equal(read, [1, 1])


def losses_of(config, mesh, steps):
    """Losses of a run from the initial weights, and its last state."""
    setup = Setup(config, helpers.mesh_of(*mesh), 264)
    state = helpers._initial_state(config)
    state = jax.device_put(state, setup.state_sharding, may_alias=False)
    loader = helpers.Loader(
        config.data, model=config.model, microbatches=setup.microbatches
    )
    batch = next(loader)
    loader.close()
    step = helpers.quickly(
        setup.train_step(),
        setup.abstract_state,
        batch,
        pipelined=setup.pipelined is not None,
    )
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(helpers.loss_of(metrics))  # waits: one step in flight
    return losses, jax.tree.map(np.array, state.params)  # copies, to be changed


@pytest.mark.slow
def test_twenty_steps_of_sgd_are_those_of_the_plain_step():
    """Both copies of every stage, 20 updates: losses and weights within 1e-5."""
    sgd = changed(MOE, optimizer={"name": "sgd", "learning_rate": 0.05})
    got, weights = losses_of(sgd, (1, 2, 4), 20)
    want, expected = losses_of(sgd, (1, 1, 1), 20)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1] < got[0]
    for stack in ("dense", "moe"):  # a key bias has no gradient but rounding
        for tree in (weights, expected):
            tree[stack]["attention"]["qkv_bias"][:, 1] = 0.0
    oracle.assert_close(weights, expected, relative=1e-4)


@pytest.mark.slow
def test_two_hundred_steps_on_eight_devices():
    """dualpipe on 2 x 2 x 2: no step hangs, and the loss of the one batch falls."""
    losses, _ = losses_of(MOE, (2, 2, 2), 200)
    assert len(losses) == 200
    assert losses[-1] < 0.5 * losses[0]


@BOTH
def test_works_of_dualpipe(loops):
    """Four ranks: every set of operations in both directions, and no more. With loops
    these are sets of one: half of the forwards and backwards to be compiled."""
    steps = pipelined(MOE, "dualpipe", loops=loops).steps
    sets = collections.Counter(step.work.kinds for step in steps)
    assert max(sets.values()) <= 2
    if loops:
        assert set(sets) == {("F",), ("B",), ("Bi",), ("W",)}
    else:
        assert {("F", "B"), ("F", "Bi")} & set(sets)
