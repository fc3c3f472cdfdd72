# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The checks of the configuration: every field's range, and what must fit.

A check tells fact, rule and remedy, and the remedy names values that pass it. ``check``
needs no devices; ``check_mesh`` is called again once their number is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re

from jaxmoe import config_base as base
from jaxmoe.config import (
    DIGITS_PIXELS,
    MOST_LAYERS,
    Config,
    Data,
    Model,
    MoE,
    Pipeline,
    Train,
)
from jaxmoe.config_base import ConfigError, check_multiple, mistake, near
from jaxmoe.config_derived import (
    group_tokens,
    image_patches,
    layer_kinds,
    microbatches,
    num_replicas,
    pipeline_microbatches,
)
from jaxmoe.config_source import TEXT_KINDS, parse_sources
from jaxmoe.eplb.sizes import check_sizes
from jaxmoe.pipeline.schedule import check_numbers
from jaxmoe.pipeline.simulate import parse_costs


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
    profiled_steps(config.train)
    _check_best(config)
    if config.balancer.interval and "moe" not in layer_kinds(config.model):
        raise mistake(
            f"Balancer.interval={config.balancer.interval} with"
            f" Model.layer_pattern={config.model.layer_pattern!r}",
            "the balancer places experts, and there are no layers with experts",
            "Set Balancer.interval=0, or Model.layer_pattern='dense,moe'",
        )
    parse_costs(config.pipeline.costs, name="Pipeline.costs")
    mesh, pipe = config.mesh, config.mesh.pipe
    # An 'auto' size may still become anything: only what is given is checked.
    expert = mesh.expert_nodes if mesh.expert == "auto" else mesh.expert
    if pipe == "auto":
        # A number of microbatches that the fewest ranks cannot use is never used.
        given = config.pipeline.microbatches != "auto"
        pipe = 2 if given and config.model.num_layers > 1 else 1
    sizes = [1 if n == "auto" else n for n in (mesh.data, expert, pipe)]
    check_mesh(config, *sizes)


def profiled_steps(train: Train) -> range:
    """The steps of `Train.profile_steps`, the first of a run being 1.

    Raises:
      ConfigError: if the text cannot be read, or the run has no such steps.
    """
    text, steps = train.profile_steps, train.steps
    if not text:
        return range(0)
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    name = f"Train.profile_steps={text!r}"
    if not 1 <= first <= last:
        end = min(12, steps)
        remedy = f"'{max(end - 2, 1)}-{end}', or '' to profile none" if end else "''"
        raise mistake(
            f"{name} names no steps",
            "it is a number from 1 on, or two such numbers FIRST-LAST in rising order",
            f"Set Train.profile_steps={remedy}",
        )
    if last > steps:
        raise mistake(
            f"{name} goes beyond Train.steps={steps}",
            "only steps of the run can be profiled",
            f"Set Train.steps={last} or more, or Train.profile_steps=''",
        )
    return range(first, last + 1)


def _check_best(config: Config) -> None:
    """That every checkpoint is evaluated if evaluations decide which are kept."""
    best, every = config.checkpoint, config.train.eval_every
    if not best.keep_best or best.best_metric == "loss":
        return
    if not every or best.every_steps % every:
        raise mistake(
            f"Checkpoint.best_metric={best.best_metric!r} with"
            f" Train.eval_every={every} and Checkpoint.every_steps={best.every_steps}",
            "the figure comes from an evaluation at the step that is saved",
            f"Set Train.eval_every={best.every_steps or 500}, or"
            " Checkpoint.best_metric='loss'",
        )


