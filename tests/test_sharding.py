# SPDX-License-Identifier: Apache-2.0
"""Layouts: the rules by hand, and the ways between them on 8 devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import sharding
from jaxmoe.mesh import AXES, Sizes, make_mesh


def mesh_of(data, expert, pipe=1):
    return make_mesh(Sizes(data, expert, pipe, "test"))


def test_compute_spec_by_hand():
    """Only the logical axis `expert` is split for compute."""
    assert sharding.compute_spec(("expert", "width", "hidden")) == P(
        "expert", None, None
    )
    assert sharding.compute_spec((None, "expert", "hidden")) == P(None, "expert", None)
    assert sharding.compute_spec(("vocab", "width")) == P(None, None)
    assert sharding.compute_spec(()) == P()


def test_a_mesh_axis_is_used_once():
    """Two dimensions over one mesh axis are refused, with the names."""
    with pytest.raises(ValueError, match="uses a mesh axis twice"):
        sharding.compute_spec(("expert", "expert"))


@pytest.mark.parametrize(
    ("sizes", "shape", "compute", "expected"),
    [
        # the largest dimension that the free devices divide
        ((4, 2, 1), (64, 16), P(None, None), P(("data", "expert"), None)),
        ((4, 2, 1), (16, 64), P(None, None), P(None, ("data", "expert"))),
        ((4, 2, 1), (63, 16), P(None, None), P(None, ("data", "expert"))),
        # experts stay where they are; the rest goes over `data`
        (
            (4, 2, 1),
            (3, 8, 64, 16),
            P(None, "expert"),
            P(None, "expert", ("data",), None),
        ),
        ((2, 2, 2), (3, 8, 64), P(None, "expert"), P(None, "expert", ("data", "pipe"))),
        # nothing divides: as it is
        ((4, 2, 1), (3, 5), P(None, None), P(None, None)),
        ((4, 2, 1), (), P(), P()),
        ((4, 2, 1), (12,), P(None), P(None)),
        # no free axis with more than one device
        ((1, 8, 1), (8, 64), P("expert", None), P("expert", None)),
    ],
)
def test_master_spec_by_hand(sizes, shape, compute, expected):
    """The compute layout, split further over all free mesh axes at once."""
    got = sharding.master_spec(shape, compute, mesh_of(*sizes))
    assert tuple(got) == tuple(expected) + (None,) * (len(got) - len(expected))


@given(
    shape=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    experts=st.booleans(),
    sizes=st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1)]),
)
def test_master_spec_is_a_valid_refinement(shape, experts, sizes):
    """Master layouts keep every split of the compute layout, use each mesh axis at most

    once, and divide evenly: elements x copies = 8 x elements of a device.
    """
    mesh = mesh_of(*sizes)
    compute = P()
    if experts:
        shape[0] *= sizes[1]
        compute = P("expert")
    master = sharding.master_spec(tuple(shape), compute, mesh)
    local = NamedSharding(mesh, master).shard_shape(tuple(shape))  # raises if uneven
    assert math.prod(local) * 8 == math.prod(shape) * sharding.copies(master, mesh)
    assert not experts or master[0] == "expert"


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


def test_copies_by_hand():
    """Devices per element: 8 / (product of the axes that split the array)."""
    mesh = mesh_of(4, 2)
    assert sharding.copies(P(), mesh) == 8
    assert sharding.copies(P(None, "expert"), mesh) == 4
    assert sharding.copies(P("expert", ("data", "pipe")), mesh) == 1


def test_named_keeps_the_tree():
    """PartitionSpecs become NamedShardings, leaf by leaf."""
    mesh = mesh_of(4, 2)
    got = sharding.named(mesh, {"a": P("data"), "b": [P()]})
    expected = {"a": NamedSharding(mesh, P("data")), "b": [NamedSharding(mesh, P())]}
    assert got == expected


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
