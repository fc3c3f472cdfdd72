# SPDX-License-Identifier: Apache-2.0
"""What the checks of the configuration say of pipelines."""

import pytest

from jaxmoe import cli
from tests.config_cases import better, changed, message

# Every value that a message proposes passes all checks.
TOO_FEW = (
    "Pipeline.microbatches={} is too small for Mesh.pipe=4: {} needs at least two"
    " microbatches per rank, 8. Set Pipeline.microbatches={}."
)
NOT_EVEN = (
    "Pipeline.microbatches=9 is odd: dualpipe feeds one half of the microbatches at"
    " each end, and needs at least 8 for Mesh.pipe=4. Set Pipeline.microbatches="
)
ODD = (
    "Mesh.pipe=3 is odd: dualpipe pairs rank r with rank R-1-r, so the number must be"
    " even. Set Mesh.pipe="
)
TOO_DEEP = "a rank of the pipeline holds at least one layer. Set Model.num_layers="
BATCH = "sequences cannot be split over (Mesh.data={} x Mesh.expert=1) devices: the"
PIPELINE_MISTAKES = [
    (
        {"Mesh__pipe": 3, "Data__batch_size": 48},
        ODD + "2 or 4, or Pipeline.schedule='dualpipev'.",
    ),
    ({"Mesh__pipe": 3}, ODD + "2 or 4."),  # dualpipev: 64 sequences / 6 microbatches
    (  # 4 would be more than there are layers, or than the microbatches allow
        {"Mesh__pipe": 3, "Data__batch_size": 48, "Model__num_layers": 3},
        ODD + "2, or Pipeline.schedule='dualpipev'.",
    ),
    (
        {"Mesh__pipe": 3, "Data__batch_size": 48, "Pipeline__microbatches": 6},
        ODD + "2, or Pipeline.schedule='dualpipev'.",
    ),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 1},
        TOO_FEW.format(1, "dualpipe", 8),
    ),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 6},
        TOO_FEW.format(6, "dualpipe", 8),
    ),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 6, "Data__batch_size": 48},
        TOO_FEW.format(6, "dualpipe", "8, or Mesh.pipe=2"),
    ),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 6, "Data__batch_size": 60},
        TOO_FEW.format(6, "dualpipe", "10, or Mesh.pipe=2"),
    ),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 7},
        TOO_FEW.format(7, "dualpipe", 8),
    ),
    (
        {
            "Mesh__pipe": 4,
            "Pipeline__microbatches": 4,
            "Pipeline__schedule": "dualpipev",
        },
        TOO_FEW.format(4, "dualpipev", "8, or Mesh.pipe=2"),
    ),
    ({"Mesh__pipe": 4, "Pipeline__microbatches": 9}, NOT_EVEN + "8 or 16."),
    (
        {"Mesh__pipe": 4, "Pipeline__microbatches": 9, "Data__batch_size": 80},
        NOT_EVEN + "8 or 10.",
    ),
    (
        {"Pipeline__microbatches": 3},  # too few for any number of ranks
        "Pipeline.microbatches=3 is too small for Mesh.pipe=2: dualpipe needs at least"
        " two microbatches per rank, 4. Set Pipeline.microbatches=4.",
    ),
    (
        {"Mesh__pipe": 8},
        f"Mesh.pipe=8 is more than Model.num_layers=4: {TOO_DEEP}8, or Mesh.pipe=4.",
    ),
    (  # an even number of ranks; the pattern repeated
        {
            "Mesh__pipe": 4,
            "Model__num_layers": 3,
            "Model__layer_pattern": "dense,moe*2",
        },
        f"Mesh.pipe=4 is more than Model.num_layers=3: {TOO_DEEP}6, or Mesh.pipe=2.",
    ),
    (
        {"Mesh__pipe": 2, "Model__num_layers": 1},
        f"Mesh.pipe=2 is more than Model.num_layers=1: {TOO_DEEP}2, or Mesh.pipe=1.",
    ),
    (
        {"Mesh__pipe": 2, "Model__num_layers": 1, "Pipeline__schedule": "1f1b"},
        f"Mesh.pipe=2 is more than Model.num_layers=1: {TOO_DEEP}2, or"
        " Mesh.pipe='auto'.",
    ),
    (
        {"Mesh__pipe": 2**31 - 1},  # more than any model has layers
        "Mesh.pipe=2147483647 is more than Model.num_layers=4: a rank of the pipeline"
        " holds at least one layer. Set Mesh.pipe=4.",
    ),
    (
        {"Mesh__pipe": 2, "Data__batch_size": 10},
        "Data.batch_size=10 / Train.accumulation=1 / Pipeline.microbatches='auto' (4"
        f" with Mesh.pipe=2) {BATCH.format(1)} batch must be a multiple of 4 x 1 = 4."
        " Set Data.batch_size=8 or 12, or Pipeline.microbatches=10.",
    ),
    (
        {
            "Mesh__pipe": 2,
            "Data__batch_size": 8,
            "Pipeline__microbatches": 3,
            "Pipeline__schedule": "1f1b",
        },
        "Data.batch_size=8 / Train.accumulation=1 / Pipeline.microbatches=3"
        f" {BATCH.format(1)} batch must be a multiple of 3 x 1 = 3. Set"
        " Data.batch_size=6 or 9, or Pipeline.microbatches=1, 2, 4 or 8.",
    ),
    (  # whole routing groups of two sequences, and an even number of microbatches
        {
            "Mesh__pipe": 2,
            "Mesh__data": 2,
            "Data__batch_size": 96,
            "MoE__group_tokens": 96,
            "Train__accumulation": 2,
            "Pipeline__microbatches": 10,
        },
        "Data.batch_size=96 / Train.accumulation=2 / Pipeline.microbatches=10"
        f" {BATCH.format(2)} batch must be a multiple of 20 x 2 = 40. Set"
        " Data.batch_size=80 or 160, or Pipeline.microbatches=4, 6 or 12.",
    ),
    (
        {"Mesh__pipe": 2, "Mesh__data": 4, "Data__batch_size": 8},
        "Data.batch_size=8 / Train.accumulation=1 / Pipeline.microbatches='auto' (4"
        f" with Mesh.pipe=2) {BATCH.format(4)} batch must be a multiple of 4 x 4 = 16."
        " Set Data.batch_size=16, or Mesh.data x Mesh.expert = 1 or 2.",
    ),
]
COST_MISTAKES = [
    (  # also where no pipeline may come of it
        {"Pipeline__costs": "F=1,X=2"},
        "Pipeline.costs names 'X': costs are those of F, Bi, W, FB. Write it like F=1.",
    ),
    (
        {"Pipeline__costs": "F=fast"},
        "Pipeline.costs has 'F=fast': a cost is a number above 0. Write it like F=1.5.",
    ),
]


