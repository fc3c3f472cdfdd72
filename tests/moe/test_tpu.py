# SPDX-License-Identifier: Apache-2.0
"""The layer inside the real train step, compiled for a TPU slice without one.

Needs libtpu (the `aot` extra); runs no device.
"""

import math

import pytest

from tests.helpers import changed, tiny_config
from tests.tpu import collectives, compiled_step, topology_mesh

D, S, BATCH = 256, 32, 64
CONFIG = tiny_config(
    model={
        "num_layers": 2,
        "layer_pattern": "moe",
        "width": D,
        "num_heads": 2,
        "ffn_width": 384,
        "sequence_length": S,
        "compute_dtype": "bfloat16",
        "use_bias": False,
    },
    moe={"capacity_factor": 1.25},
    data={"batch_size": BATCH},
)


@pytest.fixture
def mesh():
    return topology_mesh("v5e:2x4", 2, 4)


@pytest.mark.parametrize(
    "exchange", ["auto", pytest.param("equal", marks=pytest.mark.slow)]
)
def test_collectives_of_the_layer(mesh, exchange):
    """Per MoE layer: rows cross twice forward and twice backward, counts once.

    No all-gather has tokens (over `expert` it would have rows of D numbers from 4
    devices), and none more than the experts of one device.
    """
    config = changed(CONFIG, moe={"exchange": exchange})
    found = collectives(compiled_step(config, mesh, 264))
    layers = CONFIG.model.num_layers
    kind = "all-to-all" if exchange == "equal" else "ragged-all-to-all"
    rows = [c for c in found if c.kind == kind and c.dtype == "bf16"]
    assert len(rows) == 4 * layers
    assert {c.dims[0] * math.prod(c.dims[1:]) % D for c in rows} == {0}
    counts = [c for c in found if "all-to-all" in c.kind and c not in rows]
    assert [(c.kind, c.dtype) for c in counts] == [("all-to-all", "s32")] * layers
    # Weights are gathered over all devices, or, of experts, over `data`: never over
    # `expert` alone, which is devices 0 to 3 and 4 to 7.
    groups = {c.groups for c in found if c.kind == "all-gather"}
    assert groups <= {"{{0,1,2,3,4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"}
    one_device_experts = 2 * CONFIG.moe.num_experts // 4 * D * CONFIG.model.ffn_width
    gathered = [math.prod(c.dims) for c in found if c.kind == "all-gather"]
    assert max(gathered) <= layers * one_device_experts
    tokens = BATCH * S // 8
    shapes = {c.dims for c in found if c.kind == "all-gather"}
    assert not shapes & {(4 * tokens, D), (4, tokens, D), (4 * BATCH // 8, S, D)}


def test_equal_exchange_is_asynchronous(mesh):
    """With the options that training sets, every all-to-all has a start and an end."""
    config = changed(CONFIG, model={"num_layers": 1}, moe={"exchange": "equal"})
    found = collectives(compiled_step(config, mesh, 264))
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert len(exchanges) == 5
    assert all(c.starts for c in exchanges)
