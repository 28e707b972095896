"""An engine over a tiny model, and requests for it, for the tests of what its clients see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtiers.engine.codec import TokenizerCodec
from kvtiers.engine.config import EngineConfig
from kvtiers.engine.engine import LLMEngine
from kvtiers.engine.messages import FinishEvent, GenerationRequest, TokenEvent
from kvtiers.engine.parts import assemble
from kvtiers.engine.served_model import ServedModel, load_plain
from kvtiers.scheduling.executor import SamplingParams

# A second OpenMP thread beside a busy process makes everything many times slower.
torch.set_num_threads(1)

MODEL = "tiny-random-llama"
SECONDS = 60.0
CONFIG = EngineConfig(model=MODEL, device_pages=128, host_pages=128, prefetch_threshold_tokens=16)


def make(directory: Path, config: EngineConfig) -> LLMEngine:
    """An engine with a model of its own, so that a test may break it."""
    served = ServedModel.of(load_plain(directory, config.dtype))
    codec = TokenizerCodec(directory, served.model.config.vocab_size)
    return LLMEngine(config, MODEL, codec, assemble(config, served, codec.eos_token_ids))


def prompt(seed: int, tokens: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(7, 263, tokens).astype(np.int32)


def request(content: int = 1, tokens: int = 40, **params: Any) -> GenerationRequest:
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    return GenerationRequest(prompt(content, tokens), SamplingParams(**given))


def tokens_of(engine: LLMEngine, wanted: GenerationRequest) -> list[int]:
    return [e.token for e in engine.submit(wanted) if isinstance(e, TokenEvent)]


def end_of(engine: LLMEngine, wanted: GenerationRequest) -> FinishEvent:
    return engine.submit(wanted).results(SECONDS)[0]


def running(engine: LLMEngine) -> GenerationRequest:
    return request(tokens=20, max_tokens=1500)
