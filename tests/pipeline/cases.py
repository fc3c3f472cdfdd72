# SPDX-License-Identifier: Apache-2.0
"""Schedules that can be built, for Hypothesis and for tables of cases."""

import functools

from hypothesis import strategies as st

from jaxmoe.pipeline.schedule import SCHEDULES, build
from jaxmoe.pipeline.simulate import Costs

UNIT = Costs(FB=3.0)
OVERLAPPED = Costs(FB=2.4)

build = functools.lru_cache(build)


@st.composite
def schedules(draw, largest=8):
    """A built-in schedule of up to so many ranks, with few microbatches or many."""
    name = draw(st.sampled_from(tuple(SCHEDULES)))
    ranks = draw(st.integers(1, largest))
    if name == "dualpipe":
        ranks += ranks % 2
    if name.startswith("dualpipe"):
        microbatches = 2 * ranks + 2 * draw(st.integers(0, ranks))
    else:
        microbatches = draw(st.integers(1, 3 * ranks))
    return build(name, ranks, microbatches)


def costs():
    """Costs of every shape; an F&B takes from its longer half to the sum."""
    time = st.sampled_from((0.25, 0.5, 1.0, 1.5, 1.66, 2.0))
    share = st.sampled_from((0.0, 0.3, 1.0))
    return st.builds(
        lambda f, bi, w, part: Costs(f, bi, w, max(f, bi + w) + part * min(f, bi + w)),
        *(time, time, time, share),
    )
