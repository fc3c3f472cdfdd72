# SPDX-License-Identifier: Apache-2.0
"""Trains: `python train.py [--gin_file=FILE] [--gin.X.y=VALUE] [--workdir=DIR]`."""

import sys

from jaxmoe import cli

if __name__ == "__main__":
    cli.command(["train", *sys.argv[1:]])
