# SPDX-License-Identifier: Apache-2.0
"""Floor 0. The configuration: frozen dataclasses, one per part of the system.

A module receives only the dataclass it needs, never the whole tree. Every field says
what it means and in which unit; ``docs/configuration.md`` is generated from here. What
must fit together is checked in ``config_checks.py``, what follows from several fields
stands in ``config_derived.py``. How the values are read from gin
files and the command line stands in ``gin_config.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxmoe.config_base import ConfigError as ConfigError
from jaxmoe.config_base import option

# ruff: noqa: RUF009 - `option` makes a dataclasses.field

Auto = Literal["auto"]

MOST_LAYERS = 10_000
DIGITS_IMAGES = 1797  # in scikit-learn's set of handwritten digits
DIGITS_PIXELS = 8  # along the side of an image; gray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the devices are laid out over the named axes `data`, `expert`, `pipe`."""

    data: int | Auto = option("auto", "devices that hold different sequences", low=1)
    expert: int | Auto = option(
        "auto", "devices over which experts are split (and sequences too)", low=1
    )
    pipe: int | Auto = option(
        "auto", "pipeline ranks over which layers are split", low=1
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = option(
        "auto", "which accelerator must be there; 'auto' takes the best present"
    )
    expert_nodes: int = option(
        1,
        "nodes with fast links inside, each of consecutive devices along `expert`: a"
        " token crosses to a node once, not once per expert; 1: no difference is made",
        low=1,
    )
    virtual_devices: int = option(
        8,
        "CPU devices to simulate when sizes are 'auto' and the platform is CPU, over"
        " all processes",
        low=1,
    )
    distributed: bool | Auto = option(
        "auto",
        "whether several processes are one run; 'auto': if the fields below, JAX's"
        " variables, Slurm, Open MPI or Cloud TPU say so",
    )
    coordinator: str = option(
        "", "HOST:PORT at which process 0 listens; '': as the cluster says"
    )
    num_processes: int | Auto = option("auto", "processes of the run", low=1)
    process_id: int | Auto = option("auto", "number of this process, from 0", low=0)
    start_timeout_s: int = option(300, "seconds to wait for all processes", low=1)
    heartbeat_timeout_s: int = option(
        100, "seconds of silence after which a process counts as dead", low=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The M6 stack: one Transformer that is encoder and decoder at once."""

    num_layers: int = option(4, "Transformer layers", low=1, high=MOST_LAYERS)
    width: int = option(64, "model width", low=1)
    num_heads: int = option(2, "attention heads", low=1)
    head_dim: int | Auto = option(
        "auto", "size of a head; 'auto': width / heads", low=1
    )
    ffn_width: int = option(256, "hidden width of the dense feed-forward layers", low=1)
    layer_pattern: str = option(
        "dense,moe",
        "kinds of the layers' feed-forward part, repeated until num_layers are filled:"
        " 'dense' or 'moe', each optionally '*N', with commas, e.g. 'dense*3,moe*58'",
    )
    activation: Literal["gelu", "swiglu"] = option("gelu", "feed-forward activation")
    norm: Literal["layer", "rms"] = option("layer", "LayerNorm or RMSNorm")
    norm_position: Literal["pre", "post"] = option(
        "pre", "norm before each sub-layer, or after the residual sum"
    )
    use_bias: bool = option(True, "biases in projections, feed-forward parts and norms")
    vocab_size: int | Auto = option(
        "auto", "tokens; 'auto': as the tokenizer has", low=1
    )
    sequence_length: int = option(28, "positions of a sequence, image and text", low=2)
    num_patches: int = option(4, "image patches at most per sequence", low=0)
    patch_dim: int = option(
        16, "numbers per patch: pixels, or ready-made features", low=1
    )
    tie_embeddings: bool = option(True, "the output projection is the token embedding")
    share_layers: bool = option(
        False, "all layers of a kind share one set of weights (Pseudo-to-Real)"
    )
    init_std: float = option(0.15, "standard deviation of the initial weights", low=0.0)
    compute_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "type of activations and of the weights in products; masters: float32",
    )
    remat: Literal["none", "dots", "full", "exchange"] = option(
        "none",
        "what the backward pass recomputes: nothing; all but the expert exchange and"
        " products with weights of attention and dense parts; all but the exchange;"
        " everything, so that of a layer only its input is kept",
    )

    @property
    def head_size(self) -> int:
        """Size of an attention head, 'auto' resolved."""
        if self.head_dim == "auto":
            return self.width // self.num_heads
        return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """The mixture-of-experts layers."""

    num_experts: int = option(8, "logical experts of a layer", low=1)
    top_k: int = option(
        2, "experts per token; with router='prototype' the number of prototypes", low=1
    )
    router: Literal["top_k", "prototype", "grouped_sigmoid", "balanced"] = option(
        "top_k",
        "softmax top-k; k top-1 prototypes (M6-T); group-limited sigmoid"
        " (DeepSeek-V3); 'balanced' deals tokens out evenly whatever they say, to"
        " measure speed and memory",
    )
    normalize_weights: bool = option(
        False, "a token's weights are divided by their sum ('top_k', 2 experts or more)"
    )
    expert_width: int | Auto = option(
        "auto", "hidden width of an expert; 'auto': Model.ffn_width", low=1
    )
    num_shared_experts: int = option(0, "experts that every token visits", low=0)
    capacity_factor: float | None = option(
        None,
        "capacity of an expert as a multiple of its even share; None: dropless",
        above=0.0,
    )
    capacity_mode: Literal["kx", "1x"] = option(
        "kx", "the even share counts each token top_k times ('kx') or once ('1x'), M6-T"
    )
    group_tokens: int | Auto = option(
        "auto",
        "tokens of a routing group, inside which capacity and balance are counted;"
        " 'auto': one sequence",
        low=1,
    )
    buffer_factor: float | None = option(
        None,
        "rows a device can receive in the expert exchange as a multiple of the even"
        " share; None: as many as could ever come. Overflow is counted as dropped",
        above=0.0,
    )
    exchange: Literal["auto", "equal", "ragged"] = option(
        "auto",
        "how tokens cross: in buffers of one size, or just those there are (not on"
        " CPU); 'auto': 'ragged' where the platform has it",
    )
    exchange_dtype: Literal["compute", "float32", "bfloat16", "float8"] = option(
        "compute",
        "type in which tokens cross; 'compute': as computed; 'float8': e4m3 with a"
        " scale per token on the way to the experts, bfloat16 back",
    )
    balance_loss: float = option(
        0.01, "coefficient of the Switch balance loss", low=0.0
    )
    sequence_balance_loss: float = option(
        0.0,
        "coefficient of the same loss counted inside each sequence (DeepSeek-V3)",
        low=0.0,
    )
    z_loss: float = option(0.0, "coefficient of the router z-loss", low=0.0)
    input_jitter: float = option(
        0.0,
        "in training the router sees its input times a random factor within 1 +- this",
        low=0.0,
        below=1.0,
    )
    num_groups: int = option(1, "expert groups of router='grouped_sigmoid'", low=1)
    top_groups: int = option(1, "groups kept per token by 'grouped_sigmoid'", low=1)
    route_scale: float = option(
        1.0, "factor on the weights of 'grouped_sigmoid'", low=0.0
    )
    bias_update_rate: float = option(
        0.0, "step of the selection bias of 'grouped_sigmoid' per update", low=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How microbatches pass the stages, where `Mesh.pipe` is more than 1."""

    schedule: Literal["gpipe", "1f1b", "zb_h1", "dualpipe", "dualpipev"] = option(
        "dualpipe", "order of forwards and backwards; `jaxmoe schedule` draws it"
    )
    microbatches: int | Auto = option(
        "auto",
        "parts of the batch that are in the pipeline at once, per accumulated part;"
        " 'auto': two per rank",
        low=1,
    )
    split_backward: bool = option(
        True,
        "weight gradients may be computed later than those of the inputs, where the"
        " schedule has it: fewer bubbles, but what they need waits in memory",
    )
    costs: str = option(
        "F=1,Bi=1,W=1",
        "durations for which ticks are chosen, in any one unit: of a forward, of the"
        " two parts of a backward, with FB=... of a forward and a backward overlapped",
    )
    order: Literal["compiler", "alternating"] = option(
        "compiler",
        "who orders a forward and a backward of one tick: the compiler; or they take"
        " turns at every exchange of tokens",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balancer:
    """Moving and copying experts so that devices carry equal load (EPLB)."""

    interval: int = option(0, "steps between two looks at the load; 0: off", low=0)
    num_replicas: int | Auto = option(
        "auto",
        "slots for experts per layer, over all devices; 'auto': one per expert, so that"
        " experts are moved but not copied",
        low=1,
    )
    policy: Literal["reference", "swap", "incremental"] = option(
        "incremental",
        "how a plan is made: DeepSeek's way; that and then exchanges; or as few changes"
        " of the plan in force as lead to Balancer.tolerance",
    )
    threshold: float = option(
        1.05, "a layer up to this max/mean device load is left as it is", low=1.0
    )
    tolerance: float = option(
        1.02, "max/mean device load that 'incremental' goes for", low=1.0
    )
    nodes: int = option(
        1,
        "nodes along `expert`; with more than 1, groups of experts stay on a node",
        low=1,
    )
    window: int = option(
        100, "steps over which the load is averaged, exponentially", low=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its schedule."""

    name: Literal["adamw", "adafactor", "sgd"] = option("adamw", "update rule (optax)")
    learning_rate: float = option(7e-3, "peak learning rate", low=0.0)
    schedule: Literal["cosine", "linear", "rsqrt", "constant"] = option(
        "cosine", "shape of the decay after warm-up, over Train.steps"
    )
    warmup_steps: int = option(100, "steps of linear warm-up from 0", low=0)
    end_fraction: float = option(
        0.05,
        "final over peak learning rate of 'cosine' and 'linear'",
        low=0.0,
        high=1.0,
    )
    beta1: float = option(0.9, "decay of the first moment (adamw)", low=0.0, below=1.0)
    beta2: float = option(
        0.98, "decay of the second moment (adamw)", low=0.0, below=1.0
    )
    epsilon: float = option(1e-8, "added to the root of the second moment", above=0.0)
    weight_decay: float = option(
        0.01, "decoupled decay; never on norms, biases and router weights", low=0.0
    )
    clip_norm: float | None = option(
        1.0, "global gradient norm at most; None: off", above=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    source: str = option(
        "digits",
        "'digits': scikit-learn's handwritten digits with captions, and running text;"
        " 'text': the running text alone; or a folder or a file of your own; or several"
        " with weights, as 'a.jsonl*0.7,b.tar*0.3'",
    )
    batch_size: int = option(128, "sequences per step over all devices", low=1)
    seed: int = option(0, "seed of order, task choice and augmentation", low=0)
    tokenizer: str = option(
        "bytes", "'bytes', 'sentencepiece:FILE' or 'tokenizers:FILE' (Hugging Face)"
    )
    image_size: int = option(
        8, "pixels along the side to which images are scaled; digits have 8", low=1
    )
    image_mode: Literal["gray", "rgb"] = option(
        "gray", "numbers per pixel: 1, or 3; digits are gray"
    )
    patch_size: int = option(4, "pixels along the side of a patch", low=1)
    shift_pixels: int = option(
        1, "images move by up to so many pixels in training", low=0
    )
    held_out: int = option(
        297, "digits images kept from training", low=1, high=DIGITS_IMAGES - 1
    )
    held_out_share: float = option(
        0.05,
        "share of the records of a source of your own that is kept from training, at"
        " least one; 0: none",
        low=0.0,
        below=1.0,
    )
    held_out_source: str = option(
        "",
        "source, named as in Data.source, to evaluate instead; what it holds is never"
        " trained on; '': Data.held_out_share",
    )
    max_broken: float = option(
        0.01, "share of broken records above which a run stops", low=0.0, high=1.0
    )
    epochs: int | None = option(
        None, "times that the records are gone through; None: without end", low=1
    )
    packing: bool = option(
        False, "several examples share a sequence, unseen by each other, if they fit"
    )
    caption_weight: float = option(0.9, "share of image captioning", low=0.0)
    image_denoise_weight: float = option(
        0.04, "share of image-based denoising", low=0.0
    )
    text_denoise_weight: float = option(0.03, "share of text denoising", low=0.0)
    lm_weight: float = option(0.03, "share of language modelling", low=0.0)
    mask_fraction: float = option(
        0.3, "share of the tokens masked for denoising", low=0.0, high=1.0
    )
    num_threads: int = option(2, "threads that prepare batches", low=0)
    prefetch_batches: int = option(4, "batches prepared ahead", low=1)


BestMetric = Literal[
    "loss",
    "eval_loss_caption",
    "eval_loss_image_denoise",
    "eval_loss_text_denoise",
    "eval_loss_lm",
    "eval_accuracy_caption",
    "eval_accuracy_image_denoise",
    "eval_accuracy_text_denoise",
    "eval_accuracy_lm",
    "caption_exact_match",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the training state is written."""

    every_steps: int = option(500, "steps between checkpoints; 0: only the end", low=0)
    keep: int = option(3, "newest checkpoints kept", low=1)
    keep_every: int = option(
        0, "checkpoints of steps that this divides are kept for ever; 0: none", low=0
    )
    keep_best: int = option(
        0, "checkpoints kept that are best by best_metric; 0: none", low=0
    )
    best_metric: BestMetric = option(
        "loss",
        "figure of the step by which keep_best chooses: the highest accuracies and"
        " matches, the lowest of the others",
    )
    asynchronous: bool = option(True, "write while training goes on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The run."""

    steps: int = option(800, "optimizer updates in all", low=0)
    seed: int = option(0, "seed of the initial weights", low=0)
    accumulation: int = option(
        1, "parts of a batch, one after another, that make one update", low=1
    )
    log_every: int = option(10, "steps between logged metrics", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: only at the end", low=0)
    eval_batches: int = option(4, "held-out batches of an evaluation", low=0)
    nonfinite: Literal["stop", "skip"] = option(
        "stop",
        "when a loss or a gradient is not finite: 'stop' ends the run, 'skip' leaves"
        " out that update and goes on; neither saves it",
    )
    init_from: str = option("", "run folder whose weights start this run; '': none")
    watchdog_s: float = option(
        600.0,
        "seconds without the end of a step after which every process prints where its"
        " threads are; 0: never",
        low=0.0,
    )
    compilation_cache: str = option(
        "", "folder of jax's persistent compilation cache; '': off"
    )
    profile_steps: str = option(
        "",
        "steps to profile, a number or FIRST-LAST as '10-12'; the trace and how much"
        " communication was hidden go to profile/ in the run folder; '': none",
    )


SECTIONS = (Mesh, Model, MoE, Pipeline, Balancer, Optimizer, Data, Checkpoint, Train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Only the command line and the trainer see it."""

    mesh: Mesh = Mesh()
    model: Model = Model()
    moe: MoE = MoE()
    pipeline: Pipeline = Pipeline()
    balancer: Balancer = Balancer()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    train: Train = Train()
