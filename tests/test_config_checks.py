# SPDX-License-Identifier: Apache-2.0
"""The checks of the configuration: their messages, and that their remedies work."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.config import Config, ConfigError
from jaxmoe.config_checks import check, check_mesh
from jaxmoe.config_values import FIELDS
from tests.config_cases import BASE, better, changed, default, message


@pytest.mark.parametrize("config", [Config(), BASE], ids=["default", "here"])
def test_what_is_right_passes(config):
    check(config)


# Values that are wrong together, and the whole message.
MISTAKES = [
    (
        {"Mesh__expert": 3},
        "MoE.num_experts=8 cannot be split evenly by Mesh.expert=3: it must be a"
        " multiple. Set MoE.num_experts=6 or 9, or Mesh.expert=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_experts": 60, "Mesh__expert": 8},
        "MoE.num_experts=60 cannot be split evenly by Mesh.expert=8: it must be a"
        " multiple. Set MoE.num_experts=56 or 64, or Mesh.expert=3, 4, 5, 6, 10 or 12.",
    ),
    (
        {"MoE__top_k": 9},
        "MoE.top_k=9 is more than MoE.num_experts=8: a token visits an expert once."
        " Set MoE.top_k=8 or less, or MoE.num_experts=9.",
    ),
    (
        {"MoE__top_k": 3, "MoE__router": "prototype"},
        "MoE.num_experts=8 cannot be split evenly by MoE.top_k=3: with"
        " MoE.router='prototype' it must be a multiple. Set MoE.num_experts=6 or 9, or"
        " MoE.top_k=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_groups": 3, "MoE__router": "grouped_sigmoid"},
        "MoE.num_experts=8 cannot be split evenly by MoE.num_groups=3: with"
        " MoE.router='grouped_sigmoid' it must be a multiple. Set MoE.num_experts=6 or"
        " 9, or MoE.num_groups=1, 2, 4 or 8.",
    ),
    (
        {"MoE__num_groups": 4, "MoE__top_groups": 5, "MoE__router": "grouped_sigmoid"},
        "MoE.top_groups=5 is more than MoE.num_groups=4: groups are kept out of those"
        " that there are. Set MoE.top_groups=4 or less.",
    ),
    (
        {"MoE__num_groups": 4, "MoE__top_k": 3, "MoE__router": "grouped_sigmoid"},
        "MoE.top_k=3 is more than the 2 experts in MoE.top_groups=1 of MoE.num_groups=4"
        " groups of MoE.num_experts=8: a token chooses inside the groups that it keeps."
        " Set MoE.top_k=2 or less, or MoE.top_groups=2.",
    ),
    (
        {"MoE__bias_update_rate": 0.001},
        "MoE.bias_update_rate=0.001 has no effect with MoE.router='top_k': only"
        " MoE.router='grouped_sigmoid' uses it. Set MoE.bias_update_rate=0.0, or"
        " MoE.router='grouped_sigmoid'.",
    ),
    (
        {"MoE__normalize_weights": True, "MoE__router": "prototype"},
        "MoE.normalize_weights=True has no effect with MoE.router='prototype': only"
        " MoE.router='top_k' uses it. Set MoE.normalize_weights=False, or"
        " MoE.router='top_k'.",
    ),
    (
        {"MoE__normalize_weights": True, "MoE__top_k": 1},
        "MoE.normalize_weights=True with MoE.top_k=1 makes every weight 1: the router"
        " would learn nothing from the main loss. Set MoE.top_k=2, or"
        " MoE.normalize_weights=False.",
    ),
    (
        {"MoE__normalize_weights": True, "MoE__top_k": 1, "MoE__num_experts": 1},
        "MoE.normalize_weights=True with MoE.top_k=1 makes every weight 1: the router"
        " would learn nothing from the main loss. Set MoE.normalize_weights=False.",
    ),
    (
        {"MoE__group_tokens": 100},
        "MoE.group_tokens=100 neither divides nor is a multiple of"
        " Model.sequence_length=48: routing groups are whole sequences or whole parts"
        " of one. Set MoE.group_tokens=96 or 144, or 'auto'.",
    ),
    (
        {"MoE__group_tokens": 480},
        "MoE.group_tokens=480 does not divide the tokens of a device, which are 3072 ="
        " Data.batch_size=64 / Train.accumulation=1 / (Mesh.data=1 x Mesh.expert=1)"
        " sequences of Model.sequence_length=48: a routing group lies inside one"
        " microbatch of one device. Set MoE.group_tokens=48, 96, 192, 384, 768 or 1536,"
        " or 'auto'.",
    ),
    (
        {"Data__batch_size": 10, "Mesh__data": 4},
        "Data.batch_size=10 / Train.accumulation=1 sequences cannot be split over"
        " (Mesh.data=4 x Mesh.expert=1) devices: the batch must be a multiple of"
        " 1 x 4 = 4. Set Data.batch_size=8 or 12, or Mesh.data x Mesh.expert = 1, 2, 5"
        " or 10.",
    ),
    (
        {"Data__batch_size": 8, "Train__accumulation": 3},
        "Data.batch_size=8 cannot be split evenly by Train.accumulation=3: it must be a"
        " multiple. Set Data.batch_size=6 or 9, or Train.accumulation=1, 2, 4 or 8.",
    ),
    (
        {"Model__width": 62},
        "Model.width=62 cannot be split evenly by Model.num_heads=4: with"
        " Model.head_dim='auto' it must be a multiple. Set Model.width=60 or 64, or"
        " Model.num_heads=1, 2, 31 or 62.",
    ),
    (
        {"Model__sequence_length": 17},
        "Model.sequence_length=17 has no room for text behind Model.num_patches=16: a"
        " sequence holds the patches and at least 2 tokens. Set"
        " Model.sequence_length=18 or more.",
    ),
    (
        {"Model__num_layers": 60, "Model__layer_pattern": "dense*3,moe*58"},
        "Model.layer_pattern='dense*3,moe*58' names 61 layers, which cannot fill"
        " Model.num_layers=60: the pattern is repeated a whole number of times. Set"
        " Model.num_layers=61, or Model.layer_pattern='dense*3,moe*57'.",
    ),
    (
        {"Model__layer_pattern": "dense,mo*3"},
        "Model.layer_pattern='dense,mo*3' has the part 'mo*3': its parts are 'dense' or"
        " 'moe', each optionally '*N' with N from 1 on. Set Model.layer_pattern='moe'"
        " or, for example, 'dense,moe*3'.",
    ),
    (
        {"Model__num_patches": 0},
        "Model.num_patches=0 and Model.patch_dim=4 do not fit the images of"
        " Data.source='digits' (Data.caption_weight=0.75,"
        " Data.image_denoise_weight=0.05): with Data.patch_size=2 an image has 16"
        " patches of 4 numbers. Set Model.num_patches=16 and Model.patch_dim=4, or"
        " Data.source='text' for no images.",
    ),
    (
        {"Data__patch_size": 3},
        "Data.patch_size=3 does not divide the images of 8 x 8 pixels: an image is cut"
        " into whole patches. Set Data.patch_size=1, 2, 4 or 8.",
    ),
    (
        {
            "Data__source": "text",
            "Data__lm_weight": 0.0,
            "Data__text_denoise_weight": 0.0,
        },
        "Data.text_denoise_weight=0.0, Data.lm_weight=0.0 choose no task: with"
        " Data.source='text' one of them must be above 0. Set Data.lm_weight=1.0.",
    ),
    (
        {"Data__held_out": 1797},
        "Data.held_out=1797 is too large: it must be at most 1796. "
        + default("Data.held_out"),
    ),
    (
        {"Mesh__data": 0},
        "Mesh.data=0 is too small: it must be at least 1. " + default("Mesh.data"),
    ),
    (
        {"Optimizer__beta1": 1.0},
        "Optimizer.beta1=1.0 is too large: it must be below 1. "
        + default("Optimizer.beta1"),
    ),
    (
        {"Optimizer__clip_norm": 0.0},
        "Optimizer.clip_norm=0.0 is too small: it must be above 0. "
        + default("Optimizer.clip_norm"),
    ),
    (
        {"Optimizer__learning_rate": math.nan},
        "Optimizer.learning_rate=nan is no value: NaN and infinity are refused. "
        + default("Optimizer.learning_rate"),
    ),
    (
        {"Data__seed": 2**31},
        "Data.seed=2147483648 is too large: it must be at most 2147483647. "
        + default("Data.seed"),
    ),
    (
        {"Data__tokenizer": "sentencepice:x"},
        "Data.tokenizer='sentencepice:x' is unknown: it must be 'bytes',"
        " 'sentencepiece:FILE' or 'tokenizers:FILE'. Set"
        " Data.tokenizer='sentencepiece:FILE'.",
    ),
    (
        {"Data__tokenizer": "tokenizers:no/file"},
        "Data.tokenizer='tokenizers:no/file' names no file: the part behind the colon"
        " is a file's path, and there is no 'no/file'. Give the right path, or set"
        " Data.tokenizer='bytes'.",
    ),
    (
        {"Train__init_from": "no/run"},
        "Train.init_from='no/run' is not a folder: it is the run folder (--workdir) of"
        " an earlier training. Give its path, or set Train.init_from='' to start from"
        " random weights.",
    ),
    (
        {"Train__profile_steps": "4 to 6"},
        "Train.profile_steps='4 to 6' names no steps: it is a number from 1 on, or two"
        " such numbers FIRST-LAST in rising order. Set Train.profile_steps='10-12', or"
        " '' to profile none.",
    ),
    (
        {"Train__profile_steps": "6-4"},
        "Train.profile_steps='6-4' names no steps: it is a number from 1 on, or two"
        " such numbers FIRST-LAST in rising order. Set Train.profile_steps='10-12', or"
        " '' to profile none.",
    ),
    (
        {"Train__profile_steps": "0"},
        "Train.profile_steps='0' names no steps: it is a number from 1 on, or two such"
        " numbers FIRST-LAST in rising order. Set Train.profile_steps='10-12', or '' to"
        " profile none.",
    ),
    (
        {"Train__profile_steps": "9-12", "Train__steps": 10},
        "Train.profile_steps='9-12' goes beyond Train.steps=10: only steps of the run"
        " can be profiled. Set Train.steps=12 or more, or Train.profile_steps=''.",
    ),
]


@pytest.mark.parametrize(
    "values, expected", MISTAKES, ids=["-".join(values) for values, _ in MISTAKES]
)
def test_message(values, expected):
    assert message(changed(**values)) == expected


def test_existing_files_pass(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    check(changed(Data__tokenizer=f"tokenizers:{file}", Train__init_from=str(tmp_path)))


@pytest.mark.parametrize(
    "values",
    [
        {"Model__width": 62, "Model__head_dim": 16},
        {"Model__layer_pattern": "dense", "MoE__top_k": 9},  # no layer has experts
        {"MoE__normalize_weights": True, "MoE__top_k": 2},
        {"MoE__top_k": 1},
        {
            "MoE__normalize_weights": True,
            "MoE__top_k": 1,
            "Model__layer_pattern": "dense",
        },
        {"MoE__group_tokens": 24},
        {"MoE__group_tokens": 96},
        {"Data__source": "text", "Model__num_patches": 0},
        {"Data__source": "text", "Model__patch_dim": 2048},
        {"Train__steps": 0, "Data__caption_weight": 0.0, "Model__patch_dim": 4},
        {"Data__patch_size": 4, "Model__num_patches": 4, "Model__patch_dim": 16},
        {"Mesh__pipe": 1},
        {"Mesh__pipe": 4},
        {"Mesh__pipe": 4, "Pipeline__microbatches": 8},
        {"Mesh__pipe": 4, "Pipeline__schedule": "1f1b", "Pipeline__microbatches": 1},
        {"Mesh__pipe": 3, "Pipeline__schedule": "gpipe", "Data__batch_size": 6},
        {"Mesh__pipe": 3, "Pipeline__schedule": "dualpipev", "Data__batch_size": 6},
        {"Mesh__pipe": 4, "Pipeline__schedule": "dualpipev"},  # half of it is empty
        {"Mesh__pipe": 4, "Model__num_layers": 6},  # uneven: all layers run
        {"Mesh__pipe": 4, "Model__num_layers": 7},
        {"Mesh__pipe": 2, "Model__num_layers": 7},
        # 'auto' ranks: a pipeline or not, as the devices are
        {"Pipeline__schedule": "zb_h1"},
        {"Pipeline__schedule": "dualpipev", "Pipeline__microbatches": 4},
        {"Pipeline__microbatches": 4, "Model__num_layers": 1},
    ],
    ids=str,
)
def test_unusual_but_right(values):
    check(changed(**values))


def test_check_mesh_sees_the_resolved_sizes():
    """What passes with sizes left open can fail on the devices that are there."""
    config = changed(MoE__group_tokens=1536)
    check(config)
    check_mesh(config, 1, 2, 1)
    with pytest.raises(ConfigError, match=r"1536 does not divide .* 768 = .*data=2 x"):
        check_mesh(config, 2, 2, 1)
    with pytest.raises(ConfigError, match=r"Mesh\.expert=3"):
        check_mesh(config, 1, 3, 1)
    with pytest.raises(ConfigError, match=r"Mesh\.pipe=5 .* Model\.num_layers=4"):
        check_mesh(config, 1, 2, 5)
    with pytest.raises(
        ConfigError, match=r"1536 does not divide .* 768 = .*'auto' \(4"
    ):
        check_mesh(config, 1, 1, 2)


# Values of which any few fit together, and others.
FITTING = {
    "MoE__num_experts": st.sampled_from([16, 32, 64]),
    "MoE__top_k": st.sampled_from([1, 2, 4]),
    "MoE__group_tokens": st.sampled_from(["auto", 12, 48, 96]),
    "Data__batch_size": st.sampled_from([64, 128]),
    "Train__accumulation": st.sampled_from([1, 2]),
    "Mesh__data": st.sampled_from(["auto", 1, 2]),
    "Mesh__expert": st.sampled_from(["auto", 1, 2, 4, 8]),
    "Mesh__pipe": st.sampled_from(["auto", 1, 2, 4]),
    "Model__num_heads": st.sampled_from([1, 2, 4, 8]),
}
OTHER = {
    "MoE__num_experts": st.integers(1, 64),
    "MoE__top_k": st.integers(1, 80),
    "MoE__group_tokens": st.sampled_from([36, 240, 768, 1536]),
    "MoE__normalize_weights": st.just(True),
    "Data__batch_size": st.integers(1, 100),
    "Train__accumulation": st.integers(1, 12),
    "Mesh__data": st.integers(1, 12),
    "Mesh__expert": st.integers(1, 12),
    "Mesh__pipe": st.integers(2, 8),
    "Pipeline__schedule": st.sampled_from(FIELDS["Pipeline.schedule"].choices),
    "Pipeline__microbatches": st.integers(1, 20),
    "Model__num_layers": st.integers(1, 6),
    "Model__num_heads": st.integers(1, 12),
    "Model__sequence_length": st.integers(2, 60),
    "Model__num_patches": st.integers(0, 20),
    "Data__patch_size": st.integers(1, 8),
}
GROUPS = {"MoE__num_groups": [2, 4], "MoE__top_groups": [1, 2]}


@st.composite
def sizes(draw) -> Config:
    """Sizes that fit together, but for at most two."""
    values = {name: draw(strategy) for name, strategy in FITTING.items()}
    values["MoE__router"] = draw(st.sampled_from(FIELDS["MoE.router"].choices))
    others = dict(OTHER)
    if values["MoE__router"] == "grouped_sigmoid":
        values |= {name: draw(st.sampled_from(fit)) for name, fit in GROUPS.items()}
        others |= dict.fromkeys(GROUPS, st.integers(1, 12))
    names = st.lists(st.sampled_from(sorted(others)), unique=True, max_size=2)
    for name in draw(names):
        values[name] = draw(others[name])
    return changed(**values)


def fact(text: str) -> str:
    """What a message complains about, whatever the numbers."""
    return re.sub(r"\d+", "N", text.partition(":")[0])


def test_the_remedies_work():
    """Every single value that a message proposes ends that complaint."""
    facts = []

    @settings(max_examples=600)
    @given(sizes())
    def remedies(config):
        text = message(config)
        facts.append(fact(text))
        for word, other in better(config, text):
            now = message(other)
            assert fact(text) != fact(now), f"{text}\n{word}\n{now}"

    remedies()
    # Neither only right ones, nor a few mistakes that hide all the others.
    assert 0.4 < facts.count("") / len(facts) < 0.8
    assert len(set(facts)) >= 15
