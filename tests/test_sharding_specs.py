# SPDX-License-Identifier: Apache-2.0
"""Layouts: the rules by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import sharding
from tests.helpers import mesh_of


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
        # the first dimension that the free devices divide
        ((4, 2, 1), (64, 16), P(None, None), P(("data", "expert"), None)),
        ((4, 2, 1), (16, 64), P(None, None), P(("data", "expert"), None)),
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


@pytest.mark.parametrize(
    ("shape", "compute", "expected"),
    [
        # 16 layers stay whole, though they are the largest dimension
        ((16, 8, 4), P(), P(None, ("data", "expert", "pipe"))),
        ((16, 4, 8), P(), P(None, None, ("data", "expert", "pipe"))),
        ((16, 2, 4), P(None, "expert"), P(None, "expert", ("data", "pipe"))),
        # nothing else divides: as it is
        ((16, 3), P(), P()),
        ((16,), P(), P()),
    ],
)
def test_master_spec_keeps_the_layers_together(shape, compute, expected):
    """With keep=1 dimension 0 is never split: layers go to other ranks one by one."""
    got = sharding.master_spec(shape, compute, mesh_of(2, 2, 2), keep=1)
    assert tuple(got) == tuple(expected) + (None,) * (len(got) - len(expected))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # rows and columns of a factored second moment
        ((3, 8, 64), P(None, "expert", "data")),
        ((3, 8, 16), P(None, "expert", None)),
        # nothing of the array's shape
        ((1,), P()),
        ((3, 8, 64, 16, 2), P()),
    ],
)
def test_a_mean_over_a_dimension_is_laid_out_as_the_rest(shape, expected):
    spec = P(None, "expert", "data")
    assert sharding.reduced_spec(shape, (3, 8, 64, 16), spec) == expected


def test_of_equal_dimensions_the_first_stay():
    assert sharding.reduced_spec((4, 4), (4, 4, 4), P("data", "expert")) == P(
        "data", "expert"
    )


@given(
    shape=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    experts=st.booleans(),
    sizes=st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1)]),
    keep=st.sampled_from([0, 1]),
)
def test_master_spec_is_a_valid_refinement(shape, experts, sizes, keep):
    """Master layouts keep every split of the compute layout, use each mesh axis at most

    once, and divide evenly: elements x copies = 8 x elements of a device.
    """
    mesh = mesh_of(*sizes)
    compute = P()
    if experts:
        shape[0] *= sizes[1]
        compute = P("expert")
    master = sharding.master_spec(tuple(shape), compute, mesh, keep=keep)
    assert not keep or master[0] == ("expert" if experts else None)
    local = NamedSharding(mesh, master).shard_shape(tuple(shape))  # raises if uneven
    assert math.prod(local) * 8 == math.prod(shape) * sharding.copies(master, mesh)
    assert not experts or master[0] == "expert"


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
