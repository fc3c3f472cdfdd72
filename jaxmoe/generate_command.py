# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe generate`: captions, continued and completed texts of a run.

    jaxmoe generate --workdir=RUN [--image=FILE]... [--prompt=TEXT]...
                    [--language=en|zh] [--max_tokens=N] [--json]
                    [--greedy | --beam=N | --temperature=T --top_p=P --seed=N]

The newest checkpoint is read, whatever mesh wrote it. The mesh of the run does not
count: the devices that are here share the prompts; without an accelerator it is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmoe import config_checks
from jaxmoe.config import Balancer, Config, Data, Model, Pipeline
from jaxmoe.config_base import choice, mistake, printable, shown, shown_path
from jaxmoe.config_source import named_kinds
from jaxmoe.data.picture import read_patches
from jaxmoe.data.prompts import make_prompt
from jaxmoe.data.records import task_weights
from jaxmoe.data.tasks import IMAGE_TASKS, Example, assemble
from jaxmoe.data.tokenizer import LANGUAGES, Language, Tokenizer, make_tokenizer
from jaxmoe.gin_config import Loaded

_MOST_ROWS = 64  # sequences at a time, or one per device if these are more
_MOST_BEAMS = 1024
_LARGEST_SEED = 2**31 - 1

# What belongs to the machine on which the run was trained, and its value here.
_OF_MACHINE: dict[str, Any] = {
    "Mesh.data": "auto",
    "Mesh.expert": "auto",
    "Mesh.pipe": 1,
    "Mesh.platform": "auto",
    "Mesh.expert_nodes": 1,
    "Mesh.virtual_devices": 1,
    "Mesh.distributed": False,
    "MoE.exchange": "auto",
}


