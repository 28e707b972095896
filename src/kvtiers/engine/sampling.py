"""From logits to the next token: greedy, temperature, top-k, top-p, seeds, log probabilities.

Must not know models, batches or requests: a row of logits, parameters and a position go in, a
token comes out. The choice depends only on (logits, parameters, seed, output index), never on what
else is in the batch or on how often the sequence was interrupted: each token has its own uniform
number, drawn from a counter-based generator keyed by seed and index.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch

from kvtiers.scheduling.executor import SamplingParams, TokenResult


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
) -> list[TokenResult]:
    """One token per row of `logits`, shape (rows, vocabulary), finite, any float dtype.

    `output_indices[i]` is how many tokens the row's sequence has produced before.
    """
    logits = logits.float()
    greedy = logits.argmax(-1).tolist()
    results = []
    for row, (param, index) in enumerate(zip(params, output_indices, strict=True)):
        token = greedy[row] if param.temperature == 0 else _draw(logits[row], param, index)
        results.append(_with_logprobs(logits[row], token, param.logprobs))
    return results


def uniform(seed: int | None, output_index: int) -> float:
    """The number in [0, 1) that decides token `output_index` of a sequence with `seed`."""
    if seed is None:
        return secrets.randbits(53) / (1 << 53)
    key = (seed & ((1 << 64) - 1), output_index)
    return float(np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))).random())


def _draw(logits: torch.Tensor, params: SamplingParams, output_index: int) -> int:
    """Inverse of the cumulative distribution at this token's uniform number."""
    # Below the largest: a tiny temperature makes the others impossible, and nothing infinite.
    scaled = (logits.double() - logits.max()) / params.temperature
    tokens: torch.Tensor | None = None
    if 0 < params.top_k < scaled.shape[0]:
        scaled, tokens = scaled.topk(params.top_k)
    elif params.top_p < 1:
        scaled, tokens = scaled.sort(descending=True)
    cumulative = scaled.softmax(-1).cumsum(-1)
    if params.top_p < 1:
        # The smallest set of likeliest tokens whose probability reaches top_p; never empty.
        kept = int(torch.searchsorted(cumulative, params.top_p)) + 1
        cumulative = cumulative[: min(kept, cumulative.shape[0])]
    point = uniform(params.seed, output_index) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, point, right=True))
    index = min(index, cumulative.shape[0] - 1)
    return index if tokens is None else int(tokens[index])


def _with_logprobs(logits: torch.Tensor, token: int, alternatives: int | None) -> TokenResult:
    """`token` with the log probabilities of the model itself (before temperature)."""
    if alternatives is None:
        return TokenResult(token)
    logprobs = logits.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, tokens = logprobs.topk(min(alternatives, logprobs.shape[0]))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenResult(token, float(logprobs[token]), top)
