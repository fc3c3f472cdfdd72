# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Tells where a process hangs.

A run of several processes stands still when one of them does, and all but that one wait
inside a collective. So every process prints where its threads are; the one that is
somewhere else is the one to look at.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any


class Watchdog:
    """Prints the stacks of all threads when too much time has passed since `beat`.

    Works inside the `with`, and tells again each time that as much time has passed.

    Args:
      timeout_s: In seconds; 0: never.
      name: Of this process, for the message.
    """

    def __init__(self, timeout_s: float, name: str = ""):
        self._timeout_s, self._name = timeout_s, name
        self._what, self._since_s = "", time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )

    def __enter__(self) -> Watchdog:
        self._since_s = time.monotonic()
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()

    def beat(self, what: str) -> None:
        """Something ended that the next message shall name, such as 'step 7'."""
        self._what, self._since_s = what, time.monotonic()

    def _watch(self) -> None:
        told = 0.0
        while True:
            since_s = max(self._since_s, told)
            left_s = since_s + self._timeout_s - time.monotonic()
            if self._end.wait(max(left_s, 0.0)):
                return
            if max(self._since_s, told) == since_s:
                self._tell()
                told = time.monotonic()

    def _tell(self) -> None:
        passed_s = time.monotonic() - self._since_s
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"jaxmoe: {self._name + ': ' if self._name else ''}no step ended for"
            f" {passed_s:.0f} s, since {self._what or 'the start'}. Where its threads"
            " are:\n"
        ]
        for number, frame in sys._current_frames().items():
            if number != threading.get_ident():
                lines.append(f"  thread {names.get(number, number)}:\n")
                lines += traceback.format_stack(frame)
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