def check_mesh(config: Config, data: int, expert: int, pipe: int) -> None:
    """Checks that the model and the batch can be split over a mesh of these sizes.

    Raises:
      ConfigError: naming both the field and the mesh axis, with sizes that work.
    """
    model, moe, batch = config.model, config.moe, config.data.batch_size
    if pipe > 1:
        _check_pipeline(config, data, expert, pipe)
    routed = "moe" in layer_kinds(model)
    if routed:
        step, low = _experts_step(moe)
        experts = ("MoE.num_experts", moe.num_experts, "Mesh.expert", expert)
        check_multiple(*experts, step=step, low=low)
        if config.balancer.interval:
            _check_balancer(config, expert)
        if expert % config.mesh.expert_nodes:
            raise mistake(
                f"Mesh.expert_nodes={config.mesh.expert_nodes} does not divide"
                f" Mesh.expert={expert}",
                "a node holds a whole number of the devices along `expert`",
                f"Set Mesh.expert_nodes={base.choice(base.all_divisors(expert))}",
            )
    size = group_tokens(model, moe) if routed else 1
    rows_per_group = size // math.gcd(size, model.sequence_length)
    parts, shards = microbatches(config, pipe), data * expert
    mesh = f"(Mesh.data={data} x Mesh.expert={expert})"
    cut = f"Train.accumulation={config.train.accumulation}"
    if pipe > 1:
        asked = config.pipeline.microbatches
        cut += f" / Pipeline.microbatches={asked!r}"
        if asked == "auto":
            count = pipeline_microbatches(config.pipeline, pipe)
            cut += f" ({count} with Mesh.pipe={pipe})"
    if batch % (parts * shards):
        remedy = f"Set Data.batch_size={near(batch, parts * shards * rows_per_group)}"
        rows = 0 if batch % parts else batch // parts
        if pipe > 1:
            fits = _fitting_microbatches(config, pipe, shards * rows_per_group)
            if fits:
                best = base.closest(fits, parts // config.train.accumulation)
                remedy += f", or Pipeline.microbatches={base.choice(best)}"
        fits = [n for n in base.all_divisors(rows) if rows // n % rows_per_group == 0]
        if fits:
            best = base.closest(fits, shards)
            remedy += f", or Mesh.data x Mesh.expert = {base.choice(best)}"
        raise mistake(
            f"Data.batch_size={batch} / {cut} sequences cannot be split over {mesh}"
            " devices",
            f"the batch must be a multiple of {parts} x {shards} = {parts * shards}",
            remedy,
        )
    rows = batch // parts // shards
    if rows % rows_per_group:
        sizes = [model.sequence_length * n for n in base.all_divisors(rows)]
        raise mistake(
            f"MoE.group_tokens={size} does not divide the tokens of a device, which are"
            f" {rows * model.sequence_length} = Data.batch_size={batch} / {cut} /"
            f" {mesh} sequences of"
            f" Model.sequence_length={model.sequence_length}",
            "a routing group lies inside one microbatch of one device",
            f"Set MoE.group_tokens={base.choice(base.closest(sizes, size))}, or 'auto'",
        )


def _check_pipeline(config: Config, data: int, expert: int, pipe: int) -> None:
    pipeline, model = config.pipeline, config.model
    layers = model.num_layers

    def passes(label: str, value: int | str) -> bool:
        ranks, changed = pipe, pipeline
        if label == "Mesh.pipe":
            ranks = int(value)
        else:
            field = label.removeprefix("Pipeline.")
            changed = dataclasses.replace(pipeline, **{field: value})
        with contextlib.suppress(ConfigError):
            other = dataclasses.replace(config, pipeline=changed)
            check_mesh(other, data, expert, ranks)
            return True
        return False

    if layers < pipe:
        # The pattern's period divides `layers`: one of the next so many is filled.
        deeper = range(pipe, min(pipe + layers, MOST_LAYERS + 1))
        fits = [f"Model.num_layers={n}" for n in deeper if _fills(model, n)][:1]
        fewer = [n for n in range(layers, 1, -1) if _schedulable(pipeline, n)]
        best = next((n for n in fewer if passes("Mesh.pipe", n)), None)
        usual = 1 if pipeline == Pipeline() else "auto"
        fits.append(f"Mesh.pipe={best or usual!r}")
        raise mistake(
            f"Mesh.pipe={pipe} is more than Model.num_layers={layers}",
            "a rank of the pipeline holds at least one layer",
            f"Set {', or '.join(fits)}",
        )
    odd = pipeline.schedule == "dualpipe" and pipe % 2
    other = odd and passes("Pipeline.schedule", "dualpipev")
    check_numbers(
        pipeline.schedule,
        pipe,
        pipeline_microbatches(pipeline, pipe),
        ranks_name="Mesh.pipe",
        microbatches_name="Pipeline.microbatches",
        other="Pipeline.schedule='dualpipev'" if other else "",
        passes=passes,
    )


def _schedulable(pipeline: Pipeline, ranks: int) -> bool:
    """Whether the schedule exists for so many ranks and its microbatches."""
    with contextlib.suppress(ConfigError):
        count = pipeline_microbatches(pipeline, ranks)
        check_numbers(pipeline.schedule, ranks, count)
        return True
    return False


def _check_balancer(config: Config, expert: int) -> None:
    """Slots that hold every expert and are as many on every device."""
    balancer, moe = config.balancer, config.moe
    check_sizes(
        moe.num_experts,
        num_replicas(balancer, moe),
        moe.num_groups,
        balancer.nodes,
        expert,
        names=(
            "Balancer.num_replicas",
            "MoE.num_groups",
            "Balancer.nodes",
            "Mesh.expert",
        ),
    )


def _fitting_microbatches(config: Config, pipe: int, rows: int) -> list[int]:
    """The values of Pipeline.microbatches that leave multiples of so many sequences."""
    batch, step = config.data.batch_size, config.train.accumulation * rows
    fits = [] if batch % step else base.all_divisors(batch // step)
    return [
        n
        for n in fits
        if _schedulable(dataclasses.replace(config.pipeline, microbatches=n), pipe)
    ]


def _fills(model: Model, layers: int) -> bool:
    """Whether the layer pattern fills so many layers."""
    with contextlib.suppress(ConfigError):
        return bool(layer_kinds(dataclasses.replace(model, num_layers=layers)))
    return False


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
    if moe.router == "grouped_sigmoid" and moe.top_k == 1:
        raise mistake(
            "MoE.router='grouped_sigmoid' with MoE.top_k=1 makes every weight equal",
            "weights are divided by their sum: the router would learn nothing",
            "Set MoE.top_k=2 or more, or MoE.router='top_k'",
        )
    if moe.normalize_weights and moe.top_k == 1:
        more = "MoE.top_k=2, or " if moe.num_experts > 1 else ""
        raise mistake(
            "MoE.normalize_weights=True with MoE.top_k=1 makes every weight 1",
            "the router would learn nothing from the main loss",
            f"Set {more}MoE.normalize_weights=False",
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
    data, parts = config.data, config.train.accumulation
    batch = ("Data.batch_size", data.batch_size, "Train.accumulation", parts)
    check_multiple(*batch)
    sources = parse_sources(data.source)
    if data.held_out_source:
        _check_held_out_source(data)
    tasks = ["text_denoise", "lm"]
    kinds = {source.kind for source in sources}
    if not kinds <= set(TEXT_KINDS):
        tasks = ["caption", "image_denoise", *tasks]
    weights = {f"Data.{task}_weight": getattr(data, f"{task}_weight") for task in tasks}
    if not any(weights.values()):
        raise mistake(
            ", ".join(f"{name}={w}" for name, w in weights.items()) + " choose no task",
            f"with Data.source={data.source!r} one of them must be above 0",
            "Set Data.lm_weight=1.0",
        )
    if "caption" in tasks and (data.caption_weight or data.image_denoise_weight):
        _check_images(config, kinds)


def _check_held_out_source(data: Data) -> None:
    held_out = parse_sources(data.held_out_source, "Data.held_out_source")
    if any(source.built_in for source in held_out):
        raise mistake(
            f"Data.held_out_source={data.held_out_source!r} is built in",
            "digits and text have their own held-out part; here stand your own files",
            "Name a file or a folder, or set Data.held_out_source=''",
        )
    if all(source.built_in for source in parse_sources(data.source)):
        raise mistake(
            f"Data.held_out_source={data.held_out_source!r} has no effect with"
            f" Data.source={data.source!r}",
            "digits and text have their own held-out part",
            "Set Data.held_out_source=''",
        )


def _check_images(config: Config, kinds: set[str]) -> None:
    data, model = config.data, config.model
    size, mode = data.image_size, data.image_mode
    if "digits" in kinds and (size, mode) != (DIGITS_PIXELS, "gray"):
        raise mistake(
            f"Data.image_size={size} and Data.image_mode={mode!r} do not fit the images"
            f" of Data.source={data.source!r}",
            f"digits are gray and have {DIGITS_PIXELS} x {DIGITS_PIXELS} pixels, and"
            " all images of a run have one shape",
            f"Set Data.image_size={DIGITS_PIXELS} and Data.image_mode='gray', or"
            " Data.source to images of your own",
        )
    if size % data.patch_size:
        fits = base.closest(base.all_divisors(size), data.patch_size)
        raise mistake(
            f"Data.patch_size={data.patch_size} does not divide the images of"
            f" {size} x {size} pixels",
            "an image is cut into whole patches",
            f"Set Data.patch_size={base.choice(fits)}",
        )
    if data.shift_pixels >= size:
        raise mistake(
            f"Data.shift_pixels={data.shift_pixels} moves images of {size} x {size}"
            " pixels out of sight",
            "it must be below the size of an image",
            f"Set Data.shift_pixels={size - 1} or less",
        )
    patches, numbers = image_patches(data)
    fits = model.num_patches == patches
    if data.packing:
        fits = model.num_patches > 0 and model.num_patches % patches == 0
    if not fits or model.patch_dim != numbers:
        weights = (
            f" (Data.caption_weight={data.caption_weight},"
            f" Data.image_denoise_weight={data.image_denoise_weight})"
        )
        several = " or a multiple of it" if data.packing else ""
        raise mistake(
            f"Model.num_patches={model.num_patches} and"
            f" Model.patch_dim={model.patch_dim} do not fit the images of"
            f" Data.source={data.source!r}{weights}",
            f"with Data.patch_size={data.patch_size} an image has {patches} patches of"
            f" {numbers} numbers",
            f"Set Model.num_patches={patches}{several} and Model.patch_dim={numbers},"
            " or Data.source='text' for no images",
        )
