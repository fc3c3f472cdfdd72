# SPDX-License-Identifier: Apache-2.0
"""Times the loader: images and tokens per second of every kind of source.

    python benchmarks/data.py [--records 2000] [--threads 2] [--seconds 3] [--quick]

Writes data sets to a temporary folder: JPEG images of 256 x 256 pixels with captions in
two languages, and running text. Reads each with `configs/own_images.gin`, and digits
with the default configuration. Nothing is trained but in the last figure. The last line
is JSON, by kind of source:

  images_per_s    images decoded, scaled and cut to patches; 0 of running text
  tokens_per_s    positions of the batches that hold a patch or a token
  index_s         seconds to read all records once at the start
  padding         share of positions without patch or token

and besides:

  packed          the same for the JSON lines with `Data.packing`
  mixture         the same for JSON lines and tar shards at once
  default_batch_s seconds of a thread to make a batch of the default run
  default_step_s  seconds of a step of the default run, on the devices that are here
  default_share   the former over the latter; claimed: at most 0.05. Batches are made
                  ahead, by other threads: below 1 the loader is never waited for
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxmoe import gin_config
from jaxmoe.config import Config
from jaxmoe.data.columns import example_message
from jaxmoe.data.loader import Loader

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["a", "the", "red", "green", "old", "small", "house", "tree", "river", "under"]


def write_sources(folder: Path, count: int) -> dict[str, str]:
    """Writes the same records in every kind of file; source by kind."""
    import grain  # noqa: F401 - so that its import is timed nowhere
    import pyarrow
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet

    rows = list(_records(count))
    pictures = folder / "folder"
    pictures.mkdir()
    writer = ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1")
    lines = []
    with tarfile.open(folder / "data.tar", "w") as tar, contextlib.closing(writer):
        for number, (image, fields) in enumerate(rows):
            text = json.dumps(fields)
            (pictures / f"{number:06}.jpg").write_bytes(image)
            (pictures / f"{number:06}.json").write_text(text, "utf-8")
            lines.append(json.dumps({"image": f"folder/{number:06}.jpg", **fields}))
            for name, content in (("jpg", image), ("json", text.encode())):
                member = tarfile.TarInfo(f"{number:06}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            message = example_message()()
            for name, value in {"image": image, **fields}.items():
                content = value if isinstance(value, bytes) else value.encode()
                message.features.feature[name].bytes_list.value.append(content)
            writer.write(message.SerializeToString())
    (folder / "data.jsonl").write_text("\n".join(lines), "utf-8")
    table = [{"image": image, **fields} for image, fields in rows]
    parquet.write_table(pyarrow.Table.from_pylist(table), folder / "data.parquet")
    rng = np.random.default_rng(0)
    text = (" ".join(rng.choice(WORDS, 12)) for _ in range(20 * count))
    (folder / "data.txt").write_text("\n".join(text), "utf-8")
    kinds = ("jsonl", "tar", "array_record", "parquet", "txt")
    return {"folder": str(pictures), **{k: str(folder / f"data.{k}") for k in kinds}}


def _records(count: int):
    """Photograph-like images, encoded, and their fields."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for _ in range(count):
        coarse = rng.integers(0, 255, (16, 16, 3), np.uint8)
        image = Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC)
        content = io.BytesIO()
        image.save(content, "JPEG", quality=90)
        words = rng.choice(WORDS, rng.integers(3, 10))
        yield content.getvalue(), {"en": " ".join(words), "zh": "一棵树和一座房子"}


def measured(config: Config, seconds: float) -> dict[str, float]:
    """Figures of the loader of a configuration."""
    before = time.perf_counter()
    loader = Loader(config.data, model=config.model, microbatches=1)
    index_s = time.perf_counter() - before
    next(loader)  # the threads are started
    images = tokens = positions = 0
    before = time.perf_counter()
    while (passed := time.perf_counter() - before) < seconds:
        batch = next(loader)
        modality, sequence = batch["modality"], batch["sequence"]
        # An image is a run of patches in one example of a row.
        first = modality == 1
        first[..., 1:] &= (modality[..., :-1] != 1) | (
            sequence[..., 1:] != sequence[..., :-1]
        )
        images += int(first.sum())
        tokens += int((modality > 0).sum())
        positions += modality.size
    loader.close()
    return {
        "images_per_s": images / passed,
        "tokens_per_s": tokens / passed,
        "index_s": index_s,
        "padding": 1 - tokens / positions,
    }


def default_run(steps: int) -> dict[str, float]:
    """The loader of the default run beside the step of the default run."""
    import jax

    from jaxmoe import mesh as mesh_lib
    from jaxmoe.data.records import vocab_size
    from jaxmoe.train_step import Setup

    config = gin_config.load((), ()).config
    mesh_lib.start_backend(config.mesh)
    mesh = mesh_lib.make_mesh(mesh_lib.resolve_sizes(config, jax.device_count()))
    setup = Setup(config, mesh, vocab_size(config.data, config.model))
    data = dataclasses.replace(config.data, num_threads=0)
    loader = Loader(data, model=config.model, microbatches=setup.microbatches)
    next(loader)
    batches_s = []
    for _ in range(50):
        before = time.thread_time()
        batch = next(loader)
        batches_s.append(time.thread_time() - before)
    step, state = setup.train_step(), setup.initial_state()
    steps_s = []
    for _ in range(steps):
        before = time.perf_counter()
        state, metrics = step(state, setup.put_batch(batch))
        jax.block_until_ready(metrics)
        steps_s.append(time.perf_counter() - before)
    batch_s = float(np.median(batches_s))
    step_s = float(np.median(steps_s[1:]))  # the first one compiles
    return {
        "default_batch_s": batch_s,
        "default_step_s": step_s,
        "default_share": batch_s / step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="small, to be tested")
    options = parser.parse_args()
    count, seconds = (60, 0.2) if options.quick else (options.records, options.seconds)
    own = gin_config.load([str(ROOT / "configs" / "own_images.gin")]).config

    def of(config: Config, source: str) -> Config:
        data = {"source": source, "num_threads": options.threads}
        return dataclasses.replace(
            config, data=dataclasses.replace(config.data, **data)
        )

    figures: dict[str, Any] = {}

    def report(name: str, config: Config) -> None:
        figures[name] = measured(config, seconds)
        values = (f"{key} {value:.3g}" for key, value in figures[name].items())
        print(f"{name:14} {', '.join(values)}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder), count)
        for kind, source in sources.items():
            report(kind, of(own, source))
        packed = gin_config.load(
            [str(ROOT / "configs" / "own_images.gin")],
            ["Data.packing=True", "Model.num_patches=64", "Model.sequence_length=256"],
        )
        report("packed", of(packed.config, sources["jsonl"]))
        report("mixture", of(own, f"{sources['jsonl']},{sources['tar']}"))
    report("digits", of(gin_config.load((), ()).config, "digits"))
    figures |= default_run(3 if options.quick else 20)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