class Request(NamedTuple):
    """What one text is asked for with."""

    image: str | None
    prompt: str | None

    def __str__(self) -> str:
        return " ".join(
            ([shown_path(self.image)] if self.image is not None else [])
            + ([shown(self.prompt)] if self.prompt is not None else [])
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options, besides --workdir."""
    parser.add_argument("--image", action="append", default=[])
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--language", choices=LANGUAGES)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--beam", type=int)
    parser.add_argument("--max_tokens", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace, loaded: Loaded) -> int:
    """Prints a line per text.

    Args:
      options: Of `add_arguments`, and the run folder.
      loaded: The run's configuration, with what the command line sets.

    Returns:
      The exit code, 0.

    Raises:
      ConfigError: for a mistake in options or files; nothing is compiled before.
    """
    _check(options)
    requests = _requests(options.image, options.prompt)
    config = _here(loaded, options.workdir)
    config_checks.check(config)
    tokenizer = make_tokenizer(config.data.tokenizer)
    prompts = _prompts(
        requests, options.language, loaded.config.data, config.model, tokenizer
    )

    results = _write(options, config, prompts, tokenizer)
    for request, result in zip(requests, results, strict=True):
        print(f"{request}: {printable(result['text'])}")
    if options.json:
        asked = [request._asdict() for request in requests]
        pairs = zip(asked, results, strict=True)
        print(json.dumps({"results": [a | result for a, result in pairs]}))
    return 0


# What is asked for -------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    """Ranges, and options that would have no effect.

    Raises:
      ConfigError: naming the option.
    """
    ranges = {
        "temperature": (options.temperature, "above 0", lambda x: 0 < x < math.inf),
        "top_p": (options.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
        "beam": (
            options.beam,
            f"from 1 to {_MOST_BEAMS}",
            lambda x: 1 <= x <= _MOST_BEAMS,
        ),
        "max_tokens": (options.max_tokens, "at least 1", lambda x: x >= 1),
        "seed": (
            options.seed,
            f"from 0 to {_LARGEST_SEED}",
            lambda x: 0 <= x <= _LARGEST_SEED,
        ),
    }
    for name, (value, words, fits) in ranges.items():
        if value is not None and not fits(value):
            raise mistake(
                f"--{name}={value} is out of range",
                f"it must be {words}",
                f"Set --{name}={ {'top_p': 0.9, 'seed': 0}.get(name, 1) }",
            )
    ways = {
        "--greedy": options.greedy,
        "--beam": options.beam is not None,
        "--temperature or --top_p": _samples(options),
    }
    chosen = [name for name, given in ways.items() if given]
    if len(chosen) > 1:
        raise mistake(
            f"{' and '.join(chosen)} were given together",
            "the next token is the likeliest (--greedy, the default), or drawn"
            " (--temperature, --top_p), or found by a search (--beam)",
            f"Leave out all but {chosen[-1]}",
        )
    if options.seed is not None and not _samples(options):
        raise mistake(
            f"--seed={options.seed} without --temperature or --top_p",
            "only tokens that are drawn by chance need a seed",
            "Add --temperature=1, or leave it out",
        )
    if options.language and not options.image:
        raise mistake(
            f"--language={options.language} without --image",
            "only captions are asked for in a language; a text goes on in its own",
            "Add --image=FILE, or leave it out",
        )


def _samples(options: argparse.Namespace) -> bool:
    return options.temperature is not None or options.top_p is not None


def _requests(images: Sequence[str], prompts: Sequence[str]) -> list[Request]:
    """Images and prompts in pairs; where there is one of either, it goes with all.

    Raises:
      ConfigError: if their numbers do not fit, or there are none.
    """
    if not images and not prompts:
        raise mistake(
            "neither --image nor --prompt was given",
            "text is written for an image, for the beginning of a text, or for both",
            "Add --image=FILE or --prompt=TEXT",
        )
    count = max(len(images), len(prompts))
    for option, given in (("--image", images), ("--prompt", prompts)):
        if len(given) not in (0, 1, count):
            raise mistake(
                f"{len(images)} times --image and {len(prompts)} times --prompt",
                "they go together in pairs, or one of either with all of the other",
                f"Give {option} {choice([1, count])} times",
            )
    every = [list(x) * (count if len(x) == 1 else 1) for x in (images, prompts)]
    pairs = zip(*(x or [None] * count for x in every), strict=True)
    return [Request(image, prompt) for image, prompt in pairs]


def _here(loaded: Loaded, workdir: str) -> Config:
    """The run's configuration without what was of the machine that trained it.

    Raises:
      ConfigError: if it fits no mesh, or one with pipeline ranks is asked for.
    """
    config = loaded.config
    saved = f"{shown_path(str(Path(workdir) / 'config.gin'))}:"
    for name, value in _OF_MACHINE.items():
        section, field = name.split(".")
        if loaded.provenance[name].startswith(saved):
            part = getattr(config, section.lower())
            part = dataclasses.replace(part, **{field: value})
            config = dataclasses.replace(config, **{section.lower(): part})
    if config.mesh.pipe not in ("auto", 1):
        raise mistake(
            f"Mesh.pipe={config.mesh.pipe} for generating text",
            "a sequence grows by one position at a time, which fills no pipeline",
            "Set Mesh.pipe=1",
        )
    if config.mesh.distributed:
        raise mistake(
            f"Mesh.distributed={config.mesh.distributed!r} for generating text",
            "one process does it, with the devices that it has",
            "Set Mesh.distributed=False",
        )
    # Its data may be elsewhere: nothing is read of it.
    source = "digits" if config.data.source == "digits" else "text"
    data = dataclasses.replace(config.data, source=source, held_out_source="")
    config = dataclasses.replace(
        config,
        data=data,
        # Saved weights are in logical order: every expert in its own slot.
        balancer=Balancer(),
        pipeline=Pipeline(),
        mesh=dataclasses.replace(config.mesh, pipe=1),
        moe=dataclasses.replace(config.moe, group_tokens="auto"),
    )
    sizes = (config.mesh.data, config.mesh.expert)
    return _with_rows(config, math.prod(n for n in sizes if n != "auto"))


def _with_rows(config: Config, rows: int) -> Config:
    """With so many sequences at a time."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=rows),
        train=dataclasses.replace(config.train, accumulation=1),
    )


