# SPDX-License-Identifier: Apache-2.0
"""Scripts of `benchmarks/` run; their last line is what their docstring promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def last_line(script: str, *arguments: str) -> dict:
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def are_positive(figures) -> bool:
    return all(isinstance(figure, float) and figure > 0 for figure in figures)


@pytest.mark.slow
def test_moe_layer():
    """Every figure is there, at small sizes; what they are says nothing here."""
    figures = last_line("moe_layer.py", "--quick", "--repetitions=1")
    by_group = figures.pop("onehot_over_sorted_by_group")
    assert str(figures.pop("onehot_group_tokens")) in by_group
    tables = [by_group]
    for name in ("time_by_tokens", "time_by_experts", "over_einsum_by_experts"):
        tables.append(figures.pop(name))
    assert all(len(table) == 2 and are_positive(table.values()) for table in tables)
    assert set(figures) == {
        "over_dense",
        "onehot_over_sorted",
        "onehot_over_dropless",
        "peak_bytes_sorted_over_onehot",
        "off_linear",
        "expert4_over_1",
    }
    assert are_positive(figures.values())


@pytest.mark.slow
def test_prototypes():
    """Losses of every number of prototypes, of a run too short to tell anything."""
    figures = last_line(
        "prototypes.py",
        "--seeds=1",
        "--gin.Train.steps=2",
        "--gin.Train.eval_batches=1",
    )
    assert list(figures) == ["1", "2", "4"]
    for of_k in figures.values():
        for name in ("", "dropless_"):
            assert of_k[f"{name}losses"] == [of_k[f"{name}mean"]]
            assert are_positive(of_k[f"{name}losses"])
            assert of_k[f"{name}spread"] == 0.0
        assert 0 < of_k["dropped_fraction"] < 1


@pytest.mark.slow
def test_eplb():
    """Every figure is there, at small sizes."""
    figures = last_line("eplb.py", "--quick", "--repetitions=1")
    tables = [figures.pop(f"reference_ms_by_{of}") for of in ("layers", "experts")]
    assert all(len(table) == 2 and are_positive(table.values()) for table in tables)
    assert set(figures) == {
        *("reference_hierarchical_ms", "reference_global_ms", "swap_ms"),
        *("swap_hierarchical_ms", "swap_global_ms", "incremental_ms"),
        *("incremental_moved", "incremental_max_over_mean", "rebalance_over_step"),
        *("swap_max_over_mean_hierarchical", "swap_max_over_mean_global"),
    }
    assert are_positive(figures.values())


@pytest.mark.slow
def test_data():
    """Every kind of source gives figures, and the loader is no bottleneck: a batch of
    the default run is made in a small part of the time of its step."""
    figures = last_line("data.py", "--quick")
    for name in ("batch_s", "step_s"):
        assert are_positive([figures.pop(f"default_{name}")])
    assert 0 < figures.pop("default_share") < 0.2  # claimed: 0.05; machines are busy
    kinds = {"folder", "jsonl", "tar", "array_record", "parquet", "txt"}
    assert set(figures) == kinds | {"packed", "mixture", "digits"}
    for kind, of_kind in figures.items():
        images = of_kind.pop("images_per_s")
        assert (images == 0.0) if kind == "txt" else (images > 0.0)
        assert are_positive(of_kind.values())
    assert figures["packed"]["padding"] < figures["jsonl"]["padding"]


@pytest.mark.slow
def test_crash():
    """A few kills: each is gone on from, and no loss is another one."""
    figures = last_line("crash.py", "--kills=4", "--steps=24")
    assert figures["kills"] == figures["resumed"] == 4
    assert sum(figures["by_moment"].values()) == 4
    assert 0 <= figures["inside_a_write"] <= 4
    assert figures["steps_lost"] >= 0
    assert figures["mismatched"] == 0
