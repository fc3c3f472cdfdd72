# SPDX-License-Identifier: Apache-2.0
"""Floor 6. One training step: a pure function of (state, batch), jitted once.

The step is partitioned by the compiler (`jax.jit` with NamedShardings on state and
batch), except for the gradient, which is one shard_map with explicit collectives:

  masters --cast, all-gather--> weights --forward, backward--> gradients
  --reduce-scatter--> master layout --clip, optimizer (partitioned)--> new masters

Legend: M microbatches, b sequences of a microbatch on this device, L MoE layers,
E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmoe import config_derived, optim, sharding
from jaxmoe import model as model_lib
from jaxmoe.config import Config
from jaxmoe.data.tasks import TASKS
from jaxmoe.eplb.placement import carry, carry_back, initial_placement, plan_move
from jaxmoe.eplb.plan import device_load
from jaxmoe.loss import LossSums, count_positive, loss_sums, total_loss
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
from jaxmoe.moe import balance
from jaxmoe.moe.exchange import expert_axis
from jaxmoe.moe.router import MoEStats
from jaxmoe.parts import nonfinite_parts
from jaxmoe.pipeline.gradients import PipelinedGradients
from jaxmoe.pipeline.lower import lower
from jaxmoe.pipeline.simulate import of_config
from jaxmoe.xla_options import compiler_options

INT_FIELDS = ("tokens", "modality", "sequence", "positions", "targets", "task")
BATCH_SPEC = P(None, BATCH_AXES)  # dimension 1 of [M, B / M, ...]


@flax.struct.dataclass
class TrainState:
    """Everything that a run carries from step to step, in the master layout.

    Attributes:
      step: int32, updates done.
      params: float32 masters, nested dict.
      buffers: state without gradient (router bias, placement of the experts), nested
        dict.
      optimizer: optax state.
    """

    step: Any
    params: Any
    buffers: Any
    optimizer: Any


@flax.struct.dataclass
class StepMetrics:
    """Sums and figures of one step over the whole batch, equal on every device.

    Attributes:
      sums: losses by task.
      stats: of the MoE layers, stacked [L, ...]; None without such layers.
      grad_norm: global norm before clipping, each parameter counted once.
      nonfinite: numbers that are not finite in each part (jaxmoe.parts) of the
        parameters before the step, and of the gradients, [2, F].
      padding_fraction: positions without patch or token, over all positions.
      device_load_LX: tokens of each device along `expert` by the placement in force,
        when copies share theirs evenly; None without a placement.
    """

    sums: LossSums
    stats: MoEStats | None
    grad_norm: jax.Array
    nonfinite: jax.Array
    padding_fraction: jax.Array
    device_load_LX: jax.Array | None = None


class Setup:
    """The static side of training: graph, layouts and jitted functions of one run.

    Args:
      config: the configuration, checked.
      mesh: from `jaxmoe.mesh`.
      vocab_size: tokens, where the configuration leaves it to the tokenizer.
    """

    def __init__(self, config: Config, mesh: Mesh, vocab_size: int):
        self.config, self.mesh, self.vocab_size = config, mesh, vocab_size
        self.axis = expert_axis(mesh, config.moe, config.mesh.expert_nodes)
        self.init_params = partial(
            model_lib.create, config.model, config.moe, vocab_size, config.train.seed
        )
        self.optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
        module = nnx.eval_shape(
            lambda: model_lib.M6(
                config.model, config.moe, vocab_size, rngs=nnx.Rngs(config.train.seed)
            )
        )
        self.network = model_lib.Network(module)
        self.graph, params, buffers = nnx.split(module, nnx.Param, ...)
        self.abstract_params = nnx.to_pure_dict(params)
        self.compute_specs = nnx.to_pure_dict(_compute_specs(params))
        self.buffer_specs = model_lib.with_placement(
            nnx.to_pure_dict(_compute_specs(buffers)),
            jax.tree.map(lambda _: P(), jax.eval_shape(self.first_placement)),
        )
        self.master_specs = {
            name: jax.tree.map(
                # Each layer of a stack is split by itself.
                lambda leaf, spec, keep=int(name in model_lib.STACKS): (
                    sharding.master_spec(leaf.shape, spec, mesh, keep=keep)
                ),
                part,
                self.compute_specs[name],
            )
            for name, part in self.abstract_params.items()
        }
        self.microbatches = config_derived.microbatches(config, mesh.shape["pipe"])
        self.pipelined = self._pipelined() if mesh.shape["pipe"] > 1 else None
        shapes = jax.eval_shape(self._initial_state)
        self.state_sharding = sharding.named(mesh, self._state_specs(shapes.optimizer))
        self.abstract_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            shapes,
            self.state_sharding,
        )
        self.batch_sharding = jax.sharding.NamedSharding(mesh, BATCH_SPEC)
        self.everywhere = jax.sharding.NamedSharding(mesh, P())  # any process reads it

    def _pipelined(self) -> PipelinedGradients:
        config, ranks = self.config, self.mesh.shape["pipe"]
        return PipelinedGradients(
            config.model,
            config.moe,
            network=self.network,
            table=lower(*of_config(config.pipeline, ranks)),
            alternating=config.pipeline.order == "alternating",
            axis=self.axis,
            mesh=self.mesh,
            compute_specs=self.compute_specs,
            master_specs=self.master_specs,
            num_sequences=config.data.batch_size,
            num_tasks=len(TASKS),
        )

    def for_inference(self) -> Setup:
        """The same model and layouts, with experts that drop no token."""
        # Groups have no other use then; and a single position must be whole groups.
        exact = dataclasses.replace(
            self.config.moe, capacity_factor=None, buffer_factor=None, group_tokens=1
        )
        config = dataclasses.replace(self.config, moe=exact)
        return Setup(config, self.mesh, self.vocab_size)

    def local_rows(self) -> list[int]:
        """The rows of every microbatch whose devices belong to this process."""
        config = self.config
        rows = config.data.batch_size // self.microbatches
        parts = self.batch_sharding.addressable_devices_indices_map((1, rows))
        return sorted(
            {row for part in parts.values() if part for row in range(rows)[part[1]]}
        )

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of a global batch, as `data.loader` makes it."""
        config, model = self.config, self.config.model
        M = self.microbatches
        rows = (M, config.data.batch_size // M)
        dims: dict[str, tuple[int, ...]] = {
            name: (model.sequence_length,) for name in (*INT_FIELDS, "decoder")
        }
        dims["patches"] = (model.num_patches, model.patch_dim)
        dtypes = {"decoder": jnp.bool_, "patches": jnp.float32}
        return {
            name: jax.ShapeDtypeStruct(
                (*rows, *rest),
                dtypes.get(name, jnp.int32),
                sharding=self.batch_sharding,
            )
            for name, rest in dims.items()
        }

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """The global batch, on the devices, from every process's `local_rows`."""
        make = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: make(self.batch_sharding, x), batch)

    def initial_state(self) -> TrainState:
        """The state before the first update; the same on every mesh, bitwise."""
        create = jax.jit(
            self._initial_state,
            out_shardings=self.state_sharding,
            compiler_options=compiler_options(self.axis.platform, once=True),
        )
        return create()

    def train_step(self) -> Callable[[TrainState, Batch], tuple]:
        """The jitted step (state, batch) -> (state, StepMetrics); donates the state."""
        return jax.jit(
            self.step,
            in_shardings=(self.state_sharding, self.batch_sharding),
            out_shardings=(self.state_sharding, self.everywhere),
            donate_argnums=0,
            compiler_options=compiler_options(self.axis.platform),
        )

    def traced_step(self) -> jax.stages.Traced:
        """The step traced for its state and batch: what runs is compiled from it, and
        so is what is estimated."""
        return self.train_step().trace(self.abstract_state, self.abstract_batch())

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """One update. Batch arrays are [M, B / M, ...].

        If the loss or the gradient is not finite, only the number of the step changes.
        """
        batch = self.numbered(batch, state.step)
        gradients, metrics = self.loss_and_gradients(state.params, state.buffers, batch)
        clip_norm = self.config.optimizer.clip_norm
        with jax.named_scope("optimizer"):
            gradients = optim.clip(gradients, metrics.grad_norm, clip_norm)
            updates, optimizer = self.optimizer.update(
                gradients, state.optimizer, state.params
            )
            params = optax.apply_updates(state.params, updates)
        new_state = TrainState(
            step=state.step,
            params=params,
            buffers=self._update_buffers(state.buffers, metrics.stats),
            optimizer=optimizer,
        )
        finite = jnp.isfinite(jnp.sum(metrics.sums.nll)) & jnp.isfinite(
            metrics.grad_norm
        )
        new_state = jax.tree.map(partial(jnp.where, finite), new_state, state)
        new_state = dataclasses.replace(new_state, step=state.step + 1)
        placement = model_lib.placement_of(state.buffers)
        if placement is not None and metrics.stats is not None:
            load_LE = self._load(metrics.stats)
            load_LX = device_load(load_LE, placement["slots"], self.axis.size)
            metrics = dataclasses.replace(metrics, device_load_LX=load_LX)
        return new_state, metrics

    def numbered(self, batch: Batch, step: jax.Array) -> Batch:
        """The batch with each sequence's number, and its key where one is needed."""
        M, B = batch["task"].shape[:2]
        number = jnp.arange(M * B, dtype=jnp.int32).reshape(M, B)
        batch = {**batch, "number": number}
        if self.config.moe.input_jitter:
            key = jax.random.fold_in(jax.random.key(self.config.train.seed), step)
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, number.ravel())
            batch["key"] = keys.reshape(M, B)
        return batch

    def loss_and_gradients(
        self, params: Any, buffers: Any, batch: Batch
    ) -> tuple[Any, StepMetrics]:
        """Gradients in the master layout, and the metrics."""
        per_device = self.per_device(
            self._device_gradients, BATCH_SPEC, (self.master_specs, P())
        )
        return per_device(params, buffers, batch)

    def per_device(self, function: Callable, batch_spec: Any, out_specs: Any):
        """`function(params, buffers, batch)` run on each device's part of them.

        Args:
          function: Sees parameters in the master layout.
          batch_spec: How every array of the batch is split, or each of its parts.
          out_specs: How its results are.
        """
        # check_vma=False: a gradient is taken inside, per device, and every sum over
        # devices is written out; the checker would insert sums of its own.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.master_specs, self.buffer_specs, batch_spec),
            out_specs=out_specs,
            check_vma=False,
        )

    def weights(self, params: Any, buffers: Any) -> Any:
        """Master parts of this device -> weights in the compute layout and type."""
        params = model_lib.compute_weights(params, self.config.model)
        with jax.named_scope("weights"):
            apart = model_lib.take_apart(params)
            weights = sharding.gather(apart, *self._layer_specs())
        return self._move_experts(carry, weights, buffers)

    def _move_experts(self, way: Callable, weights: Any, buffers: Any) -> Any:
        """Weights (`carry`) into the slots, or gradients (`carry_back`) out of them."""
        placement = model_lib.placement_of(buffers)
        if placement is None:
            return weights
        move = plan_move(placement["rows"], placement["slots"], self.axis.size)
        layers = weights["moe"]
        experts = model_lib.stack([layer["moe"]["experts"] for layer in layers])
        with jax.named_scope("move"):
            moved = model_lib.unstack(way(move, experts))
        pairs = zip(layers, moved, strict=True)
        layers = [
            model_lib.map_experts(old, lambda _, new=new: new) for old, new in pairs
        ]
        return {**weights, "moe": layers}

    def _layer_specs(self) -> tuple[Any, Any]:
        """Compute and master layouts of parameters that are taken apart."""

        def apart(specs: Any) -> Any:
            layers = jax.tree.map(lambda leaf: leaf.shape[0], self.abstract_params)
            found = {}
            for name, part in specs.items():
                found[name] = part
                if name in model_lib.STACKS:
                    one = jax.tree.map(lambda spec: P(*spec[1:]), part)
                    found[name] = [one] * jax.tree.leaves(layers[name])[0]
            return found

        return apart(self.compute_specs), apart(self.master_specs)

    def forward(
        self, weights: Any, buffers: Any, batch: Batch
    ) -> tuple[LossSums, MoEStats | None]:
        """This device's losses and statistics of one microbatch."""
        logits_BSV, stats = self.network(weights, buffers, batch, self.axis)
        targets, task = batch["targets"], batch["task"]
        return loss_sums(logits_BSV, targets, task, len(TASKS)), stats

    def _device_gradients(self, params: Any, buffers: Any, batch: Batch):
        """Runs per device: batch arrays are [M, b, ...]."""
        counts = jnp.stack([count_positive(batch[of]) for of in ("task", "modality")])
        target_tokens, used = jax.lax.psum(counts, BATCH_AXES)
        positions = self.config.data.batch_size * self.config.model.sequence_length
        gradients_of = self.pipelined or self._plain_gradients
        gradients, sums, stats = gradients_of(params, buffers, batch, target_tokens)
        square = sum(
            jnp.sum(jnp.square(g)) / sharding.copies(spec, self.mesh)
            for g, spec in zip(
                jax.tree.leaves(gradients),
                jax.tree.leaves(self.master_specs),
                strict=True,
            )
        )
        counts_F = [nonfinite_parts(params), nonfinite_parts(gradients)]
        totals = jnp.concatenate([jnp.reshape(square, 1), *counts_F])  # one all-reduce
        square, *counts_F = jnp.split(
            jax.lax.psum(totals, self.mesh.axis_names), (1, 1 + counts_F[0].size)
        )
        sums, stats = jax.lax.psum((sums, stats), BATCH_AXES)
        norm, nonfinite = jnp.sqrt(square[0]), jnp.stack(counts_F)
        padding = 1.0 - used / positions
        return gradients, StepMetrics(sums, stats, norm, nonfinite, padding)

    def _plain_gradients(
        self, params: Any, buffers: Any, batch: Batch, target_tokens: jax.Array
    ) -> tuple[Any, LossSums, MoEStats | None]:
        """(gradients in the master layout, losses, statistics) without a pipeline."""
        weights, config = self.weights(params, buffers), self.config
        sequences = config.data.batch_size
        tokens = sequences * config.model.sequence_length
        groups = tokens // config_derived.group_tokens(config.model, config.moe)

        def loss(weights, microbatch):
            sums, stats = self.forward(weights, buffers, microbatch)
            share = total_loss(
                sums,
                stats,
                config.moe,
                target_tokens=target_tokens,
                routing_groups=groups,
                sequences=sequences,
            )
            return share, (sums, stats)

        def microbatch_gradients(microbatch):
            return jax.grad(loss, has_aux=True)(weights, microbatch)

        gradients, (sums, stats) = _sum_over_microbatches(microbatch_gradients, batch)
        gradients = self._move_experts(carry_back, gradients, buffers)
        with jax.named_scope("gradients"):
            gradients = sharding.scatter_sum(gradients, *self._layer_specs(), self.mesh)
        return model_lib.put_together(gradients), sums, stats

    def _initial_state(self) -> TrainState:
        _, params, buffers = self.init_params()
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            buffers=model_lib.with_placement(buffers, self.first_placement()),
            optimizer=self.optimizer.init(params),
        )

    def _state_specs(self, optimizer: Any) -> TrainState:
        """The master layout of the whole state; optimizer arrays follow parameters."""

        def follow(leaf, param, spec):
            return sharding.moment_spec(leaf.shape, param.shape, spec, self.mesh)

        specs = optax.tree_utils.tree_map_params(
            self.optimizer,
            follow,
            optimizer,
            self.abstract_params,
            self.master_specs,
            transform_non_params=lambda _: P(),
        )
        return TrainState(P(), self.master_specs, self.buffer_specs, specs)

    def first_placement(self) -> Any:
        """Where the experts are at the start; None without a balancer."""
        balancer, model = self.config.balancer, self.config.model
        layers = config_derived.layer_kinds(model).count("moe")
        if not balancer.interval or not layers:
            return None
        return initial_placement(
            1 if model.share_layers else layers,
            self.config.moe.num_experts,
            config_derived.num_replicas(balancer, self.config.moe),
            nodes=balancer.nodes,
            devices=self.axis.size,
        )

    def _load(self, stats: MoEStats) -> jax.Array:
        """Tokens per stored MoE layer and expert, over all devices."""
        if self.config.model.share_layers:  # one router, with the tokens of all layers
            return jnp.sum(stats.load_E, axis=0, keepdims=True)
        return stats.load_E

    def _update_buffers(self, buffers: Any, stats: MoEStats | None) -> Any:
        if stats is None or not buffers:
            return buffers
        load_LE, rate = self._load(stats), self.config.moe.bias_update_rate
        placement = model_lib.placement_of(buffers)
        buffers = model_lib.with_placement(buffers, None)
        if rate:
            update = partial(balance.update_bias, load_LE=load_LE, rate=rate)
            buffers = jax.tree.map(update, buffers)
        if placement is not None:
            part = 1 / self.config.balancer.window
            load_LE = placement["load"] + part * (load_LE - placement["load"])
            placement = {**placement, "load": load_LE}
        return model_lib.with_placement(buffers, placement)


def _compute_specs(state: nnx.State) -> nnx.State:
    """The compute layout of every variable, from its metadata `logical_axes`.

    Stacked blocks have one dimension more than their variables declare, in front.
    """

    def spec(variable: nnx.Variable) -> nnx.Variable:
        ndim = variable.get_value().ndim
        axes = variable.get_metadata().get("logical_axes", ())
        stacked = (None,) * (ndim - len(axes))
        return variable.replace(sharding.compute_spec((*stacked, *axes)))

    return jax.tree.map(spec, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _sum_over_microbatches(function: Callable[[Batch], Any], batch: Batch) -> Any:
    """Float32 sum of function(microbatch) over dimension 0 of the batch."""

    def in_float32(tree):
        return jax.tree.map(
            lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x,
            tree,
        )

    first = jax.tree.map(lambda x: x[0], batch)
    if batch["tokens"].shape[0] == 1:
        return in_float32(function(first))

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, in_float32(function(microbatch))), None

    shapes = jax.eval_shape(lambda mb: in_float32(function(mb)), first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, batch)[0]