def _prompts(
    requests: Sequence[Request],
    language: Language | None,
    data: Data,
    model: Model,
    tokenizer: Tokenizer,
) -> list[Example]:
    """The prompts of the requests, each image read once.

    Args:
      data: What the run was trained on.

    Raises:
      ConfigError: if an image cannot be read, a text does not fit, or the model was not
        trained for what is asked for.
    """
    kinds = named_kinds(data.source)
    trained = {task for kind in kinds for task in task_weights(data, kind)}
    patches = {}
    for image in dict.fromkeys(request.image for request in requests):
        if image is None:
            continue
        if not trained & set(IMAGE_TASKS):
            raise mistake(
                f"--image={shown_path(image)} for Data.source={data.source!r}",
                "it was trained on text alone",
                "Give --prompt=TEXT, or name a run that was trained with images",
            )
        patches[image] = read_patches(image, data, digit="digits" in kinds)
    examples = []
    for request in requests:
        example = make_prompt(
            None if request.image is None else patches[request.image],
            request.prompt,
            language=language or LANGUAGES[0],
            tokenizer=tokenizer,
            model=model,
        )
        if example.task not in trained:
            raise mistake(
                f"{request} asks for the task {example.task!r}",
                f"the run was trained for {choice(map(repr, sorted(trained)))} only",
                "Ask for that, or name another run",
            )
        examples.append(example)
    return examples


# What is written ---------------------------------------------------------------------


def _write(
    options: argparse.Namespace,
    config: Config,
    prompts: Sequence[Example],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Continues the prompts with the newest weights of the run.

    Raises:
      ConfigError: if the run has none, or they do not fit; or the devices do not.
    """
    # Imported here: a mistake before costs no start of JAX.
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxmoe import mesh as mesh_lib
    from jaxmoe import warm_start
    from jaxmoe.data.records import vocab_size
    from jaxmoe.generate import Controls, make_generator
    from jaxmoe.train_step import Setup

    mesh_lib.start_backend(config.mesh)
    devices = jax.device_count()
    rows = -(-min(len(prompts), _MOST_ROWS) // devices) * devices
    config = _with_rows(config, rows)
    mesh = mesh_lib.make_mesh(mesh_lib.resolve_sizes(config, devices))
    setup = Setup(config, mesh, vocab_size(config.data, config.model)).for_inference()
    run = str(Path(options.workdir).absolute())
    weights = warm_start.load_weights(run, setup.abstract_state)
    length = config.model.sequence_length
    beams, sample = options.beam or 1, _samples(options)
    generate = make_generator(
        setup, length, tokenizer.eos_id, beams=beams, sample=sample
    )
    controls = Controls(
        max_tokens=min(options.max_tokens or length, length),
        temperature=options.temperature or 1.0,
        top_p=options.top_p or 1.0,
        seed=options.seed or 0,
    )
    sharding = NamedSharding(mesh, PartitionSpec(mesh_lib.BATCH_AXES))
    results = []
    for start in range(0, len(prompts), rows):
        part = prompts[start : start + rows]
        batch = jax.device_put(_batch(part, start, rows, config.model), sharding)
        new = generate(weights["params"], weights["buffers"], batch, controls)
        found = jax.device_get((new.tokens_BN, new.log_prob_B, new.ended_B))
        results += [
            _result(prompt, tokenizer, *row)
            for prompt, *row in zip(part, *found, strict=False)
        ]
    return results


def _batch(
    prompts: Sequence[Example], first: int, rows: int, model: Model
) -> dict[str, np.ndarray]:
    """Prompts as arrays of so many rows; those left over are padding."""
    batch = assemble(
        prompts,
        sequence_length=model.sequence_length,
        num_patches=model.num_patches,
        patch_dim=model.patch_dim,
    )
    added = rows - len(prompts)
    batch = {
        name: np.pad(array, [(0, added)] + [(0, 0)] * (array.ndim - 1))
        for name, array in batch.items()
    }
    return batch | {"number": np.arange(first, first + rows, dtype=np.int32)}


def _result(
    prompt: Example,
    tokenizer: Tokenizer,
    tokens_N: np.ndarray,
    log_prob: np.ndarray,
    ended: np.ndarray,
) -> dict[str, Any]:
    """What --json prints of one text, besides what it was asked for with."""
    tokens = np.trim_zeros(tokens_N, "b").tolist()  # padding
    return {
        "task": prompt.task,
        # Behind the first token, which says no more than the task or the language.
        "text": tokenizer.decode([*prompt.decoder[1:], *tokens]),
        "tokens": tokens,
        "log_probability": float(log_prob),
        "ended": bool(ended),
    }
