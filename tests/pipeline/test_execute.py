# SPDX-License-Identifier: Apache-2.0
"""The one program that runs a table of ticks: what stands in it, and long runs."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.pipeline import execute
from jaxmoe.pipeline.buffers import Shelf, full
from jaxmoe.pipeline.stage import needed
from jaxmoe.train_step import Setup
from tests import helpers, oracle
from tests.helpers import changed, tiny_config

DENSE = tiny_config(model={"num_layers": 8, "layer_pattern": "dense"})
MOE = tiny_config(model={"num_layers": 8}, moe={"capacity_factor": 1.25})


def jaxpr_of(config, mesh):
    """The jaxpr of the gradients; equations inside shard_map have local shapes."""
    setup = Setup(config, helpers.mesh_of(*mesh), 264)
    state = setup.abstract_state
    numbered = lambda batch: setup.numbered(batch, jnp.int32(0))  # noqa: E731
    gradients = lambda p, b, batch: setup.loss_and_gradients(  # noqa: E731
        p, b, numbered(batch)
    )
    return jax.make_jaxpr(gradients)(
        state.params, state.buffers, setup.abstract_batch()
    ).jaxpr


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


def loops_of(body, works):
    """The bodies of the loops of a tick: the head's; by number, those of the works; and
    those that write."""
    head, *rest = (e.params["body_jaxpr"].jaxpr for e in find(body, "while"))
    numbers = [number for number, work in enumerate(works) if work.kinds]
    of_works = dict(zip(numbers, rest[: len(numbers)], strict=True))
    return head, of_works, rest[len(numbers) :]


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


@pytest.fixture
def recorded(monkeypatch):
    """What `list_works` gave last."""
    found = []
    original = execute.list_works

    def listen(pipeline):
        found[:] = original(pipeline)
        return found

    monkeypatch.setattr(execute, "list_works", listen)
    return found


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "dualpipe", "dualpipev"])
def test_as_many_products_as_the_plain_step(recorded, name):
    """Products of all ranks together, the head included, are those of the plain step.

    Each work counts as often as the table runs it. Nothing is computed twice, bubbles
    compute nothing, and the head runs once per microbatch. Within 1 % (equal, but that
    every rank embeds whole microbatches).
    """
    plain = products(jaxpr_of(DENSE, (1, 1, 1)))
    config = changed(DENSE, pipeline={"schedule": name})
    whole = jaxpr_of(config, (1, 1, 4))
    (ticks,) = (
        e for e in find(whole, "scan") if any(find(e.params["jaxpr"].jaxpr, "ppermute"))
    )
    works, work_of = recorded
    head, loops, writes = loops_of(ticks.params["jaxpr"].jaxpr, works)
    of_work = {number: products(loop) for number, loop in loops.items()}
    total = sum(of_work.get(work, 0) for work in work_of.ravel())
    assert not any(map(products, writes))
    microbatches = 8
    total += microbatches * products(head)
    (mapped,) = find(whole, "shard_map")
    jaxpr = mapped.params["jaxpr"]
    total += 4 * products(jaxpr.replace(eqns=[e for e in jaxpr.eqns if e is not ticks]))
    assert total == pytest.approx(plain, rel=0.01)


def body_of(config, mesh):
    whole = jaxpr_of(config, mesh)
    (ticks,) = (
        e for e in find(whole, "scan") if any(find(e.params["jaxpr"].jaxpr, "ppermute"))
    )
    return ticks.params["jaxpr"].jaxpr


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_what_is_outside_the_works(recorded, name):
    """Messages and ring buffers: no ppermute in any loop, whatever it depends on, and
    no work writes into an array with the slots of a buffer."""
    config = changed(MOE, pipeline={"schedule": name})
    body = body_of(config, (1, 2, 4))
    works, _ = recorded
    head, loops, writes = loops_of(body, works)
    outside = list(unconditional(body))
    assert [e for e in outside if e.primitive.name == "ppermute"]
    outside += [e for loop in writes for e in oracle.equations(loop)]
    buffers = {
        e.outvars[0].aval.shape
        for e in outside
        if e.primitive.name == "dynamic_update_slice"
    }
    assert len(buffers) > 2
    for loop in (head, *loops.values(), *writes):
        assert not [e for e in oracle.equations(loop) if e.primitive.name == "ppermute"]
    for loop in (head, *loops.values()):
        written = {
            e.outvars[0].aval.shape
            for e in oracle.equations(loop)
            if e.primitive.name in ("dynamic_update_slice", "scatter")
        }
        assert not written & buffers


def test_a_work_carries_only_what_it_makes(recorded):
    """No forward touches the sums of weight gradients, and no W what travels: nothing
    is written for what a work does not make."""
    body = body_of(changed(MOE, pipeline={"schedule": "zb_h1"}), (1, 2, 4))
    works, _ = recorded
    _, loops, _ = loops_of(body, works)
    travels, experts = (2, 40, 16), (4, 16, 32)  # [b, S, D], [slots, D, F]
    seen = set()
    for number, loop in loops.items():
        carried = {v.aval.shape for v in loop.outvars}
        kinds = set(works[number].kinds)
        assert (experts in carried) == bool({"B", "W"} & kinds), kinds
        assert (travels in carried) == bool({"F", "B", "Bi"} & kinds), kinds
        seen |= {works[number].kinds}
    assert seen >= {("F",), ("Bi",), ("W",)}


def test_halves_of_an_overlapped_work_do_not_meet(recorded):
    """In F&B no product that the sent activation needs is needed by the sent gradient,
    or by the gradients of the weights: the compiler may run them in any order."""
    body = body_of(changed(MOE, pipeline={"schedule": "dualpipe"}), (1, 2, 4))
    works, _ = recorded
    _, loops, _ = loops_of(body, works)
    seen = 0
    for number, jaxpr in loops.items():
        if not {"F", "B"} <= set(works[number].kinds):
            continue
        seen += 1
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
    found = [v for v in jaxpr.outvars if v.aval.shape == (2, 40, 16)]  # [b, S, D]
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


def test_works_of_dualpipe(recorded):
    """Four ranks: every set of operations in both directions, and no more."""
    body_of(changed(MOE, pipeline={"schedule": "dualpipe"}), (1, 2, 4))
    works, _ = recorded
    sets = collections.Counter(work.kinds for work in works)
    assert max(sets.values()) <= 2
    assert len(works) <= 2 * len(sets)
