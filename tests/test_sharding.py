# SPDX-License-Identifier: Apache-2.0
"""The ways between layouts, on 8 devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe import sharding
from jaxmoe.mesh import AXES, Sizes, make_mesh


def mesh_of(data, expert, pipe=1):
    return make_mesh(Sizes(data, expert, pipe, "test"))


def run(mesh, function, specs, out, *arrays):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )  # check_vma=False, as in the step: gathered arrays are equal on all devices
    return jax.jit(mapped)(*arrays)


LEAVES = {  # shape, logical axes
    "experts": ((3, 8, 16, 4), (None, "expert", "width", "hidden")),
    "kernel": ((24, 16), ("width", "hidden")),
    "bias": ((6,), ("width",)),
}


@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2), (8, 1, 1), (1, 8, 1)])
def test_gather_restores_the_array(sizes):
    """gather: master part -> compute part, element for element, for every leaf."""
    mesh = mesh_of(*sizes)
    arrays, masters, computes = {}, {}, {}
    for name, (shape, axes) in LEAVES.items():
        arrays[name] = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        computes[name] = sharding.compute_spec(axes)
        masters[name] = sharding.master_spec(shape, computes[name], mesh)

    def gather(shards):
        return jax.tree.map(sharding.gather, shards, computes, masters)

    got = run(mesh, gather, (masters,), computes, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, arrays)


@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 4, 1), (8, 1, 1), (1, 8, 1)])
def test_scatter_sum_sums_over_the_copies(sizes):
    """scatter_sum of g_d = g (1 + rank d) is g times the sum of 1 + rank over copies.

    For an expert array the copies lie along `data`, for the others over all devices;
    each device keeps exactly its master part.
    """
    mesh = mesh_of(*sizes)
    data, expert, _ = sizes
    for shape, axes in LEAVES.values():
        array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        compute = sharding.compute_spec(axes)
        master = sharding.master_spec(shape, compute, mesh)

        def scatter(part, compute=compute, master=master):
            rank = jax.lax.axis_index("data") * expert + jax.lax.axis_index("expert")
            return sharding.scatter_sum(part * (1 + rank), compute, master, mesh)

        got = run(mesh, scatter, compute, master, array)
        ranks = 1.0 + np.arange(8).reshape(data, expert)
        factor = ranks.sum()
        if "expert" in axes:
            factor = np.repeat(ranks.sum(0), 8 // expert)[None, :, None, None]
        np.testing.assert_allclose(got, array * factor, rtol=1e-6)


def test_scatter_sum_is_the_transpose_of_gather():
    """Over all devices <gather(x), y> = <x, scatter_sum(y)>: they are adjoint."""
    mesh = mesh_of(4, 2)
    shape, axes = LEAVES["experts"]
    compute = sharding.compute_spec(axes)
    master = sharding.master_spec(shape, compute, mesh)
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)

    def both(x_part, y_part):
        y_part = y_part * (1.0 + jax.lax.axis_index("data"))
        left = jnp.vdot(sharding.gather(x_part, compute, master), y_part)
        right = jnp.vdot(x_part, sharding.scatter_sum(y_part, compute, master, mesh))
        return jax.lax.psum(jnp.stack([left, right]), AXES)

    left, right = run(mesh, both, (master, compute), P(), x, y)
    assert float(left) == pytest.approx(float(right), rel=1e-5)


# Small arrays together, large ones apart ----------------------------------------------

SIZES = {"together": 2**20, "apart": 0}

together_and_apart = pytest.mark.parametrize("travel", SIZES, indirect=True)


@pytest.fixture
def travel(request, monkeypatch):
    """Whether arrays travel together; the numbers must be the same."""
    monkeypatch.setattr(sharding, "SMALL_BYTES", SIZES[request.param])
    return request.param


MIXED = {  # as LEAVES, and every way in which one leaf can differ from its neighbour
    **LEAVES,
    "gate": ((3, 8, 8), (None, "expert", "hidden")),
    "turned": ((16, 48), ("width", "hidden")),
    "half": ((8, 16), ("width", "hidden")),
    "scalar": ((), ()),
}


def coded(shape, name=""):
    """Every element is its own place in the array."""
    dtype = jnp.bfloat16 if name == "half" else np.float32
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def layouts(shapes, mesh, *, keep=0):
    """(compute, master) of a tree of (shape, logical axes)."""
    compute = {name: sharding.compute_spec(axes) for name, (_, axes) in shapes.items()}
    master = {
        name: sharding.master_spec(shape, compute[name], mesh, keep=keep)
        for name, (shape, _) in shapes.items()
    }
    return compute, master


def collectives(function, mesh, specs, out, *arrays):
    """How often each collective stands in the program."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )
    names = ("all_gather", "reduce_scatter", "all_to_all")
    text = str(jax.make_jaxpr(mapped)(*arrays))
    counts = {n: len(re.findall(rf"= {n}\w*\[", text)) for n in names}
    return {name: count for name, count in counts.items() if count}


