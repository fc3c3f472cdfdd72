# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `jaxmoe aot`: compiles the train step for a machine that is not there.

jaxmoe aot --topology=v5p:8x8x8 [--gin_file=FILE] [--gin.X.y=VALUE]
           [--search] [--figure=FILE.html] [--json]
"""

from __future__ import annotations

import argparse
import json
import os

from jaxmoe.config import Config
from jaxmoe.config_base import mistake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--topology", required=True)
    parser.add_argument("--figure", default="")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the report, writes the picture that was asked for.

    Returns:
      The exit code, 0; also where the step does not fit.

    Raises:
      ConfigError: for a mistake in the options, or a model that does not fit the mesh.
    """
    if options.figure and not options.figure.endswith((".html", ".svg")):
        raise mistake(
            f"--figure={options.figure!r}",
            "the timeline is written as HTML with an SVG in it",
            "Name a file that ends in .html",
        )
    # The compiler needs no device; a TPU that is there may be in use.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxmoe.aot.estimate import estimate
    from jaxmoe.aot.report import figures, text, write_timeline
    from jaxmoe.aot.search import search
    from jaxmoe.aot.topology import topology

    machine = topology(options.topology)
    if options.search:
        return search(config, machine, as_json=options.json)
    found = estimate(config, machine)
    print(text(found))
    if options.figure and found.timed:
        write_timeline(found, options.figure)
    if options.json:
        print(json.dumps(figures(found)))
    return 0
