"""The executor port: one forward pass over a packed batch, in torch or in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtiers.core.interface import LeaseView
from kvtiers.scheduling.growing_key import GrowingKey


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # how many alternatives to report; None: no logprobs
    ignore_eos: bool = False


class Chunk(NamedTuple):
    """Consecutive positions of one sequence in one forward pass.

    The pass computes positions `[start, start + tokens)`; their token ids are
    `key[4 * start : 4 * (start + tokens)]` (int32 bytes of prompt and output so far). Positions
    below `lease.shared_tokens` are recomputed but must not be written. `sample` says that the last
    position's logits choose the next token.
    """

    # a named tuple, as is `TokenResult`: there is one for every token of every answer
    request_id: int
    lease: LeaseView
    sequence: GrowingKey
    start: int
    tokens: int
    sample: bool
    params: SamplingParams
    output_index: int  # how many tokens the sequence has produced so far (for seeded sampling)

    @property
    def key(self) -> bytes:
        """Prompt and output so far; joined only for those who ask."""
        return self.sequence.key


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: prefill chunks and decode positions, packed.

    `load_ops` are the load-backs that the batch's leases rely on and that are not acknowledged
    yet: layer i must not be read before the transfer says layer i of these has arrived.

    `repeat` above 1 allows an executor to decode up to so many tokens per sequence before it
    returns (every position has its slot, and no sequence reaches `max_tokens` before the last).
    Virtual time uses it to jump to the next event; an executor that ignores it is correct.
    """

    chunks: tuple[Chunk, ...]
    load_ops: tuple[int, ...] = ()
    repeat: int = 1

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


class TokenResult(NamedTuple):
    """The chosen token of a chunk with `sample`; log probabilities where they were asked for."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """`results[i]` belongs to `batch.chunks[i]`: a token, or None where nothing was sampled.

    `failed` maps indices of chunks whose result must not be used (a raised forward, NaN, a load
    that did not arrive) to a message: nothing of them is published. `stall_seconds` is the time
    the pass waited for layers that were still loading; `seconds` the whole pass. Where
    `batch.repeat` was used, `repeated` says how often and `earlier[i]` holds the `repeated - 1`
    tokens of chunk `i` before the one in `results[i]`.
    """

    results: Sequence[TokenResult | None]
    failed: dict[int, str] = field(default_factory=dict)
    stall_seconds: float = 0.0
    seconds: float = 0.0
    repeated: int = 1
    earlier: Sequence[Sequence[int]] = ()


class Executor(Protocol):
    """Runs one batch at a time. Never raises for a failing forward: that is a result."""

    def run(self, batch: Batch) -> BatchResult: ...
