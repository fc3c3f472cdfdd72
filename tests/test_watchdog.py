# SPDX-License-Identifier: Apache-2.0
"""Where a process hangs is printed, and only then."""

import re
import threading
import time

from jaxmoe.watchdog import Watchdog


def hang_here(seconds):
    time.sleep(seconds)


def test_a_step_that_hangs(capsys):
    """The message names process and last step, and shows the line that hangs; it comes
    again while nothing moves."""
    with Watchdog(0.2, "process 1 of 2") as watchdog:
        watchdog.beat("step 7")
        hang_here(0.7)
    err = capsys.readouterr().err
    said = r"jaxmoe: process 1 of 2: no step ended for \d s, since step 7\. Where its"
    assert len(re.findall(said, err)) >= 2
    assert "thread MainThread" in err
    assert "in hang_here" in err and "time.sleep(seconds)" in err
    assert "in _watch" not in err, "it tells of the others, not of itself"


def test_steps_that_end_in_time(capsys):
    """Nothing is printed, and no thread is left."""
    with Watchdog(5.0) as watchdog:
        for step in range(20):
            time.sleep(0.005)
            watchdog.beat(f"step {step}")
    with Watchdog(0.0):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    until_s = time.monotonic() + 5
    while "watchdog" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < until_s
        time.sleep(0.01)