@together_and_apart
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2), (1, 8, 1)])
def test_a_whole_tree_is_gathered(sizes, travel):
    """Element for element, whatever lies beside a leaf: other splits, other types."""
    mesh = mesh_of(*sizes)
    compute, master = layouts(MIXED, mesh)
    arrays = {name: coded(shape, name) for name, (shape, _) in MIXED.items()}

    def gather(shards):
        return sharding.gather(shards, compute, master)

    got = run(mesh, gather, (master,), compute, arrays)
    assert got["half"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, got, arrays)


@together_and_apart
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2), (1, 8, 1)])
def test_a_whole_tree_is_summed(sizes, travel):
    """As of one leaf: g times the sum of 1 + rank over the devices with copies."""
    mesh = mesh_of(*sizes)
    shapes = {name: MIXED[name] for name in MIXED if name != "half"}
    compute, master = layouts(shapes, mesh)
    arrays = {name: coded(shape) for name, (shape, _) in shapes.items()}

    def scatter(parts):
        parts = jax.tree.map(lambda part: part * device_code(mesh), parts)
        return sharding.scatter_sum(parts, compute, master, mesh)

    got = run(mesh, scatter, (compute,), master, arrays)
    for name, (_, axes) in shapes.items():
        want = arrays[name] * summed_codes(mesh, axes, len(arrays[name].shape))
        np.testing.assert_allclose(got[name], want, rtol=1e-6, err_msg=name)


def device_code(mesh):
    """1 + number of the device, in the order of the axes."""
    code = 0
    for axis in AXES:
        code = code * mesh.shape[axis] + jax.lax.axis_index(axis)
    return 1.0 + code


