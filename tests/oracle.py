# SPDX-License-Identifier: Apache-2.0
"""Plain re-statements of the model's mathematics, slow and easy to check by eye.

Choices are made by loops over tokens in NumPy. The mixture-of-experts layer is dense:
every expert is applied to every token, and what was not chosen is masked.

Legend: T tokens, D width, F hidden width, E experts, K experts per token, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import Model, MoE

# One tolerance for "equal in float32, summed in another order".
RELATIVE = 1e-5
# For programs that are compiled to be run once: half the time to compile.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def assert_close(got: Any, want: Any, *, relative: float = RELATIVE) -> None:
    """Every leaf differs by at most `relative` of the leaf's largest magnitude."""
    got_leaves = jax.tree_util.tree_leaves_with_path(got)
    want_leaves = jax.tree_util.tree_leaves_with_path(want)
    assert [p for p, _ in got_leaves] == [p for p, _ in want_leaves]
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, (name, a.shape, b.shape)
        assert np.isfinite(a).all(), f"{name} is not finite"
        scale = np.abs(b).max(initial=0.0)
        error = np.abs(a - b).max(initial=0.0)
        assert error <= relative * scale, f"{name}: {error:.3g} of {scale:.3g}"


def best(scores: np.ndarray, k: int) -> list[int]:
    """The k largest, by falling score, ties to the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def choose(
    logits_TE: np.ndarray,
    moe: MoE,
    bias_E: np.ndarray | None = None,
    valid_BS: np.ndarray | None = None,
):
    """Expert ids [T, K] as the router of `moe` picks them, one token at a time."""
    T, E = logits_TE.shape
    chosen = []
    if moe.router == "balanced":
        assert valid_BS is not None
        for number, valid_S in enumerate(valid_BS):
            token = number * len(valid_S) - 1
            for valid in valid_S:
                token += int(valid)
                chosen.append([(token * moe.top_k + k) % E for k in range(moe.top_k)])
        return np.array(chosen)
    for t in range(T):
        logits = logits_TE[t]
        if moe.router == "top_k":
            chosen.append(best(logits, moe.top_k))
        elif moe.router == "prototype":
            size = E // moe.top_k
            parts = [range(k * size, (k + 1) * size) for k in range(moe.top_k)]
            chosen.append([p[best(logits[p], 1)[0]] for p in parts])
        else:
            biased = 1 / (1 + np.exp(-logits)) + (0 if bias_E is None else bias_E)
            size = E // moe.num_groups
            groups = biased.reshape(moe.num_groups, size)
            score = np.array([np.sort(group)[-2:].sum() for group in groups])
            kept = best(score, moe.top_groups)
            outside = [e for e in range(E) if e // size not in kept]
            biased[outside] = -np.inf
            chosen.append(best(biased, moe.top_k))
    return np.array(chosen)


def keep(ids_TK: np.ndarray, valid_T: np.ndarray, group: int, limit: int):
    """Which assignments fit: first choices first, then earlier tokens, per group."""
    T, K = ids_TK.shape
    kept = np.zeros((T, K), bool)
    for start in range(0, T, group):
        taken: dict[int, int] = {}
        for k in range(K):
            for t in range(start, start + group):
                if not valid_T[t]:
                    continue
                expert = int(ids_TK[t, k])
                kept[t, k] = taken.get(expert, 0) < limit
                taken[expert] = taken.get(expert, 0) + 1
    return kept


def one_hot(ids_TK: np.ndarray, where_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """[T, E]: True where token t has expert e among its assignments in `where_TK`."""
    mask = np.zeros((ids_TK.shape[0], num_experts), bool)
    for t, k in np.argwhere(where_TK):
        mask[t, ids_TK[t, k]] = True
    return mask


def weights(logits_TE: jax.Array, chosen_TE: np.ndarray, moe: MoE):
    """(weight of each chosen expert, probabilities for the balance loss), [T, E]."""
    T, E = logits_TE.shape
    if moe.router == "balanced":
        exp = jnp.exp(logits_TE)
        return chosen_TE / moe.top_k, exp / jnp.sum(exp, axis=1, keepdims=True)
    if moe.router == "grouped_sigmoid":
        scores = 1 / (1 + jnp.exp(-logits_TE))
        chosen = scores * chosen_TE
        total = jnp.sum(chosen, axis=1, keepdims=True)
        total = jnp.where(total > 0, total, 1.0)
        probs = scores / jnp.sum(scores, axis=1, keepdims=True)
        return moe.route_scale * chosen / total, probs
    parts = moe.top_k if moe.router == "prototype" else 1
    exp = jnp.exp(logits_TE).reshape(T, parts, E // parts)
    probs = (exp / jnp.sum(exp, axis=2, keepdims=True)).reshape(T, E)
    chosen = probs * chosen_TE
    if moe.normalize_weights and moe.router == "top_k":
        chosen /= jnp.maximum(jnp.sum(chosen, axis=1, keepdims=True), 1e-9)
    return chosen, probs / parts


def activation(pre: jax.Array, gate: jax.Array | None) -> jax.Array:
    """GELU (tanh form), or silu(gate) * pre."""
    if gate is not None:
        return gate / (1 + jnp.exp(-gate)) * pre
    inner = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
    return 0.5 * pre * (1 + jnp.tanh(inner))


def feed_forward(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One feed-forward part; `w` has up and down, perhaps gate and biases."""
    pre = x @ w["up"] + (w["up_bias"][None] if "up_bias" in w else 0.0)
    h = activation(pre, x @ w["gate"] if "gate" in w else None)
    return h @ w["down"] + (w["down_bias"][None] if "down_bias" in w else 0.0)


