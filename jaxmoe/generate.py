# SPDX-License-Identifier: Apache-2.0
"""Floor 6. Writing text with a trained model, one token at a time.

A prompt is read once; then each step adds one token to every sequence, from the keys
and values that are kept of all positions before (`jaxmoe.decode`). One program serves
prompts of any length, as they are padded to the length of a sequence.

What comes next is chosen in one of three ways: the likeliest token (greedy), a token
drawn by chance (temperature, top-p), or the likeliest of several continuations that are
followed at once (beam search).

Legend: b sequences on this device, B over all devices, K continuations of a sequence
(1 without a beam), S positions, V vocabulary, N new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxmoe.data.tasks import last_position
from jaxmoe.data.tokenizer import PAD
from jaxmoe.decode import Decoder
from jaxmoe.layers.attention import Memory
from jaxmoe.mesh import BATCH_AXES
from jaxmoe.model import Batch
from jaxmoe.train_step import Setup


@flax.struct.dataclass
class Controls:
    """What may differ from call to call of one compiled program.

    Attributes:
      max_tokens: new tokens at most, the end token included.
      temperature: the logits are divided by it before a token is drawn.
      top_p: a token is drawn from the fewest likeliest ones that have this probability.
      seed: of the draws.
    """

    max_tokens: Any
    temperature: Any = 1.0
    top_p: Any = 1.0
    seed: Any = 0


@flax.struct.dataclass
class Generated:
    """New text.

    Attributes:
      tokens_BN: int32, padding behind the end.
      log_prob_B: float32, sum over the tokens of log p, by the model as it is.
      ended_B: the end token was written; else the text was cut off.
    """

    tokens_BN: jax.Array
    log_prob_B: jax.Array
    ended_B: jax.Array


@flax.struct.dataclass
class _State:
    """Carried from token to token.

    Attributes:
      count: tokens written.
      alive: whether any device has something left to write: all go on together.
      logits_bKV, memories: of the positions up to now.
      place_bK: the position of the newest token.
      done_bK: nothing more is written: the end, or no room.
    """

    count: jax.Array
    alive: jax.Array
    logits_bKV: jax.Array
    memories: list[Memory]
    place_bK: jax.Array
    tokens_bKN: jax.Array
    log_prob_bK: jax.Array
    ended_bK: jax.Array
    done_bK: jax.Array


# The continuation of which each is one (None: its own), its next token, and the sum of
# log p with it; [b, K].
_Chosen = tuple[jax.Array | None, jax.Array, jax.Array]


def make_generator(
    setup: Setup, new_tokens: int, eos_id: int, *, beams: int = 1, sample: bool = False
) -> Callable[..., Generated]:
    """The jitted program that continues prompts.

    Args:
      setup: For inference (`Setup.for_inference`): experts drop no token.
      new_tokens: N, tokens for which there is room in the result.
      eos_id: The token that ends a sequence; padding follows it.
      beams: K; with more than 1 the likeliest of the texts that a beam search finds.
      sample: Tokens are drawn by chance.

    Returns:
      A function (params, buffers, prompts [B, ...], controls) -> Generated. A prompt is
      a batch without targets; a row of padding alone stays empty. What does not fit
      into the model's sequence length is not generated. Without controls, N tokens. By
      its `number` a sequence draws the same tokens in any row, on any mesh.
    """
    assert not (sample and beams > 1)
    choose = _beam if beams > 1 else _draw if sample else _likeliest

    def generate(params: Any, buffers: Any, given: tuple[Batch, Controls]) -> Generated:
        prompts, controls = given
        weights = setup.weights(params, buffers)
        decoder = Decoder(setup.network, weights, buffers, setup.axis)
        number_b = prompts["number"]

        def write(state: _State) -> _State:
            chosen = choose(state.logits_bKV, state, controls, number_b)
            return _append(state, chosen, eos_id, controls.max_tokens)

        def step(state: _State) -> _State:
            newest_bK = state.tokens_bKN[:, :, state.count - 1]
            logits, memories = decoder.step(
                state.memories,
                newest_bK.reshape(-1),
                state.place_bK.reshape(-1),
                valid_B=~state.done_bK.reshape(-1),
                number_B=jnp.repeat(number_b, beams),
            )
            logits = logits.reshape(state.logits_bKV.shape)
            state = dataclasses.replace(state, logits_bKV=logits, memories=memories)
            return write(state)

        first = write(_first(decoder, prompts, beams, new_tokens))
        state = jax.lax.while_loop(lambda state: state.alive, step, first)
        return Generated(
            state.tokens_bKN[:, 0], state.log_prob_bK[:, 0], state.ended_bK[:, 0]
        )

    spec = P(BATCH_AXES)
    per_device = setup.per_device(generate, (spec, P()), spec)

    def run(params, buffers, prompts, controls=None) -> Generated:
        if "number" not in prompts:
            rows = jnp.arange(prompts["tokens"].shape[0], dtype=jnp.int32)
            prompts = {**prompts, "number": rows}
        controls = controls or Controls(new_tokens)
        most = jnp.minimum(controls.max_tokens, new_tokens)
        controls = dataclasses.replace(controls, max_tokens=most)
        return per_device(params, buffers, (prompts, controls))

    # Every process reads all of them.
    return jax.jit(run, out_shardings=NamedSharding(setup.mesh, P()))


def _first(decoder: Decoder, prompts: Batch, beams: int, new_tokens: int) -> _State:
    """The prompts, read; K equal continuations of each, of which the first counts."""
    place_b = last_position(prompts)
    logits_bV, memories = decoder.read(prompts, jnp.maximum(place_b, 0))
    b = place_b.size

    def each(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[:, None], beams, axis=1)

    if beams > 1:
        memories = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), memories)
    first_K = jnp.arange(beams) == 0
    log_prob_K = jnp.where(first_K, 0.0, -jnp.inf)
    return _State(
        count=jnp.zeros((), jnp.int32),
        alive=jnp.ones((), bool),
        logits_bKV=each(logits_bV),
        memories=memories,
        place_bK=each(place_b),
        tokens_bKN=jnp.full((b, beams, new_tokens), PAD, jnp.int32),
        log_prob_bK=jnp.broadcast_to(log_prob_K[None], (b, beams)),
        ended_bK=jnp.zeros((b, beams), bool),
        done_bK=each(place_b < 0),
    )


def _append(
    state: _State, chosen: _Chosen, eos_id: int, max_tokens: jax.Array
) -> _State:
    """With the next token of each continuation that is not done."""
    parent_bK, token_bK, log_prob_bK = chosen
    if parent_bK is not None:
        state = _follow(state, parent_bK)
    before_bK = state.done_bK
    token_bK = jnp.where(before_bK, PAD, token_bK).astype(jnp.int32)
    place_bK = state.place_bK + 1
    ended_bK = state.ended_bK | (~before_bK & (token_bK == eos_id))
    # What is predicted at the last position has no place of its own.
    S = state.memories[0].keys_BSHQ.shape[1]
    done_bK = before_bK | ended_bK | (place_bK >= S)
    count = state.count + 1
    # Log p only falls: nothing overtakes a first continuation that is done.
    more = (count < max_tokens) & ~jnp.all(done_bK[:, 0])
    return dataclasses.replace(
        state,
        count=count,
        alive=jax.lax.psum(more.astype(jnp.int32), BATCH_AXES) > 0,
        place_bK=place_bK,
        tokens_bKN=state.tokens_bKN.at[:, :, state.count].set(token_bK),
        log_prob_bK=jnp.where(before_bK, state.log_prob_bK, log_prob_bK),
        ended_bK=ended_bK,
        done_bK=done_bK,
    )


def _follow(state: _State, parent_bK: Int[Array, "b K"]) -> _State:
    """Continuation k becomes what its parent was."""
    b, K = parent_bK.shape
    row_bK = jnp.arange(b)[:, None] * K + parent_bK

    def take(x: jax.Array) -> jax.Array:
        return x.reshape(b * K, *x.shape[2:])[row_bK]

    flat = row_bK.reshape(-1)
    return dataclasses.replace(
        state,
        memories=jax.tree.map(lambda x: x[flat], state.memories),
        place_bK=take(state.place_bK),
        tokens_bKN=take(state.tokens_bKN),
        log_prob_bK=take(state.log_prob_bK),
        ended_bK=take(state.ended_bK),
        done_bK=take(state.done_bK),
    )


# What comes next -------------------------------------------------------------------


def _likeliest(logits_bKV, state: _State, controls: Controls, number_b) -> _Chosen:
    """The largest logit; of equal ones the first."""
    token_bK = jnp.argmax(logits_bKV, axis=-1)
    return None, token_bK, _log_prob_with(token_bK, logits_bKV, state)


def _draw(logits_bKV, state: _State, controls: Controls, number_b) -> _Chosen:
    """By chance, the same for a sequence of the same number at the same token."""
    scaled_bV = nucleus(logits_bKV[:, 0] / controls.temperature, controls.top_p)
    of_run = jax.random.fold_in(jax.random.key(controls.seed), state.count)
    key_b = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(of_run, number_b)
    token_bK = jax.vmap(jax.random.categorical)(key_b, scaled_bV)[:, None]
    return None, token_bK, _log_prob_with(token_bK, logits_bKV, state)


def _beam(logits_bKV, state: _State, controls: Controls, number_b) -> _Chosen:
    """The K likeliest of all continuations by one token; what is done stays as it is,
    as one of them."""
    b, K, V = logits_bKV.shape
    step_bKV = jax.nn.log_softmax(logits_bKV, axis=-1)
    stay_V = jnp.where(jnp.arange(V) == PAD, 0.0, -jnp.inf)
    step_bKV = jnp.where(state.done_bK[:, :, None], stay_V[None, None], step_bKV)
    total_bKV = state.log_prob_bK[:, :, None] + step_bKV
    best_bK, which_bK = jax.lax.top_k(total_bKV.reshape(b, K * V), K)
    return which_bK // V, which_bK % V, best_bK


def _log_prob_with(token_bK: jax.Array, logits_bKV: jax.Array, state: _State):
    log_prob_bKV = jax.nn.log_softmax(logits_bKV, axis=-1)
    new_bK = jnp.take_along_axis(log_prob_bKV, token_bK[:, :, None], axis=-1)[..., 0]
    return state.log_prob_bK + new_bK


def nucleus(
    logits_BV: Float[Array, "B V"], top_p: Float[Array, ""] | float
) -> Float[Array, "B V"]:
    """The logits of the fewest likeliest tokens whose probabilities reach `top_p`.

    Those of all others become minus infinity. The likeliest always stays, and so does
    what is as likely as the last one that stays.

    Reference: Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    falling_BV = -jnp.sort(-logits_BV, axis=-1)
    probs_BV = jax.nn.softmax(falling_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_B = jnp.maximum(jnp.sum(before_BV < top_p, axis=-1), 1)
    least_B1 = jnp.take_along_axis(falling_BV, kept_B[:, None] - 1, axis=-1)
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


def decode_rows(tokens_BN: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each row."""
    return [decode(row.tolist()) for row in np.asarray(tokens_BN)]
