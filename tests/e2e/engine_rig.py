"""An engine over a small model whose every answer is compared with the same model without cache.

`Rig` moves the KV of a prompt where a test wants it (device, host, storage) and asks; every answer
it returns has been compared, teacher-forced, position by position.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtiers.engine.codec import TokenizerCodec
from kvtiers.engine.config import EngineConfig
from kvtiers.engine.engine import LLMEngine
from kvtiers.engine.messages import FinishEvent, FinishReason, GenerationRequest, TokenEvent
from kvtiers.engine.models import model_directory, models_dir
from kvtiers.engine.parts import assemble, cpu_transfer
from kvtiers.engine.pools import KvPools
from kvtiers.engine.reference import Comparison, ReferenceModel
from kvtiers.engine.served_model import ServedModel, load_plain
from kvtiers.events import Copy
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.testing.faulty_transfer import FaultyTransfer
from kvtiers.types import HitSplit, Purpose, Tier

# A second OpenMP thread beside a busy process makes everything many times slower.
torch.set_num_threads(1)

PAGE_TOKENS = 16
TIMEOUT_SECONDS = 60.0


@cache
def loaded(model: str) -> tuple[ServedModel, TokenizerCodec, ReferenceModel]:
    """A model, once per test session: engines use it one after the other."""
    directory = model_directory(model, models_dir())
    served = ServedModel.of(load_plain(directory, "float32"))
    codec = TokenizerCodec(directory, served.model.config.vocab_size)
    return served, codec, ReferenceModel.load(model)


class FailingLoads:
    """A transfer that works, until `on`: then every load-back brings some leading pages at most."""

    def __init__(self, pools: KvPools) -> None:
        self._faulty = FaultyTransfer(cpu_transfer(pools), seed=1, fail_rate=1.0)
        self.layers = self._faulty.layers
        self.on = False
        self.poll: Any = self._faulty.poll
        self.on_completion: Any = self._faulty.on_completion
        self.wait_layer: Any = self._faulty.wait_layer
        self.probe: Any = self._faulty.probe
        self.close: Any = self._faulty.close

    def submit(self, copies: Sequence[Copy]) -> None:
        fails = self.on and copies[0].purpose is Purpose.LOAD_BACK
        (self._faulty if fails else self._faulty.inner).submit(copies)


class Answer:
    """What came back for one prompt, and how it compares."""

    def __init__(self, tokens: list[int], end: FinishEvent, comparison: Comparison | None) -> None:
        self.tokens = tokens
        self.end = end
        self.comparison = comparison

    @property
    def split(self) -> HitSplit:
        assert self.end.split is not None
        return self.end.split


class Rig:
    """An engine with small tiers. Use as a context manager."""

    def __init__(self, directory: Path, model: str = "tiny-random-llama", **settings: Any) -> None:
        self.served, codec, self.reference = loaded(model)
        self.directory = directory
        self.config = EngineConfig(
            model=model,
            page_tokens=PAGE_TOKENS,
            storage_dir=directory / "store",
            storage_gib=0.1,
            prefetch_threshold_tokens=PAGE_TOKENS,
            capture_logits_mib=512,
            **{"device_pages": 64, "host_pages": 96, "max_running_requests": 8, **settings},
        )
        self.loads: FailingLoads | None = None

        def make_transfer(pools: KvPools) -> FailingLoads:
            self.loads = FailingLoads(pools)
            return self.loads

        parts = assemble(self.config, self.served, codec.eos_token_ids, make_transfer=make_transfer)
        self.engine = LLMEngine(self.config, model, codec, parts)

    def __enter__(self) -> Rig:
        self.engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.check_books()
        self.engine.stop()
        shutil.rmtree(self.directory / "store", ignore_errors=True)

    # ---------------------------------------------------------------- asking

    def prompt(self, seed: int, tokens: int) -> np.ndarray:
        vocabulary = min(self.engine.codec.vocab_tokens, 40_000)
        return np.random.default_rng(seed).integers(7, vocabulary, tokens).astype(np.int32)

    def submit(self, prompt: np.ndarray, max_tokens: int = 4) -> Any:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self.engine.submit(GenerationRequest(prompt, params, capture_logits=True))

    def collect(self, prompt: np.ndarray, handle: Any, *, compare: bool = True) -> Answer:
        """Wait for a submitted request and compare it."""
        tokens: list[int] = []
        end: FinishEvent | None = None
        for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
            else:
                end = event
        assert end is not None
        comparison = None
        logits = self.engine.take_logits(handle.request_id)
        if compare:
            assert end.reason is FinishReason.LENGTH, end
            assert logits is not None
            comparison = self.reference.compare(prompt, tokens, logits)
        return Answer(tokens, end, comparison)

    def ask(self, prompt: np.ndarray, max_tokens: int = 4) -> Answer:
        """An answer that has been found exact."""
        answer = self.collect(prompt, self.submit(prompt, max_tokens))
        assert answer.comparison is not None
        assert answer.comparison.exact, (answer.comparison, answer.split)
        return answer

    # ---------------------------------------------------------------- moving KV about

    def settle(self) -> None:
        """Let every copy under way end."""
        assert self.engine.call_in_loop(lambda p: p.controller.drain(TIMEOUT_SECONDS)).result()

    def resident(self, tier: Tier) -> int:
        return self.engine.call_in_loop(lambda p: p.ledger.tiers[tier].resident).result()

    def evict_device(self, pages: int | None = None) -> None:
        """Evict from device, copying first where the policy has not, until `pages` (all) left."""
        self.settle()
        before = self.resident(Tier.DEVICE)
        wanted = before if pages is None else pages
        for _ in range(20):
            left = wanted - (before - self.resident(Tier.DEVICE))
            if left <= 0:
                return
            self.engine.call_in_loop(
                lambda p, left=left: p.cache.evict(Tier.DEVICE, left, p.clock())
            ).result()
            self.settle()
        raise AssertionError(f"{left} of {wanted} pages do not leave the device")

    def only_in_storage(self) -> None:
        """Leave everything cached so far in storage alone."""
        self.evict_device()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.engine.flush(tier)
        assert self.resident(Tier.DEVICE) == self.resident(Tier.HOST) == 0

    def check_books(self) -> None:
        """No request runs and no copy is under way: the books balance and nothing is open."""
        self.settle()

        def check(parts: Any) -> dict[str, int]:
            assert parts.ledger.audit(parts.cache.recount()) == {}
            parts.ledger.check()
            return parts.ledger.open_ends()

        assert not any(self.engine.call_in_loop(check).result().values())
