"""A live engine under load and faults records its decisions; another process makes them again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from engine_rig import TIMEOUT_SECONDS, loaded

from kvtiers.engine.config import EngineConfig
from kvtiers.engine.engine import LLMEngine
from kvtiers.engine.messages import FinishReason, GenerationRequest
from kvtiers.engine.parts import assemble, cpu_transfer, file_store
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.testing.faulty_store import FaultyStore
from kvtiers.testing.faulty_transfer import FaultyTransfer
from kvtiers.types import Tier

MODEL = "tiny-random-llama"
CLIENTS = 64
ROUNDS = 3
PAGE_TOKENS = 16


def _prompt(rng: random.Random) -> np.ndarray:
    """One of a few beginnings, which clients share, and an end of its own."""
    shared = np.random.default_rng(rng.randrange(8)).integers(7, 263, 6 * PAGE_TOKENS)
    own = np.random.default_rng(rng.randrange(1 << 30)).integers(7, 263, rng.randrange(1, 40))
    return np.concatenate((shared[: rng.randrange(1, len(shared))], own)).astype(np.int32)


def _ask(engine: LLMEngine, seed: int) -> list[tuple[FinishReason, str]]:
    """A few requests of one client, one after the other; some are given up at once."""
    rng = random.Random(seed)
    ends = []
    for _ in range(ROUNDS):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randrange(1, 24),
            seed=seed,
            ignore_eos=True,
        )
        handle = engine.submit(
            GenerationRequest(
                _prompt(rng),
                params,
                n=rng.choice([1, 1, 2]),
                cache_salt=rng.choice(["", "tenant"]),
                priority=rng.randrange(3),
            )
        )
        if rng.random() < 0.1:
            engine.cancel(handle.request_id)
        ends += [(each.reason, each.message) for each in handle.results(TIMEOUT_SECONDS)]
    return ends


def test_sixty_four_clients_under_faults_replay_to_equal_facts(tmp_path: Path) -> None:
    served, codec, _ = loaded(MODEL)
    path = tmp_path / "decisions.jsonl"
    config = EngineConfig(
        model=MODEL,
        page_tokens=PAGE_TOKENS,
        device_pages=72,
        host_pages=120,
        storage_dir=tmp_path / "store",
        storage_gib=0.1,
        prefetch_threshold_tokens=PAGE_TOKENS,
        max_running_requests=24,
        decision_log=path,
    )
    parts = assemble(
        config,
        served,
        codec.eos_token_ids,
        make_transfer=lambda pools: FaultyTransfer(
            cpu_transfer(pools), seed=3, fail_rate=0.1, delay_polls_max=5
        ),
        open_store=lambda config, pools: FaultyStore(
            file_store(config, pools),
            seed=4,
            error_rate=0.05,
            loss_rate=0.05,
            corruption_rate=0.05,
            delay_seconds_max=0.005,
        ),
    )
    engine = LLMEngine(config, MODEL, codec, parts)
    engine.start()
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(_ask, engine, seed) for seed in range(CLIENTS)]
        engine.pin(_prompt(random.Random(1)), "", ttl_seconds=0.05)
        engine.flush(Tier.DEVICE)
        ends = Counter(end for each in asked for end in each.result(TIMEOUT_SECONDS))
    engine.drain(TIMEOUT_SECONDS)
    failed = sum(book.failed_pages for book in parts.ledger.copies.values())
    loaded_back = parts.ledger.load_back.ok_pages
    folded = parts.ledger.first.planned
    engine.stop()

    assert {reason for reason, _ in ends} <= {FinishReason.LENGTH, FinishReason.CANCELLED}, ends
    assert failed > 0, "no fault came through; the test shows nothing"
    assert loaded_back > 0
    calls = Counter(
        line["call"] for line in map(json.loads, path.open(encoding="ascii")) if "call" in line
    )
    assert calls["admit"] >= folded
    assert {"commit", "finish", "ack", "prefetch", "found", "tick", "flush"} <= calls.keys()

    replayed = subprocess.run(
        [sys.executable, "-m", "kvtiers.testing.replay", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"{sum(calls.values())} calls replayed" in replayed.stdout
    assert "no end" not in replayed.stdout
