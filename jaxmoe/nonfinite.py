# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Steps that are not finite, and which part was the first; spikes.

In every step each device counts what is not finite in its shards of the parameters and
of the gradients, per parameter and layer. The counts travel with the sum of the
gradient norm, so they cost no collective of their own. Activations are looked at
afterwards only, when a step did go wrong: such a step leaves the state as it was.

Legend: F parts of the parameters (jaxmoe.parts).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmoe import config_derived, tree_names
from jaxmoe import model as model_lib
from jaxmoe.layers.attention import attention_mask
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
from jaxmoe.parts import part_names
from jaxmoe.train_step import BATCH_SPEC, Setup, StepMetrics, TrainState

# A spike: so far above the median of the window. 1.4826 times the median absolute
# deviation is the standard deviation of normal noise; the floor keeps a run that
# hardly moves from calling every ripple a spike.
SPIKE_WINDOW, SPIKE_LEAST = 64, 16
SPIKE_DEVIATIONS, SPIKE_SHARE = 8.0, 0.1
_MAD_TO_SIGMA = 1.4826


class SpikeRule:
    """Compares each loss with the median of the losses before it.

    Args:
      losses: The last ones of a run that goes on.

    Attributes:
      window: the last losses, at most SPIKE_WINDOW; kept with a checkpoint, so that a
        run that goes on calls the same losses spikes.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self.window = deque(losses, maxlen=SPIKE_WINDOW)

    def __call__(self, loss: float) -> float | None:
        """Takes a loss in; the median of those before if this one is a spike."""
        spike = None
        if len(self.window) >= SPIKE_LEAST:
            before = np.array(self.window)
            median = float(np.median(before))
            sigma = _MAD_TO_SIGMA * float(np.median(np.abs(before - median)))
            if loss - median > max(SPIKE_DEVIATIONS * sigma, SPIKE_SHARE * abs(median)):
                spike = median
        self.window.append(loss)
        return spike


def is_finite(metrics: StepMetrics) -> bool:
    """Whether the update of a step was made; figures on the host."""
    nll = float(np.sum(metrics.sums.nll))
    return math.isfinite(nll) and math.isfinite(float(metrics.grad_norm))


class FirstNonFinite:
    """Finds what was not finite first, in words. Compiles when it must look inside."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._parts = part_names(setup.abstract_params, setup.config.model)
        self._forward: Any = None
        self._state_counts: Any = None

    def of_state(self, state: TrainState) -> str:
        """The name of the first array of a state that is not finite; '' for none.

        Looked at before a state is saved: an update may overflow though the gradient
        was finite, which the next step would be the first to notice.
        """
        self._state_counts = self._state_counts or self._make_state_counts()
        names = [name for name, _ in _floats(state)]
        counts = np.asarray(self._state_counts(state))
        return next((n for n, bad in zip(names, counts, strict=True) if bad > 0), "")

    def _make_state_counts(self) -> Any:
        setup = self._setup
        axes = setup.mesh.axis_names

        def counts(state: TrainState) -> jax.Array:
            found = [_nonfinite(leaf) for _, leaf in _floats(state)]
            return jax.lax.psum(jnp.stack(found), axes)

        specs = jax.tree.map(lambda x: x.spec, setup.state_sharding)
        # check_vma=False: the sum over devices is written out.
        return jax.jit(
            jax.shard_map(
                counts,
                mesh=setup.mesh,
                in_specs=(specs,),
                out_specs=P(),
                check_vma=False,
            )
        )

    def parameter(self, metrics: StepMetrics) -> str:
        """The first parameter in forward order that was not finite before the step."""
        return next(iter(self._bad(metrics.nonfinite[0])), "")

    def _bad(self, counts_F: Any) -> list[str]:
        """Names of the parts in which something was counted, in forward order."""
        pairs = zip(self._parts, counts_F, strict=True)
        return [name for (_, name) in sorted(part for part, n in pairs if n > 0)]

    def __call__(
        self, metrics: StepMetrics, step: int, state: TrainState, batch: Batch
    ) -> str:
        """What was not finite first in a step that went wrong.

        Args:
          metrics: of the step, on the host.
          step: updates done with it.
          state: the state now; such a step changes nothing in it but the number.
          batch: what the step was given.
        """
        if name := self.parameter(metrics):
            return f"the parameter {name}"
        if not math.isfinite(float(np.sum(metrics.sums.nll))):
            return self._activation(step, state, batch) or (
                "the loss; the forward pass did not do it again"
            )
        if bad := self._bad(metrics.nonfinite[1]):  # a backward begins at the end
            return f"the gradient of {bad[-1]}, where the backward pass came first"
        return "the sum of the squares of the gradient, though every gradient is finite"

    def _activation(self, step: int, state: TrainState, batch: Batch) -> str:
        """The first activation of a forward pass that is not finite; '' for none."""
        self._forward = self._forward or self._make_forward()
        batch = self._setup.numbered(batch, jnp.int32(step - 1))
        for m in range(batch["tokens"].shape[0]):
            one = jax.tree.map(lambda x, m=m: x[m : m + 1], batch)
            bad = np.asarray(self._forward(state.params, state.buffers, one)) > 0
            if bad.any():
                return f"{list(self._places())[int(bad.argmax())]} in microbatch {m}"
        return ""

    def _places(self) -> Iterator[str]:
        """Names of what `_make_forward` looks at, in its order."""
        yield "the patches of the batch"
        yield "the output of the embedding"
        for number, kind in enumerate(
            config_derived.layer_kinds(self._setup.config.model)
        ):
            if kind == "moe":
                yield f"the router logits of layer {number} (moe)"
            yield f"the output of layer {number} ({kind})"
        yield "the logits"

    def _make_forward(self) -> Any:
        setup = self._setup
        network, axis = setup.network, setup.axis

        def counts(params: Any, buffers: Any, batch: Batch) -> jax.Array:
            weights = setup.weights(params, buffers)
            batch = jax.tree.map(lambda x: x[0], batch)
            ends = network.ends(weights)
            x_BSD = ends.embed(batch)
            found = [batch["patches"], x_BSD]
            layers = zip(network.kinds, network.in_order(weights, buffers), strict=True)
            for number, (kind, states) in enumerate(layers):
                x_BSD, stats = network.layers(
                    (kind,),
                    [states],
                    x_BSD,
                    mask=attention_mask(batch["sequence"], batch["decoder"]),
                    sequences=model_lib.sequences_of(batch),
                    axis=axis,
                    first_layer=number,
                )
                found += [x_BSD] if stats is None else [stats.z_loss, x_BSD]
            found.append(ends.logits(x_BSD))
            return jax.lax.psum(jnp.stack([_nonfinite(x) for x in found]), BATCH_AXES)

        return jax.jit(setup.per_device(counts, BATCH_SPEC, P()))


def _floats(state: TrainState) -> list[tuple[str, jax.Array]]:
    """The arrays of a state that could hold what is not finite, by name."""
    leaves = tree_names.named_leaves(state).items()
    return [(n, x) for n, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _nonfinite(x: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)