def moe_layer(
    params: dict[str, Any],
    x_TD: jax.Array,
    valid_T: np.ndarray,
    chosen_TE: np.ndarray,
    kept_TE: np.ndarray,
    moe: MoE,
    group: int,
    sequence: int,
):
    """Output; the sums over routing groups of the balance loss and the z-loss, over

    sequences of the balance loss, over tokens of the router's entropy.

    Args:
      chosen_TE, kept_TE: each token's experts, before and after drops; none in padding.
    """
    E = chosen_TE.shape[1]
    logits_TE = x_TD @ params["router"]["router_kernel"]
    weights_TE, probs_TE = weights(logits_TE, chosen_TE, moe)
    weights_TE = weights_TE * kept_TE
    out_ETD = jax.vmap(feed_forward, in_axes=(0, None))(params["experts"], x_TD)
    y_TD = jnp.sum(weights_TE.T[:, :, None] * out_ETD, axis=0)
    if "shared" in params:
        y_TD += feed_forward(params["shared"], x_TD)

    def balance(size):
        real_GN = valid_T.reshape(-1, size)
        number_G = jnp.maximum(real_GN.sum(1), 1)
        load_GE = chosen_TE.reshape(-1, size, E).sum(1)
        share_GE = load_GE / (number_G * moe.top_k)[:, None]
        probs_GNE = probs_TE.reshape(-1, size, E) * real_GN[:, :, None]
        mean_GE = probs_GNE.sum(1) / number_G[:, None]
        return E * jnp.sum(share_GE * mean_GE)

    real_GN = valid_T.reshape(-1, group)
    number_G = jnp.maximum(real_GN.sum(1), 1)
    entropy_T = -jnp.sum(probs_TE * jnp.log(probs_TE), axis=1)
    z_T = jnp.log(jnp.sum(jnp.exp(logits_TE), axis=1)) ** 2
    z_G = (z_T.reshape(-1, group) * real_GN).sum(1) / number_G
    losses = balance(group), balance(sequence), jnp.sum(z_G)
    return y_TD, *losses, jax.lax.stop_gradient(jnp.sum(entropy_T * valid_T))


def attention_mask(sequence_S: list[int], decoder_S: list[bool]) -> np.ndarray:
    """[S, S] of one row: who sees whom, straight from the rule."""
    S = len(sequence_S)
    seen = np.zeros((S, S), bool)
    for i in range(S):
        for j in range(S):
            same = sequence_S[i] == sequence_S[j] != 0
            causal = decoder_S[i] and j <= i
            seen[i, j] = i == j or (same and (not decoder_S[j] or causal))
    return seen


def norm(w: dict[str, np.ndarray], x: np.ndarray, kind: str) -> np.ndarray:
    """LayerNorm or RMSNorm over the last axis."""
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    std = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return centred / std * w["scale"] + w.get("bias", 0.0)


