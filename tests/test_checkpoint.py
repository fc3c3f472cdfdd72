# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what was saved comes back bit by bit, on any mesh, or an error."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxmoe import checkpoint_folder
from jaxmoe.checkpoint import Checkpointer, CheckpointError
from jaxmoe.config import ConfigError


def mesh_of(rows, columns):
    return jax.make_mesh(
        (rows, columns), ("data", "expert"), axis_types=(AxisType.Auto,) * 2
    )


def placed(tree, mesh, specs):
    """The numpy arrays of a tree on a mesh."""
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs[name]))
        for name, array in tree.items()
    }


def abstract(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def same(left, right):
    """Bitwise equal, leaf by leaf, and of the same type."""
    left, right = jax.tree.map(np.asarray, (left, right))
    return jax.tree.all(
        jax.tree.map(
            lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), left, right
        )
    )


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        "experts": rng.standard_normal((8, 16, 4), np.float32),
        "dense": rng.standard_normal((16, 8), np.float32).astype(jnp.bfloat16),
        "count": np.int32(7),
    }


META = {"position": 12, "lr": 0.1, "names": ["a", "ä"]}
SPECS = {"experts": P("expert", "data"), "dense": P(("data", "expert")), "count": P()}
WHOLE = {"experts": P(), "dense": P(), "count": P()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, arrays):
    """A folder with step 3, written from a mesh of 2 x 4; only to be read."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, placed(arrays, mesh_of(2, 4), SPECS), META, "A.b = 1\n")
    return directory


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 8), (4, 2)])
@pytest.mark.parametrize("specs", [SPECS, WHOLE])
def test_restores_bit_by_bit_onto_other_meshes(saved, arrays, shape, specs):
    asked = abstract(placed(arrays, mesh_of(*shape), specs))
    with Checkpointer(saved, read_only=True) as checkpointer:
        restored = checkpointer.restore(3, asked)
    assert same(restored, arrays)
    for name, leaf in restored.items():
        assert leaf.sharding == asked[name].sharding


def test_restores_onto_one_device_and_as_numpy(saved, arrays):
    one = SingleDeviceSharding(jax.devices()[3])
    with Checkpointer(saved, read_only=True) as checkpointer:
        for sharding, kind in ((one, jax.Array), (None, np.ndarray)):
            asked = {
                name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
                for name, a in arrays.items()
            }
            restored = checkpointer.restore(3, asked)
            assert same(restored, arrays)
            assert all(isinstance(leaf, kind) for leaf in restored.values())


def test_gives_back_the_notes_and_the_configuration(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        assert checkpointer.latest() == 3
        assert checkpointer.steps() == [3]
        assert checkpointer.extra(3) == META
        assert checkpointer.config_text(3) == "A.b = 1\n"
        assert {"name": "dense", "shape": [16, 8], "dtype": "bfloat16"} in (
            checkpointer.leaves(3)
        )


def test_keeps_every_kind_of_leaf(tmp_path):
    """Numbers, empty arrays, keys, small types, sequences and odd names survive."""
    tree = {
        "number": 5,
        "fraction": 0.1,
        "flag": True,
        "numpy": np.arange(3, dtype=np.uint16),
        "empty": {"host": np.zeros((0, 3), np.int8), "device": jnp.zeros((4, 0))},
        "key": jax.random.key(3),
        "list": [jnp.float8_e4m3fn(1.5), (jnp.arange(4) > 1,)],
        "none": None,
        "an odd/ä name": jnp.float32(jnp.nan),
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, tree)
        asked = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                if isinstance(x, jax.Array)
                else x
            ),
            tree,
        )
        restored = checkpointer.restore(0, asked)
    keys = tree.pop("key"), restored.pop("key")
    assert jnp.array_equal(*map(jax.random.key_data, keys))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert same(restored, tree)
    assert [type(restored[n]) for n in ("number", "fraction", "flag")] == [
        int,
        float,
        bool,
    ]


def test_asynchronous_and_synchronous_saves_are_the_same_under_donation(tmp_path):
    """50 steps, each saved while the next one reuses its buffers: step N holds N."""
    mesh = mesh_of(2, 4)
    start = {"experts": np.arange(8 * 512, dtype=np.float32).reshape(8, 512)}
    start |= {"dense": np.arange(1024, dtype=np.float32), "count": np.int32(0)}
    specs = {"experts": P("expert", "data"), "dense": P(), "count": P()}
    # On CPU a numpy array may be taken over without a copy, and is then not donated.
    own = jax.jit(lambda t: jax.tree.map(jnp.copy, t))
    state = own(placed(start, mesh, specs))
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    held = [
        shard.data.unsafe_buffer_pointer()
        for shard in state["dense"].addressable_shards
    ]
    state = step(state)
    new = [
        shard.data.unsafe_buffer_pointer()
        for shard in state["dense"].addressable_shards
    ]
    assert held == new, "donation does nothing here: the test would show nothing"

    with (
        Checkpointer(tmp_path / "a", keep=50) as background,
        Checkpointer(tmp_path / "s", keep=50, asynchronous=False) as synchronous,
    ):
        for number in range(1, 51):
            background.save(number, state)
            if number % 10 == 0:
                synchronous.save(number, state)
            state = jax.block_until_ready(step(state))
        assert background.steps() == list(range(1, 51))
        asked = abstract(state)
        for number in range(1, 51):
            restored = background.restore(number, asked)
            expected = jax.tree.map(lambda x, n=number: x + x.dtype.type(n), start)
            assert same(restored, expected), number
            if number % 10 == 0:
                assert same(restored, synchronous.restore(number, asked))


def test_numpy_leaves_may_change_after_an_asynchronous_save(tmp_path):
    array = np.zeros(1 << 20, np.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": array})
        array[:] = 1
        assert not checkpointer.restore(1, {"a": array})["a"].any()


def test_save_returns_before_the_step_is_complete(tmp_path, monkeypatch):
    go_on = threading.Event()
    commit = checkpoint_folder.commit
    monkeypatch.setattr(
        checkpoint_folder, "commit", lambda *a: go_on.wait() and commit(*a)
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(3)})
        assert not (tmp_path / "1" / "complete.json").exists()
        go_on.set()
        checkpointer.wait()
        assert (tmp_path / "1" / "complete.json").exists()


def test_names_every_leaf_that_does_not_fit(saved, arrays):
    asked = {
        "experts": jax.ShapeDtypeStruct((16, 16, 4), jnp.float32),
        "dense": jax.ShapeDtypeStruct((16, 8), jnp.float32),
        "more": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)},
    }
    with (
        Checkpointer(saved, read_only=True) as checkpointer,
        pytest.raises(ConfigError) as error,
    ):
        checkpointer.restore(3, asked)
    for line in (
        "in 4 of its arrays",
        "experts: saved float32[8, 16, 4], now float32[16, 16, 4]",
        "dense: saved bfloat16[16, 8], now float32[16, 8]",
        "count: saved int32[], now absent",
        "more/w: saved absent, now float32[2]",
        str(saved / "3"),
    ):
        assert line in str(error.value)


def test_a_part_can_be_restored_without_the_rest(tmp_path):
    tree = {"params": {"w": jnp.arange(4.0), "b": jnp.zeros((0, 2))}, "step": 3}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(np.int32(3), tree)
        for part in ({"w": tree["params"]["w"]}, {"b": tree["params"]["b"]}):
            asked = {"params": abstract(part)}
            assert same(checkpointer.restore(3, asked, partial=True), {"params": part})
            with pytest.raises(ConfigError, match=r"step: saved int64\[\], now absent"):
                checkpointer.restore(3, asked)
        asked = {"params": {"v": jax.ShapeDtypeStruct((4,), jnp.float32)}}
        with pytest.raises(ConfigError, match="params/v: saved absent, now float32"):
            checkpointer.restore(3, asked, partial=True)


def test_steps_that_are_not_there_are_named(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        for call in (checkpointer.extra, checkpointer.config_text, checkpointer.leaves):
            with pytest.raises(CheckpointError, match=r"7 cannot be used.*complete: 3"):
                call(7)
        with pytest.raises(CheckpointError, match="is not a folder") as error:
            checkpointer.restore(7, {})
        assert error.value.step == 7


def test_refuses_what_it_could_not_give_back(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for tree in ({"a": {"b": 1}, "a/b": 2}, {"a.b": {"c": 1}, "a": {"b.c": 2}}):
            with pytest.raises(ValueError, match="two leaves are both named"):
                checkpointer.save(1, tree)
        for tree in ({}, {"a": np.zeros((0, 2))}):
            with pytest.raises(ValueError, match="nothing to save"):
                checkpointer.save(1, tree)
        with pytest.raises(ValueError, match="JSON"):
            checkpointer.save(1, {"a": 1}, {"loss": float("nan")})
        with pytest.raises(TypeError, match="JSON"):
            checkpointer.save(1, {"a": 1}, {"array": np.ones(2)})
        assert checkpointer.steps() == []


def test_saving_a_complete_step_again_does_nothing(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(3)}, {"n": 1})
        checkpointer.save(1, {"a": jnp.zeros(3)}, {"n": 2})
        assert checkpointer.extra(1) == {"n": 1}


def test_a_run_that_goes_back_does_not_mix_two_histories(tmp_path):
    """From 10 again: the old 20 and 30 never count again, whatever is saved next."""
    a = {"a": jnp.arange(3)}
    with Checkpointer(tmp_path) as first:
        for step in (10, 20, 30):
            first.save(step, a, {"history": 1})
    with Checkpointer(tmp_path) as second:
        second.restore(10, abstract(a))
        assert second.steps() == [10, 20, 30]  # looking at 10 changes nothing yet
        second.save(25, a, {"history": 2})
        assert second.steps() == [10, 25]
        assert second.latest() == 25
        second.save(30, a, {"history": 2})
        assert second.extra(30) == {"history": 2}
    assert sorted(p.name for p in (tmp_path / "discarded").iterdir()) == ["20", "30"]