def summed_codes(mesh, axes, ndim, *, pipe=None):
    """The codes summed over all copies of a leaf, or those of one rank of `pipe`;

    per expert where the leaf has an axis of 8 experts.
    """
    codes = 1.0 + np.arange(8).reshape([mesh.shape[axis] for axis in AXES])
    codes = codes.sum(2) if pipe is None else codes[:, :, pipe]
    if "expert" not in axes:
        return codes.sum()
    per_expert = np.repeat(codes.sum(0), 8 // mesh.shape["expert"])
    dim = axes.index("expert")
    return per_expert.reshape([8 if i == dim else 1 for i in range(ndim)])


@together_and_apart
def test_small_arrays_travel_together(travel):
    """One collective for all leaves that go over the same axes in the same type.

    On 2 x 4 x 1: experts and gate over `data`; kernel, turned over (data, expert), and
    half as well, but in bfloat16. The bias and the scalar are split nowhere.
    """
    mesh = mesh_of(2, 4)
    compute, master = layouts(MIXED, mesh)
    arrays = {name: coded(shape, name) for name, (shape, _) in MIXED.items()}

    def gather(shards):
        return sharding.gather(shards, compute, master)

    def scatter(parts):
        return sharding.scatter_sum(parts, compute, master, mesh)

    moves = 3 if travel == "together" else 5
    found = collectives(gather, mesh, (master,), compute, arrays)
    assert found == {"all_gather": moves}
    found = collectives(scatter, mesh, (compute,), master, arrays)
    assert found == {"reduce_scatter": moves}


# Layers of a pipeline -----------------------------------------------------------------

LAYERS = 7
STACKS = {  # dimensions of one layer, logical axes
    "experts": ((8, 16, 8), ("expert", "width", "hidden")),
    "kernel": ((16, 4), ("width", "hidden")),
    "turned": ((3, 8), ("width", "hidden")),
    "bias": ((6,), ("width",)),  # nothing to split over 8 devices
}
PLACES = {  # per rank of `pipe` the layers that it holds
    "even": ((2, 2, 2), [[0, 1, 2], [3, 4, 5]]),
    "uneven on 2": ((2, 2, 2), [[0, 1, 2, 3], [4, 5, 6, -1]]),
    "uneven on 4": ((1, 2, 4), [[0, 1], [2, 3], [4, 5], [6, -1]]),
    "other direction": ((1, 2, 4), [[6, -1], [4, 5], [2, 3], [0, 1]]),
    "empty rank": ((1, 1, 8), [[0], [1], [2], [3], [4], [5], [6], [-1]]),
    "one kind of two": ((2, 1, 4), [[0, -1], [1, 2], [-1, -1], [3, -1]]),
    "shared": ((1, 2, 4), [[0, 0], [0, 0], [0, 0], [0, -1]]),
}

everywhere = pytest.mark.parametrize("case", PLACES)


class Stacks:
    """The stacks of a case, their layouts, and both ways between them."""

    def __init__(self, case):
        sizes, places = PLACES[case]
        self.mesh, self.places = mesh_of(*sizes), np.asarray(places, np.int32)
        self.layers = 1 if case == "shared" else LAYERS
        shapes = {
            name: ((self.layers, *shape), (None, *axes))
            for name, (shape, axes) in STACKS.items()
        }
        self.axes = {name: axes for name, (_, axes) in shapes.items()}
        self.compute, self.master = layouts(shapes, self.mesh, keep=1)
        self.arrays = {name: coded(shape) for name, (shape, _) in shapes.items()}
        # Of every rank of `pipe` its own rows, one rank after the other.
        self.rows = jax.tree.map(lambda spec: P("pipe", *spec[1:]), self.compute)

    def gather(self, shards):
        return sharding.gather_layers(shards, self.compute, self.master, self.places)

    def scatter(self, rows):
        return sharding.scatter_sum_layers(
            rows,
            self.compute,
            self.master,
            self.places,
            layers=self.layers,
            mesh=self.mesh,
        )


@together_and_apart
@everywhere
def test_every_rank_gets_its_layers(case, travel):
    """gather_layers: row j of rank r is layer places[r, j], element for element."""
    stacks = Stacks(case)
    got = run(stacks.mesh, stacks.gather, (stacks.master,), stacks.rows, stacks.arrays)
    there = stacks.places.reshape(-1) >= 0
    for name, array in stacks.arrays.items():
        want = array[stacks.places.reshape(-1)[there]]
        np.testing.assert_array_equal(np.asarray(got[name])[there], want, name)


@together_and_apart
@everywhere
def test_gradients_of_layers_are_summed_where_they_belong(case, travel):
    """scatter_sum_layers: layer l is the sum over all devices and rows that used it.

    Device d gives g (1 + d). Rows of no layer are NaN, and are left out; layers that no
    rank holds get 0.
    """
    stacks = Stacks(case)
    places = stacks.places.reshape(-1)
    rng = np.random.default_rng(0)
    rows, wants = {}, {}
    for name, array in stacks.arrays.items():
        shape = (places.size, *array.shape[1:])
        row = rng.standard_normal(shape).astype(np.float32)
        want = np.zeros(array.shape, np.float32)
        for i, place in enumerate(places):
            rank = i // stacks.places.shape[1]
            codes = summed_codes(stacks.mesh, stacks.axes[name], array.ndim, pipe=rank)
            if place >= 0:
                want[place] += (row[i][None] * codes)[0]
            else:
                row[i] = np.nan
        rows[name], wants[name] = row, want

    def scatter(parts):
        code = device_code(stacks.mesh)
        return stacks.scatter(jax.tree.map(lambda part: part * code, parts))

    got = run(stacks.mesh, scatter, (stacks.rows,), stacks.master, rows)
    for name, want in wants.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-4, err_msg=name)