def attention(w: dict[str, np.ndarray], x_SD: np.ndarray, mask: np.ndarray):
    """Multi-head self-attention of one sequence, head by head."""
    out = np.zeros_like(x_SD)
    for h in range(w["qkv_kernel"].shape[2]):
        q, k, v = (x_SD @ w["qkv_kernel"][:, c, h] for c in range(3))
        if "qkv_bias" in w:
            q, k, v = (a + w["qkv_bias"][c, h] for c, a in enumerate((q, k, v)))
        score = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
        weight = np.exp(score - score.max(1, keepdims=True))
        out += weight / weight.sum(1, keepdims=True) @ v @ w["out_kernel"][h]
    return out + w.get("out_bias", 0.0)


def model_logits(
    params: dict[str, Any], batch: dict[str, np.ndarray], model: Model, moe: MoE
) -> np.ndarray:
    """Logits [B, S, V] of the whole model; dropless, one sequence at a time."""
    pattern = [part.split("*") for part in model.layer_pattern.split(",")]
    kinds = [kind for kind, *n in pattern for _ in range(int(n[0]) if n else 1)]
    kinds *= model.num_layers // len(kinds)
    rows = []
    for b in range(batch["tokens"].shape[0]):
        row = {name: value[b] for name, value in batch.items()}
        mask = attention_mask(row["sequence"].tolist(), row["decoder"].tolist())
        x = _embedded(params["embedder"], row)
        for i, kind in enumerate(kinds):
            own = 0 if model.share_layers else kinds[:i].count(kind)
            w = jax.tree.map(lambda leaf, own=own: leaf[own], params[kind])
            attend = lambda h, w=w, mask=mask: attention(w["attention"], h, mask)  # noqa: E731
            if kind == "moe":
                feed = lambda h, w=w, row=row: _moe(w["moe"], h, row, moe)  # noqa: E731
            else:
                feed = lambda h, w=w: np.asarray(feed_forward(w["mlp"], h))  # noqa: E731
            for name, layer in (("attention_norm", attend), ("ffn_norm", feed)):
                if model.norm_position == "post":
                    x = norm(w[name], x + layer(x), model.norm)
                else:
                    x = x + layer(norm(w[name], x, model.norm))
        x = norm(params["final_norm"], x, model.norm)
        rows.append(x @ params.get("head", params["embedder"]["token"]).T)
    return np.stack(rows)


def _embedded(w: dict[str, Any], row: dict[str, np.ndarray]) -> np.ndarray:
    x, image = [], iter(row["patches"])
    for s, kind in enumerate(row["modality"]):
        if kind == 0:
            x.append(np.zeros(w["token"].shape[1]))
            continue
        what = w["token"][row["tokens"][s]]
        if kind == 1:
            what = next(image) @ w["patch"]["patch_kernel"] + w["patch"]["patch_bias"]
        x.append(what + w["position"][row["positions"][s]] + w["segment"][kind - 1])
    return np.array(x, np.float32)


def _moe(w: dict[str, Any], h_SD: np.ndarray, row: dict, moe: MoE) -> np.ndarray:
    ids = choose(h_SD @ w["router"]["router_kernel"], moe)
    valid = row["modality"] > 0
    real = np.repeat(valid[:, None], ids.shape[1], axis=1)
    chosen = one_hot(ids, real, moe.num_experts)
    return np.asarray(
        moe_layer(w, h_SD, valid, chosen, chosen, moe, len(h_SD), len(h_SD))[0]
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = value if isinstance(value, (tuple, list)) else (value,)
            for candidate in inner:
                if hasattr(candidate, "eqns") or hasattr(candidate, "jaxpr"):
                    yield from equations(candidate)


def count(jaxpr: Any, primitive: str) -> int:
    """How often a primitive stands in a jaxpr, at any depth."""
    return sum(e.primitive.name == primitive for e in equations(jaxpr))


def largest(jaxpr: Any) -> int:
    """Elements of the largest value that any equation makes."""
    sizes = [math.prod(v.aval.shape) for e in equations(jaxpr) for v in e.outvars]
    return max(sizes)
