# SPDX-License-Identifier: Apache-2.0
"""Floor 1. Being asked to stop: by a signal, to this process or to another one.

SIGTERM is also how Cloud TPU and Slurm tell that they are about to take the machines.
With several processes JAX's runtime catches it, tells the others, and settles on a step
that none has begun; so all save the same one. It costs nothing while nobody asks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from jaxmoe import processes


class StopFlag:
    """Set by SIGTERM and SIGINT inside the `with`.

    Attributes:
      signal: What came, '' before. With several processes it is set by `at` alone, in
        all of them at once: nothing else is a moment at which all can stop.
    """

    def __init__(self):
        self.signal = ""

    def __enter__(self) -> StopFlag:
        if processes.several():
            # SIGTERM stays with JAX's runtime; Ctrl-C goes the same way.
            handlers: dict[signal.Signals, Any] = {signal.SIGINT: _as_sigterm}
        else:
            handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self._set)
        self._before = {
            number: signal.signal(number, h) for number, h in handlers.items()
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def is_set(self) -> bool:
        """Whether somebody asked this process to stop."""
        return bool(self.signal)

    def at(self, step: int) -> str:
        """What came, '' if the run goes on after this step. All processes call it at
        every step.
        """
        if processes.several():
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.signal = "SIGTERM to a process of the run"
        return self.signal  # once: it may come at any moment

    def _set(self, number: int, _: Any) -> None:
        self.signal = signal.Signals(number).name


def _as_sigterm(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