@pytest.mark.parametrize(
    "values, expected",
    PIPELINE_MISTAKES + COST_MISTAKES,
    ids=["-".join(values) for values, _ in PIPELINE_MISTAKES + COST_MISTAKES],
)
def test_message(values, expected):
    assert message(changed(**values)) == expected


@pytest.mark.parametrize(
    "values, expected",
    PIPELINE_MISTAKES,
    ids=["-".join(values) for values, _ in PIPELINE_MISTAKES],
)
def test_a_remedy_of_a_pipeline_passes(values, expected):
    """Each alone, and not only the check that complained."""
    found = list(better(changed(**values), expected))
    assert found or " and Pipeline." in expected
    for word, config in found:
        assert message(config) == "", word


@pytest.mark.parametrize(
    "options",
    [
        "Mesh.pipe=3",
        "Mesh.pipe=4 Pipeline.microbatches=6",
        "Mesh.pipe=4 Pipeline.microbatches=7",
        "Mesh.pipe=2 Data.batch_size=10",
        "Mesh.pipe=8",
    ],
)
def test_a_wrong_pipeline_exits_with_2(options, capsys):
    """On the command line, in one message, before anything is compiled or written."""
    arguments = [f"--gin.{option}" for option in options.split()]
    assert cli.main(["train", *arguments]) == cli.EXIT_MISTAKE
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("jaxmoe: ")
    assert len(error.splitlines()) == 1
    assert all(option.partition("=")[0] in error for option in options.split())
