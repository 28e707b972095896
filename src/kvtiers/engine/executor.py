"""The executor port in torch: one packed forward pass over paged KV, then sampling.

Owns the way from a `Batch` to a `BatchResult`, and the isolation of failures: a chunk that makes
the pass raise, that yields NaN or infinity, or whose load does not arrive fails alone. Must not
know tiers, the radix tree or what a failure means for a request.

Invariants: `run` never raises for a failing forward; a chunk without an entry in `failed` has
written finite KV for all its positions; positions of the tree are never written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kvtiers.engine.capture import LogitsCapture
from kvtiers.engine.packing import PackedBatch, pack
from kvtiers.engine.paged_cache import PagedCache
from kvtiers.engine.pools import KvPools
from kvtiers.engine.sampling import sample
from kvtiers.scheduling.executor import Batch, BatchResult, Chunk, TokenResult


class WaitLayer(Protocol):
    """`Transfer.wait_layer`: whether a layer of these load-backs arrived in time."""

    def __call__(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool: ...


class LoadGate:
    """Waits for layers of load-backs and remembers which of them will not come.

    A load that failed or did not arrive in time is not waited for again in the same batch: the
    other sequences of the batch go on, and what reads the missing bytes is failed at the end.
    """

    def __init__(self, wait_layer: WaitLayer, timeout_seconds: float) -> None:
        self._wait_layer = wait_layer
        self._timeout_seconds = timeout_seconds
        self.begin()

    def begin(self) -> None:
        self.missing: set[int] = set()
        self.stall_seconds = 0.0

    def wait(self, load_ops: tuple[int, ...], layer: int) -> None:
        started = time.monotonic()
        pending = [op for op in load_ops if op not in self.missing]
        if pending and not self._wait_layer(pending, layer, self._timeout_seconds):
            # One of them failed or is late; which one decides who fails. The others may still be
            # on their way: where one failed at once, nearly all of the time is left for them.
            for op in pending:
                left = max(0.0, started + self._timeout_seconds - time.monotonic())
                if not self._wait_layer([op], layer, left):
                    self.missing.add(op)
        self.stall_seconds += time.monotonic() - started


class TorchExecutor:
    """Runs batches of one model over its pools.

    `wait_layer` is the transfer's; None where there is no host tier. `load_timeout_seconds` bounds
    the wait for each layer of a load-back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pools: KvPools,
        *,
        wait_layer: WaitLayer | None = None,
        load_timeout_seconds: float = 30.0,
        capture: LogitsCapture | None = None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._capture = capture
        self.passes = 0
        """Forward passes begun so far."""
        self.busy_seconds = 0.0
        """Time in `run` so far, waits for loads included."""
        self._gate = LoadGate(wait_layer or _nothing_loads, load_timeout_seconds)
        layers = model.config.get_text_config().num_hidden_layers
        self._cache = PagedCache(layers, pools.planes, self._gate)

    def run(self, batch: Batch) -> BatchResult:
        """Compute the batch. Failures are entries of `BatchResult.failed`, never exceptions."""
        started = time.monotonic()
        self._gate.begin()
        results: list[TokenResult | None] = [None] * len(batch.chunks)
        failed: dict[int, str] = {}
        with torch.inference_mode():
            self._run_part(batch, list(range(len(batch.chunks))), results, failed)
        for index, chunk in enumerate(batch.chunks):
            if index not in failed and not self._gate.missing.isdisjoint(chunk.lease.load_ops):
                failed[index] = "the load-back of its prefix failed or did not arrive in time"
        for index in failed:
            results[index] = None
        seconds = time.monotonic() - started
        self.busy_seconds += seconds
        return BatchResult(results, failed, self._gate.stall_seconds, seconds)

    def _run_part(
        self,
        batch: Batch,
        indices: list[int],
        results: list[TokenResult | None],
        failed: dict[int, str],
    ) -> None:
        """Run some chunks in one pass; when that raises, in two halves, down to the culprit.

        Computing a chunk a second time writes the same KV again, so halving is always safe, and
        what did not fit into memory at once may fit in parts.
        """
        chunks = [batch.chunks[i] for i in indices]
        try:
            outcomes = self._forward(chunks, batch.load_ops)
        except Exception as error:  # whatever a model may raise is a result, not a crash
            if len(indices) == 1:
                failed[indices[0]] = f"the forward pass raised {type(error).__name__}: {error}"
                return
            middle = len(indices) // 2
            self._run_part(batch, indices[:middle], results, failed)
            self._run_part(batch, indices[middle:], results, failed)
            return
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, str):
                failed[index] = outcome
            else:
                results[index] = outcome

    def _forward(
        self, chunks: Sequence[Chunk], load_ops: tuple[int, ...]
    ) -> list[TokenResult | str | None]:
        """One pass: per chunk its token, None where none was wanted, or why it failed."""
        self.passes += 1
        packed = pack(chunks, self._pools.page_tokens, self._model.device, load_ops)
        self._cache.begin(packed)
        rows = torch.tensor([end - 1 for end in packed.ends], device=self._model.device)
        logits: torch.Tensor = self._model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=rows,
            packed=packed,
        ).logits[0]
        finite = self._finite(packed, logits)
        outcomes: list[TokenResult | str | None] = [None] * len(chunks)
        wanted: list[tuple[int, int]] = []  # (index of the chunk, row of the logits)
        for row, index in enumerate(packed.order):
            if not finite[row]:
                outcomes[index] = "the forward pass yielded NaN or infinity"
            elif chunks[index].sample:
                wanted.append((index, row))
        if wanted:
            chosen = logits[[row for _, row in wanted]]
            sampled = [chunks[index] for index, _ in wanted]
            tokens = sample(chosen, [c.params for c in sampled], [c.output_index for c in sampled])
            for (index, _), token in zip(wanted, tokens, strict=True):
                outcomes[index] = token
            self._record(sampled, chosen)
        return outcomes

    def _finite(self, packed: PackedBatch, logits: torch.Tensor) -> list[bool]:
        """Per packed chunk: whether all KV it computed and its last logits are finite.

        Its KV is looked at and not only its logits, because a chunk in the middle of a prompt
        publishes pages without choosing a token.
        """
        bad = (~self._cache.written_sums.isfinite()).int().cumsum(0)
        upto = bad[torch.tensor(packed.ends, device=bad.device) - 1].tolist()
        last = logits.isfinite().all(-1).tolist()
        return [
            upto[row] == (upto[row - 1] if row else 0) and last[row] for row in range(len(upto))
        ]

    def _record(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> None:
        if self._capture is None:
            return
        for chunk, row in zip(chunks, logits, strict=True):
            if self._capture.wants(chunk.request_id):
                kept = row.float().cpu().numpy().copy()
                self._capture.record(chunk.request_id, chunk.output_index, kept)


def _nothing_loads(op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
    return True
