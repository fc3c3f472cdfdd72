# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Published figures of accelerators, from which times are estimated.

Sources: the system architecture pages of Cloud TPU (cloud.google.com/tpu/docs/v5e and
its neighbours) for peak rates, memory and interconnect per chip; "How to Scale Your
Model" (jax-ml.github.io/scaling-book/tpus) for bandwidth per link and between slices;
NVIDIA's data sheets of H100 and H200 SXM. The clock of a TPU follows from its peak rate
and its matrix units (128 x 128; 256 x 256 from v6e on). The page of TPU7x gives it the
interconnect of v5p; its links are taken to be those of v5p, too.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
      name: As in the name of a topology, 'v5p' of 'v5p:8x8x8'.
      flops: Peak bfloat16 operations per second of one device.
      memory: Bytes of one device's memory.
      memory_rate: Bytes per second to and from it.
      link_rate: Bytes per second over one link in one direction. A TPU has two links
        along every dimension of the torus; of a GPU it is all of its NVLinks together.
      slice_rate: Bytes per second of one device to other slices (TPU), or to other
        hosts (GPU), in one direction.
      clock: Cycles per second of the compiler's own estimates; 0 where it makes none.
      wraps: Length of a dimension from which on it is a ring: an end is linked with
        the other end.
    """

    name: str
    flops: float
    memory: int
    memory_rate: float
    link_rate: float
    slice_rate: float
    clock: float = 0.0
    wraps: int = 0


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * GIB, 1228e9, 45e9, 6.25e9, clock=1.05e9, wraps=4),
        Chip("v5e", 197e12, 16 * GIB, 819e9, 45e9, 3.125e9, clock=1.5e9, wraps=16),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, 90e9, 6.25e9, clock=1.75e9, wraps=4),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, 90e9, 12.5e9, clock=1.75e9, wraps=16),
        # A device of JAX is one of the two cores of a chip, with half of what it has.
        Chip("tpu7x", 1153.5e12, 96 * GIB, 3690e9, 90e9, 6.25e9, clock=2.2e9, wraps=4),
        Chip("h100", 989e12, 80 * 10**9, 3350e9, 450e9, 50e9),
        Chip("h200", 989e12, 141 * 10**9, 4800e9, 450e9, 50e9),
    )
}
