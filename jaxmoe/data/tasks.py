# SPDX-License-Identifier: Apache-2.0
"""Floor 5. The four tasks: what the model sees of a record, and what it must say.

A sequence is image patches, then encoder text, then decoder text. The decoder's inputs
and its targets are the same text, shifted by one: the last target is no input, since
nothing would be predicted from it. The pretraining tasks of M6 (arXiv 2103.00823):

  caption        image                             | language, caption -> caption, end
  image_denoise  image, language, masked caption   | begin, caption    -> caption, end
  text_denoise   masked chunk                      | begin, chunk      -> chunk, end
  lm                                               | begin, chunk      -> chunk

Legend: N examples, S sequence, P patches, D numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.data.tokenizer import Language, Tokenizer

TASKS = ("caption", "image_denoise", "text_denoise", "lm")
IMAGE_TASKS = ("caption", "image_denoise")

PADDING, PATCH, TEXT = range(3)  # values of `modality`

MEAN_SPAN = 3  # tokens that are masked in one piece

Ids = Sequence[int] | np.ndarray
Batch = dict[str, np.ndarray]


class Example(NamedTuple):
    """One sequence, before it has a length.

    The targets stand at the last decoder positions, as many as there are: as long as
    the decoder's inputs in training, empty in a prompt.
    """

    task: str
    patches: np.ndarray | None  # [P, D]
    encoder: Ids
    decoder: Ids
    targets: Ids


# Takes no position: where a record was skipped.
NOTHING = Example("lm", None, (), (), ())


def caption(
    patches: np.ndarray,
    ids: Sequence[int],
    *,
    language: Language,
    tokenizer: Tokenizer,
) -> Example:
    """Says in a language what the image shows."""
    decoder = [tokenizer.language_id(language), *ids]
    return Example("caption", patches, (), decoder, [*ids, tokenizer.eos_id])


def image_denoise(
    patches: np.ndarray,
    ids: Sequence[int],
    *,
    language: Language,
    tokenizer: Tokenizer,
    mask_fraction: float,
    rng: np.random.Generator,
) -> Example:
    """Restores a caption of which parts are masked, with the help of the image."""
    masked = mask_spans(
        np.asarray(ids), tokenizer.mask_id, fraction=mask_fraction, rng=rng
    )
    encoder = [tokenizer.language_id(language), *masked]
    decoder = [tokenizer.bos_id, *ids]
    targets = [*ids, tokenizer.eos_id]
    return Example("image_denoise", patches, encoder, decoder, targets)


def text_denoise(
    ids: np.ndarray,
    tokenizer: Tokenizer,
    *,
    mask_fraction: float,
    rng: np.random.Generator,
) -> Example:
    """Restores a chunk of text of which parts are masked."""
    masked = mask_spans(ids, tokenizer.mask_id, fraction=mask_fraction, rng=rng)
    decoder = np.concatenate(([tokenizer.bos_id], ids))
    targets = np.concatenate((ids, [tokenizer.eos_id]))
    return Example("text_denoise", None, masked, decoder, targets)


def lm(ids: np.ndarray, tokenizer: Tokenizer) -> Example:
    """Predicts each token of a chunk from those before; it ends where the text does."""
    decoder = np.concatenate(([tokenizer.bos_id], ids[:-1]))
    return Example("lm", None, (), decoder, ids)


def mask_spans(
    ids: np.ndarray, mask_id: int, *, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Replaces spans of tokens by the mask token, one for each token.

    Args:
      ids: The text.
      mask_id: The mask token.
      fraction: Share of the tokens to mask, at least one unless 0; their number is
        exact. Spans are 3 tokens long on average; neighbouring ones may touch.
      rng: Chooses where they begin.
    """
    n = len(ids)
    masked = min(n, max(1, round(fraction * n))) if fraction > 0 else 0
    if not masked:
        return ids
    spans = -(-masked // MEAN_SPAN)
    # Each begins behind so many of the tokens that are kept.
    kept_before = np.sort(rng.integers(n - masked + 1, size=spans))
    span_of = np.arange(masked) * spans // masked
    result = ids.copy()
    result[kept_before[span_of] + np.arange(masked)] = mask_id
    return result


def min_sequence_length(task: str, *, num_patches: int, caption_tokens: int) -> int:
    """Positions that the longest example of a task needs at least.

    Args:
      task: One of TASKS.
      num_patches: Patches of an image.
      caption_tokens: Tokens of the longest caption.
    """
    return {
        "caption": num_patches + 1 + caption_tokens,
        "image_denoise": num_patches + 2 * (1 + caption_tokens),
        "text_denoise": 3,
        "lm": 1,
    }[task]


def chunk_tokens(task: str, sequence_length: int) -> int:
    """Tokens of running text that fill a sequence of a text task."""
    return sequence_length if task == "lm" else (sequence_length - 1) // 2


def assemble(
    examples: Sequence[Example],
    *,
    sequence_length: int,
    num_patches: int,
    patch_dim: int,
    lengths: Sequence[int] | None = None,
) -> Batch:
    """Lays examples out as arrays.

    Args:
      examples: One for each row, or those of each row after those of the row before.
      sequence_length: Positions of a row; its examples must fit.
      num_patches: Patches of a row; its images must fit.
      patch_dim: Numbers of a patch.
      lengths: How many of the examples each row holds, at least one; None: one.

    Returns:
      tokens: int32 [N, S], 0 where the position is a patch or padding.
      patches: float32 [N, P, D], 0 behind the last image. The i-th image position of a
        row takes patch i.
      modality: int32 [N, S], 0 padding, 1 patch, 2 text.
      decoder: bool [N, S], the causal positions.
      sequence: int32 [N, S], which of the row's examples, from 1; 0 in padding.
      positions: int32 [N, S], the position inside the example, 0 in padding.
      targets: int32 [N, S], the token to be predicted at this position, 0 without loss.
      task: int32 [N, S], 1 + index into TASKS where there is a loss.
    """
    counts = [1] * len(examples) if lengths is None else lengths
    n, s = len(counts), sequence_length
    tokens = np.zeros((n, s), np.int32)
    targets = np.zeros((n, s), np.int32)
    patches = np.zeros((n, num_patches, patch_dim), np.float32)
    edges = np.zeros((len(examples), 7), np.int32)
    rest = enumerate(examples)
    for row, count in enumerate(counts):
        end = patch = 0
        for within in range(1, count + 1):
            number, example = next(rest)
            begin, image = end, 0
            if example.patches is not None:
                image = len(example.patches)
                patches[row, patch : patch + image] = example.patches
                patch += image
            image += begin
            start = image + len(example.encoder)
            end = start + len(example.decoder)
            loss = end - len(example.targets)
            assert end <= s and patch <= num_patches, (example.task, end, s)
            tokens[row, image:start] = example.encoder
            tokens[row, start:end] = example.decoder
            targets[row, loss:end] = example.targets
            task = 1 + TASKS.index(example.task)
            edges[number] = begin, image, start, end, loss, task, within
    begin, image, start, end, loss, task, within = edges.T[:, :, None]  # each [E, 1]
    where = np.arange(s, dtype=np.int32)
    used = (where >= begin) & (where < end)
    # [E, S], each with zeros outside of its example
    parts = {
        "modality": np.where(where < image, PATCH, TEXT).astype(np.int32) * used,
        "decoder": (where >= start) & used,
        "sequence": within * used,
        "positions": (where - begin) * used,
        "task": task * ((where >= loss) & used),
    }
    if lengths is not None:
        first = np.cumsum([0, *counts[:-1]])
        parts = {
            name: np.add.reduceat(array, first, axis=0, dtype=array.dtype)
            for name, array in parts.items()
        }
    return {"tokens": tokens, "patches": patches, "targets": targets, **parts}


def caption_prompt(
    patches: np.ndarray,
    language: Language,
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
) -> Batch:
    """Lays out one image whose caption is to be generated.

    Args:
      patches: The image, float32 [P, D].
      language: Which language the caption shall be in.
      tokenizer: Knows the languages' tokens.
      sequence_length: Positions of the row.

    Returns:
      The arrays of `assemble` without the first dimension. The decoder text is the
      language's token alone, and nothing has a target.
    """
    prompt = Example("caption", patches, (), [tokenizer.language_id(language)], ())
    batch = assemble(
        [prompt],
        sequence_length=sequence_length,
        num_patches=patches.shape[0],
        patch_dim=patches.shape[1],
    )
    return {name: array[0] for name, array in batch.items()}


def last_position(batch: Mapping[str, Any]) -> Any:
    """Where the last given token stands, for each row.

    The output at this position predicts the first token to be generated, which goes to
    the position after it.
    """
    return (batch["modality"] != PADDING).sum(-1) - 1
