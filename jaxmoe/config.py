# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The configuration: frozen dataclasses, one per part of the system.

A module receives only the dataclass it needs, never the whole tree. Every field says
what it means and in which unit; ``docs/configuration.md`` is generated from here. How
the values are read from gin files and the command line stands in ``gin_config.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from jaxmoe import config_base as base
from jaxmoe.config_base import ConfigError as ConfigError
from jaxmoe.config_base import check_multiple, mistake, near, option

# ruff: noqa: RUF009 - `option` makes a dataclasses.field

Auto = Literal["auto"]

DIGITS_IMAGES = 1797  # in scikit-learn's set of handwritten digits
DIGITS_PIXELS = 8  # along the side of an image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the devices are laid out over the named axes `data`, `expert`, `pipe`."""

    data: int | Auto = option("auto", "devices that hold different sequences", low=1)
    expert: int | Auto = option(
        "auto", "devices over which experts are split (and sequences too)", low=1
    )
    pipe: int | Auto = option(
        "auto", "pipeline ranks over which layers are split", low=1
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = option(
        "auto", "which accelerator must be there; 'auto' takes the best present"
    )
    virtual_devices: int = option(
        8,
        "CPU devices to simulate when sizes are 'auto' and the platform is CPU",
        low=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The M6 stack: one Transformer that is encoder and decoder at once."""

    num_layers: int = option(4, "Transformer layers", low=1, high=10_000)
    width: int = option(64, "model width", low=1)
    num_heads: int = option(4, "attention heads", low=1)
    head_dim: int | Auto = option(
        "auto", "size of a head; 'auto': width / heads", low=1
    )
    ffn_width: int = option(256, "hidden width of the dense feed-forward layers", low=1)
    layer_pattern: str = option(
        "dense,moe",
        "kinds of the layers' feed-forward part, repeated until num_layers are filled:"
        " 'dense' or 'moe', each optionally '*N', with commas, e.g. 'dense*3,moe*58'",
    )
    activation: Literal["gelu", "swiglu"] = option("gelu", "feed-forward activation")
    norm: Literal["layer", "rms"] = option("layer", "LayerNorm or RMSNorm")
    norm_position: Literal["pre", "post"] = option(
        "pre", "norm before each sub-layer, or after the residual sum"
    )
    use_bias: bool = option(True, "biases in projections, feed-forward parts and norms")
    vocab_size: int | Auto = option(
        "auto", "tokens; 'auto': as the tokenizer has", low=1
    )
    sequence_length: int = option(28, "positions of a sequence, image and text", low=2)
    num_patches: int = option(4, "image patches at most per sequence", low=0)
    patch_dim: int = option(
        16, "numbers per patch: pixels, or ready-made features", low=1
    )
    tie_embeddings: bool = option(True, "the output projection is the token embedding")
    share_layers: bool = option(
        False, "all layers of a kind share one set of weights (Pseudo-to-Real)"
    )
    init_std: float = option(0.15, "standard deviation of the initial weights", low=0.0)
    compute_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "type of activations and of the weights in products; masters: float32",
    )
    remat: Literal["none", "dots", "full"] = option(
        "none",
        "what the backward pass recomputes: nothing; all but matrix products; all."
        " The expert exchange is never recomputed",
    )

    @property
    def head_size(self) -> int:
        """Size of an attention head, 'auto' resolved."""
        if self.head_dim == "auto":
            return self.width // self.num_heads
        return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """The mixture-of-experts layers."""

    num_experts: int = option(8, "logical experts of a layer", low=1)
    top_k: int = option(
        2, "experts per token; with router='prototype' the number of prototypes", low=1
    )
    router: Literal["top_k", "prototype", "grouped_sigmoid"] = option(
        "top_k",
        "softmax top-k; k top-1 prototypes (M6-T); group-limited sigmoid (DeepSeek-V3)",
    )
    normalize_weights: bool = option(
        False, "the weights of a token's experts are divided by their sum ('top_k')"
    )
    expert_width: int | Auto = option(
        "auto", "hidden width of an expert; 'auto': Model.ffn_width", low=1
    )
    num_shared_experts: int = option(0, "experts that every token visits", low=0)
    capacity_factor: float | None = option(
        None,
        "capacity of an expert as a multiple of its even share; None: dropless",
        above=0.0,
    )
    capacity_mode: Literal["kx", "1x"] = option(
        "kx", "the even share counts each token top_k times ('kx') or once ('1x'), M6-T"
    )
    group_tokens: int | Auto = option(
        "auto",
        "tokens of a routing group, inside which capacity and balance are counted;"
        " 'auto': one sequence",
        low=1,
    )
    buffer_factor: float | None = option(
        None,
        "rows a device can receive in the expert exchange as a multiple of the even"
        " share; None: as many as could ever come. Overflow is counted as dropped",
        above=0.0,
    )
    balance_loss: float = option(
        0.01, "coefficient of the Switch balance loss", low=0.0
    )
    z_loss: float = option(0.0, "coefficient of the router z-loss", low=0.0)
    num_groups: int = option(1, "expert groups of router='grouped_sigmoid'", low=1)
    top_groups: int = option(1, "groups kept per token by 'grouped_sigmoid'", low=1)
    route_scale: float = option(
        1.0, "factor on the weights of 'grouped_sigmoid'", low=0.0
    )
    bias_update_rate: float = option(
        0.0, "step of the selection bias of 'grouped_sigmoid' per update", low=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its schedule."""

    name: Literal["adamw", "adafactor", "sgd"] = option("adamw", "update rule (optax)")
    learning_rate: float = option(4e-3, "peak learning rate", low=0.0)
    schedule: Literal["cosine", "linear", "rsqrt", "constant"] = option(
        "cosine", "shape of the decay after warm-up, over Train.steps"
    )
    warmup_steps: int = option(100, "steps of linear warm-up from 0", low=0)
    end_fraction: float = option(
        0.05,
        "final over peak learning rate of 'cosine' and 'linear'",
        low=0.0,
        high=1.0,
    )
    beta1: float = option(0.9, "decay of the first moment (adamw)", low=0.0, below=1.0)
    beta2: float = option(
        0.98, "decay of the second moment (adamw)", low=0.0, below=1.0
    )
    epsilon: float = option(1e-8, "added to the root of the second moment", above=0.0)
    weight_decay: float = option(
        0.01, "decoupled decay; never on norms, biases and router weights", low=0.0
    )
    clip_norm: float | None = option(
        1.0, "global gradient norm at most; None: off", above=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    source: Literal["digits", "text"] = option(
        "digits",
        "'digits': scikit-learn's handwritten digits with captions, and running text;"
        " 'text': the running text alone, whatever the image tasks weigh",
    )
    batch_size: int = option(64, "sequences per step over all devices", low=1)
    seed: int = option(0, "seed of order, task choice and augmentation", low=0)
    tokenizer: str = option(
        "bytes", "'bytes', 'sentencepiece:FILE' or 'tokenizers:FILE' (Hugging Face)"
    )
    patch_size: int = option(
        4, "pixels along the side of a patch", low=1, high=DIGITS_PIXELS
    )
    shift_pixels: int = option(
        1,
        "images move by up to so many pixels in training",
        low=0,
        high=DIGITS_PIXELS - 1,
    )
    held_out: int = option(
        297, "digits images kept from training", low=1, high=DIGITS_IMAGES - 1
    )
    caption_weight: float = option(0.84, "share of image captioning", low=0.0)
    image_denoise_weight: float = option(
        0.04, "share of image-based denoising", low=0.0
    )
    text_denoise_weight: float = option(0.06, "share of text denoising", low=0.0)
    lm_weight: float = option(0.06, "share of language modelling", low=0.0)
    mask_fraction: float = option(
        0.3, "share of the tokens masked for denoising", low=0.0, high=1.0
    )
    num_threads: int = option(2, "threads that prepare batches", low=0)
    prefetch_batches: int = option(4, "batches prepared ahead", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the training state is written."""

    every_steps: int = option(500, "steps between checkpoints; 0: only the end", low=0)
    keep: int = option(3, "newest checkpoints kept", low=1)
    asynchronous: bool = option(True, "write while training goes on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The run."""

    steps: int = option(1300, "optimizer updates in all", low=0)
    seed: int = option(0, "seed of the initial weights", low=0)
    accumulation: int = option(
        1, "microbatches whose gradients are summed before one update", low=1
    )
    log_every: int = option(10, "steps between logged metrics", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: only at the end", low=0)
    eval_batches: int = option(4, "held-out batches of an evaluation", low=0)
    init_from: str = option("", "run folder whose weights start this run; '': none")
    compilation_cache: str = option(
        "", "folder of jax's persistent compilation cache; '': off"
    )


SECTIONS = (Mesh, Model, MoE, Optimizer, Data, Checkpoint, Train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Only the command line and the trainer see it."""

    mesh: Mesh = Mesh()
    model: Model = Model()
    moe: MoE = MoE()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    train: Train = Train()


def expert_width(model: Model, moe: MoE) -> int:
    """Hidden width of an expert, 'auto' resolved."""
    return model.ffn_width if moe.expert_width == "auto" else moe.expert_width


def group_tokens(model: Model, moe: MoE) -> int:
    """Tokens of a routing group, 'auto' resolved."""
    return model.sequence_length if moe.group_tokens == "auto" else moe.group_tokens


def layer_kinds(model: Model) -> tuple[str, ...]:
    """The kind of every layer, 'dense' or 'moe', from the first to the last.

    Raises:
      ConfigError: if the pattern cannot be read or does not fill the layers exactly.
    """
    parts: list[tuple[str, int]] = []
    for text in model.layer_pattern.split(","):
        match = re.fullmatch(r"\s*(dense|moe)\s*(?:\*\s*([1-9][0-9]{0,4})\s*)?", text)
        if match is None:
            raise mistake(
                f"Model.layer_pattern={model.layer_pattern!r} has the part {text!r}",
                "its parts are 'dense' or 'moe', each optionally '*N' with N from 1 on",
                "Set Model.layer_pattern='moe' or, for example, 'dense,moe*3'",
            )
        parts.append((match[1], int(match[2] or 1)))
    period, layers = sum(count for _, count in parts), model.num_layers
    if layers % period:
        kind, count = parts[-1]
        last = layers - (period - count)
        shorter = ",".join([*model.layer_pattern.split(",")[:-1], f"{kind}*{last}"])
        raise mistake(
            f"Model.layer_pattern={model.layer_pattern!r} names {period} layers, which"
            f" cannot fill Model.num_layers={layers}",
            "the pattern is repeated a whole number of times",
            f"Set Model.num_layers={near(layers, period)}, or"
            f" Model.layer_pattern={shorter if last > 0 else 'moe'!r}",
        )
    return tuple(kind for kind, count in parts for _ in range(count)) * (
        layers // period
    )


def check(config: Config) -> None:
    """Checks what can be checked without devices.

    Raises:
      ConfigError: for the first mistake found.
    """
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            name = f"{type(part).__name__}.{field.name}"
            base.check_bounds(name, field, getattr(part, field.name))
    _check_model(config.model)
    if "moe" in layer_kinds(config.model):
        _check_moe(config)
    _check_data(config)
    base.check_tokenizer_spec(config.data.tokenizer)
    base.check_run_folder(config.train.init_from)
    mesh = config.mesh
    sizes = [1 if n == "auto" else n for n in (mesh.data, mesh.expert, mesh.pipe)]
    check_mesh(config, *sizes)


def check_mesh(config: Config, data: int, expert: int, pipe: int) -> None:
    """Checks that the model and the batch can be split over a mesh of these sizes.

    Raises:
      ConfigError: naming both the field and the mesh axis, with sizes that work.
    """
    model, moe, batch = config.model, config.moe, config.data.batch_size
    if pipe != 1:
        raise mistake(
            f"Mesh.pipe={pipe} cannot split Model.num_layers={model.num_layers} layers",
            "this version has no pipeline, so every device holds all layers",
            "Set Mesh.pipe=1",
        )
    routed = "moe" in layer_kinds(model)
    if routed:
        step, low = _experts_step(moe)
        experts = ("MoE.num_experts", moe.num_experts, "Mesh.expert", expert)
        check_multiple(*experts, step=step, low=low)
    size = group_tokens(model, moe) if routed else 1
    rows_per_group = size // math.gcd(size, model.sequence_length)
    parts, shards = config.train.accumulation, data * expert
    mesh = f"(Mesh.data={data} x Mesh.expert={expert})"
    if batch % (parts * shards):
        rows = batch // parts
        fits = [n for n in base.all_divisors(rows) if rows // n % rows_per_group == 0]
        other = (
            f", or Mesh.data x Mesh.expert = {base.choice(base.closest(fits, shards))}"
        )
        raise mistake(
            f"Data.batch_size={batch} / Train.accumulation={parts} sequences cannot be"
            f" split over {mesh} devices",
            f"the batch must be a multiple of {parts} x {shards} = {parts * shards}",
            f"Set Data.batch_size={near(batch, parts * shards * rows_per_group)}"
            + (other if fits else ""),
        )
    rows = batch // parts // shards
    if rows % rows_per_group:
        sizes = [model.sequence_length * n for n in base.all_divisors(rows)]
        raise mistake(
            f"MoE.group_tokens={size} does not divide the tokens of a device, which are"
            f" {rows * model.sequence_length} = Data.batch_size={batch} /"
            f" Train.accumulation={parts} / {mesh} sequences of"
            f" Model.sequence_length={model.sequence_length}",
            "a routing group lies inside one microbatch of one device",
            f"Set MoE.group_tokens={base.choice(base.closest(sizes, size))}, or 'auto'",
        )


def _check_model(model: Model) -> None:
    if model.head_dim == "auto":
        heads = ("Model.width", model.width, "Model.num_heads", model.num_heads)
        check_multiple(*heads, rule="with Model.head_dim='auto' it must be a multiple")
    if model.sequence_length < model.num_patches + 2:
        raise mistake(
            f"Model.sequence_length={model.sequence_length} has no room for text behind"
            f" Model.num_patches={model.num_patches}",
            "a sequence holds the patches and at least 2 tokens",
            f"Set Model.sequence_length={model.num_patches + 2} or more",
        )


def _experts_step(moe: MoE) -> tuple[int, int]:
    """What the number of experts must be a multiple of, and its smallest value."""
    if moe.router == "prototype":
        return moe.top_k, moe.top_k
    if moe.router == "grouped_sigmoid":
        return moe.num_groups, -(-moe.top_k // moe.top_groups) * moe.num_groups
    return 1, moe.top_k


_ROUTER_OF = {  # which router uses a field
    "normalize_weights": "top_k",
    "num_groups": "grouped_sigmoid",
    "top_groups": "grouped_sigmoid",
    "route_scale": "grouped_sigmoid",
    "bias_update_rate": "grouped_sigmoid",
}


def _check_moe(config: Config) -> None:
    model, moe = config.model, config.moe
    expert = 1 if config.mesh.expert == "auto" else config.mesh.expert
    step = math.lcm(_experts_step(moe)[0], expert)
    if moe.top_k > moe.num_experts:
        raise mistake(
            f"MoE.top_k={moe.top_k} is more than MoE.num_experts={moe.num_experts}",
            "a token visits an expert once",
            f"Set MoE.top_k={moe.num_experts} or less, or"
            f" MoE.num_experts={-(-moe.top_k // step) * step}",
        )
    if moe.router == "grouped_sigmoid" and moe.top_groups > moe.num_groups:
        raise mistake(
            f"MoE.top_groups={moe.top_groups} is more than"
            f" MoE.num_groups={moe.num_groups}",
            "groups are kept out of those that there are",
            f"Set MoE.top_groups={moe.num_groups} or less",
        )
    if moe.router != "top_k":
        name = "top_k" if moe.router == "prototype" else "num_groups"
        split = (f"MoE.{name}", getattr(moe, name))
        rule = f"with MoE.router={moe.router!r} it must be a multiple"
        low = _experts_step(moe)[1]
        experts = ("MoE.num_experts", moe.num_experts)
        check_multiple(*experts, *split, step=expert, low=low, rule=rule)
    if moe.router == "grouped_sigmoid":
        kept = moe.num_experts // moe.num_groups * moe.top_groups
        if moe.top_k > kept:
            raise mistake(
                f"MoE.top_k={moe.top_k} is more than the {kept} experts in"
                f" MoE.top_groups={moe.top_groups} of MoE.num_groups={moe.num_groups}"
                f" groups of MoE.num_experts={moe.num_experts}",
                "a token chooses inside the groups that it keeps",
                f"Set MoE.top_k={kept} or less, or"
                f" MoE.top_groups={-(-moe.top_k * moe.num_groups // moe.num_experts)}",
            )
    for name, router in _ROUTER_OF.items():
        value, default = getattr(moe, name), getattr(MoE, name)
        if moe.router != router and value != default:
            raise mistake(
                f"MoE.{name}={value} has no effect with MoE.router={moe.router!r}",
                f"only MoE.router={router!r} uses it",
                f"Set MoE.{name}={default}, or MoE.router={router!r}",
            )
    size, length = group_tokens(model, moe), model.sequence_length
    if size % length and length % size:
        raise mistake(
            f"MoE.group_tokens={size} neither divides nor is a multiple of"
            f" Model.sequence_length={length}",
            "routing groups are whole sequences or whole parts of one",
            f"Set MoE.group_tokens={near(size, length)}, or 'auto'",
        )


def _check_data(config: Config) -> None:
    data, model, parts = config.data, config.model, config.train.accumulation
    batch = ("Data.batch_size", data.batch_size, "Train.accumulation", parts)
    check_multiple(*batch)
    tasks = ["text_denoise", "lm"]
    if data.source == "digits":
        tasks = ["caption", "image_denoise", *tasks]
    weights = {f"Data.{task}_weight": getattr(data, f"{task}_weight") for task in tasks}
    if not any(weights.values()):
        raise mistake(
            ", ".join(f"{name}={w}" for name, w in weights.items()) + " choose no task",
            f"with Data.source={data.source!r} one of them must be above 0",
            "Set Data.lm_weight=1.0",
        )
    images = data.caption_weight or data.image_denoise_weight
    if data.source != "digits" or not images:
        return
    if DIGITS_PIXELS % data.patch_size:
        raise mistake(
            f"Data.patch_size={data.patch_size} does not divide the images of"
            f" {DIGITS_PIXELS} x {DIGITS_PIXELS} pixels",
            "an image is cut into whole patches",
            f"Set Data.patch_size={base.choice(base.all_divisors(DIGITS_PIXELS))}",
        )
    patches, numbers = (DIGITS_PIXELS // data.patch_size) ** 2, data.patch_size**2
    if (model.num_patches, model.patch_dim) != (patches, numbers):
        raise mistake(
            f"Model.num_patches={model.num_patches} and"
            f" Model.patch_dim={model.patch_dim} do not fit the images of"
            f" Data.source='digits' (Data.caption_weight={data.caption_weight},"
            f" Data.image_denoise_weight={data.image_denoise_weight})",
            f"with Data.patch_size={data.patch_size} an image has {patches} patches of"
            f" {numbers} numbers",
            f"Set Model.num_patches={patches} and Model.patch_dim={numbers}, or"
            " Data.source='text' for no images",
        )
