"""A model with pools and an executor for the engine's unit tests, and the plain model beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtiers.engine.capture import LogitsCapture
from kvtiers.engine.executor import TorchExecutor
from kvtiers.engine.pools import KvPools
from kvtiers.engine.served_model import ServedModel
from kvtiers.scheduling.executor import Batch, BatchResult, Chunk, SamplingParams
from kvtiers.scheduling.growing_key import GrowingKey
from kvtiers.testing.tiny_models import tiny_model

# A second OpenMP thread beside a busy process makes everything many times slower.
torch.set_num_threads(1)

PAGE_TOKENS = 16
GREEDY = SamplingParams(temperature=0)


@dataclass
class FakeLease:
    """The parts of a lease that an executor reads."""

    slots: Sequence[int]
    shared_tokens: int = 0
    load_ops: tuple[int, ...] = ()

    def block_table(self) -> np.ndarray:
        return np.array(self.slots, np.int32)


class FakeLoads:
    """`wait_layer` of a transfer whose load-backs arrive, except those in `failing`.

    Those in `slow` arrive for who gives them time.
    """

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.slow: set[int] = set()
        self.waited: list[tuple[tuple[int, ...], int]] = []

    def __call__(self, op_ids: Sequence[int], layer: int, timeout_seconds: float) -> bool:
        self.waited.append((tuple(op_ids), layer))
        in_time = timeout_seconds > 0 or self.slow.isdisjoint(op_ids)
        return in_time and self.failing.isdisjoint(op_ids)


class Bench:
    """Runs chunks through the executor and gives the logits behind each request's token."""

    def __init__(self, architecture: str = "llama", model: Any = None, plain: Any = None) -> None:
        name = f"tiny-random-{architecture}"
        self.plain = plain if plain is not None else tiny_model(name)
        served = ServedModel.of(model if model is not None else tiny_model(name))
        self.model = served.model
        self.pools = KvPools(served.layout, PAGE_TOKENS, device_pages=64, host_pages=0)
        self.capture = LogitsCapture(1 << 28)
        self.loads = FakeLoads()
        self.executor = TorchExecutor(
            self.model, self.pools, wait_layer=self.loads, capture=self.capture
        )

    def chunk(
        self,
        tokens: Sequence[int],
        lease: FakeLease,
        start: int = 0,
        end: int | None = None,
        *,
        request_id: int = 1,
        sample: bool = True,
        params: SamplingParams = GREEDY,
        output_index: int = 0,
    ) -> Chunk:
        self.capture.want(request_id)
        return Chunk(
            request_id,
            lease,  # type: ignore[arg-type]
            GrowingKey(np.asarray(tokens, "<i4").tobytes()),
            start,
            (len(tokens) if end is None else end) - start,
            sample,
            params,
            output_index,
        )

    def run(
        self, *chunks: Chunk, load_ops: tuple[int, ...] = ()
    ) -> tuple[BatchResult, dict[int, np.ndarray]]:
        result = self.executor.run(Batch(tuple(chunks), load_ops))
        logits = {c.request_id: self.capture.take(c.request_id) for c in chunks}
        return result, {i: rows[-1] for i, rows in logits.items() if rows is not None}

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        """Plain logits of the last position."""
        with torch.inference_mode():
            return self.plain(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].numpy()


def tokens_of(seed: int, count: int) -> list[int]:
    """Ordinary tokens (no special ones) of the tiny models' vocabulary."""
    return np.random.default_rng(seed).integers(7, 263, count).tolist()


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a share of the largest logit."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