@together_and_apart
@pytest.mark.parametrize("case", ["uneven on 4", "empty rank"])
def test_layers_there_and_back(case, travel):
    """The round trip gives every layer times the number of its copies: a device keeps

    what it had, once per device along `data` and, where not split, along `expert`.
    """
    stacks = Stacks(case)

    def both(shards):
        return stacks.scatter(stacks.gather(shards))

    got = run(stacks.mesh, both, (stacks.master,), stacks.master, stacks.arrays)
    for name, array in stacks.arrays.items():
        data, expert, _ = (stacks.mesh.shape[axis] for axis in AXES)
        copies = data * (1 if "expert" in stacks.axes[name] else expert)
        np.testing.assert_array_equal(got[name], array * copies, name)


@together_and_apart
def test_layers_of_all_leaves_travel_together(travel):
    """One all-to-all over `pipe` whatever the number of leaves, then as in `gather`.

    On 1 x 2 x 4: experts are split over `pipe` alone; kernel and turned over (expert,
    pipe), so they are gathered over `expert` besides; the bias is whole.
    """
    stacks = Stacks("uneven on 4")
    found = collectives(
        stacks.gather, stacks.mesh, (stacks.master,), stacks.rows, stacks.arrays
    )
    apart = travel == "apart"
    assert found == {"all_to_all": 3 if apart else 1, "all_gather": 2 if apart else 1}


def test_reduction_is_a_reduce_scatter():
    """The compiled sum of a large gradient moves shares: no all-reduce of the whole."""
    mesh = mesh_of(8, 1)
    compute, shape = P(None, None), (64, 8)
    master = sharding.master_spec(shape, compute, mesh)

    def scatter(part):
        return sharding.scatter_sum(part, compute, master, mesh)

    mapped = jax.shard_map(
        scatter, mesh=mesh, in_specs=compute, out_specs=master, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.zeros(shape)).compile().as_text()
    assert " reduce-scatter(" in text
    assert " all-reduce(" not in text


@pytest.mark.parametrize("select", [jax.lax.cond, None])
def test_branches_on_the_device_have_true_gradients(select):
    """d/dx sum over 2 devices of (2x on the first, 3x on the second) = 5.

    With a conditional on the device's index this holds only because the checker of
    replication (check_vma) is off wherever the project differentiates: with it on,
    jax 0.10.2 gives 4.
    """
    mesh = mesh_of(2, 4)

    def per_device(x):
        first = jax.lax.axis_index("data") == 0
        if select is None:
            return jnp.where(first, 2.0 * x, 3.0 * x)
        return select(first, lambda x: 2.0 * x, lambda x: 3.0 * x, x)

    def total(x):
        mapped = jax.shard_map(
            lambda x: per_device(x)[None],
            mesh=mesh,
            in_specs=P(),
            out_specs=P("data"),
            check_vma=False,
        )
        return jnp.sum(mapped(x))

    def inside(x):  # as the step does it: differentiate per device, then sum
        gradient = jax.shard_map(
            lambda x: jax.lax.psum(jax.grad(per_device)(x), "data"),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return gradient(x)

    assert float(jax.jit(inside)(2.0)) == 5.0
    assert float(jax.jit(jax.grad(total))(2.0)) == 5.0
