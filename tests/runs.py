# SPDX-License-Identifier: Apache-2.0
"""Whole runs in this process, by the command."""

from jaxmoe import cli
from jaxmoe.metrics import Progress
from tests import helpers

CONFIG = helpers.run_config()


def train(workdir, config=CONFIG, *more):
    return cli.main(
        ["train", f"--workdir={workdir}", *helpers.arguments(config), *more]
    )


def at_step(monkeypatch, step, action):
    """Calls `action` when the figures of a step have come."""
    original = Progress.step

    def progress(self, number):
        original(self, number)
        if number == step:
            action()

    monkeypatch.setattr(Progress, "step", progress)


def steps_of(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))
