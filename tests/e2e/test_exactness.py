"""Exactness: whatever tier a prefix comes from, and whatever happens on the way, the answer is the
one that the same model gives without any cache.

The full product of write policy x retention x situation on a tiny Llama; every situation with
rotating policies on the other architectures and on SmolLM2. `Rig.ask` compares each answer, float32
and teacher-forced, within 1e-4 of the largest logit. Every situation asserts that it was reached.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_rig import PAGE_TOKENS, Rig  # noqa: E402

from kvtiers.engine.messages import FinishReason, TokenEvent  # noqa: E402
from kvtiers.engine.models import SMOLLM2, known_models, models_dir  # noqa: E402
from kvtiers.engine.parts import EngineParts  # noqa: E402
from kvtiers.types import Tier  # noqa: E402

POLICIES = [
    {"write_policy": "write_through", "retention": "inclusive"},
    {"write_policy": "write_through_selective", "retention": "inclusive"},
    {"write_policy": "write_back", "retention": "inclusive"},
    {"write_policy": "write_back", "retention": "exclusive"},
]


def whole_pages(rig: Rig) -> int:
    """Tokens of a test's prompt that can be cached. SmolLM2 is slow, so its prompts are short."""
    return (6 if rig.engine.model_name == SMOLLM2 else 12) * PAGE_TOKENS


def prompt_of(rig: Rig, seed: int) -> np.ndarray:
    return rig.prompt(seed, whole_pages(rig) + 5)


def fill(rig: Rig) -> np.ndarray:
    """A prompt that has been computed; twice, so that the selective policy keeps it too."""
    prompt = prompt_of(rig, 1)
    for suffix in (2, 3):
        rig.ask(np.concatenate([prompt, rig.prompt(100 + suffix, suffix)]))
    rig.settle()
    return prompt


def hit_on_device(rig: Rig) -> None:
    split = rig.ask(fill(rig)).split
    assert split.device_hit == whole_pages(rig)


def hit_on_host(rig: Rig) -> None:
    prompt = fill(rig)
    rig.evict_device()
    split = rig.ask(prompt).split
    assert split.host_hit == whole_pages(rig)


def hit_in_storage(rig: Rig) -> None:
    prompt = fill(rig)
    rig.only_in_storage()
    split = rig.ask(prompt).split
    assert split.storage_hit == whole_pages(rig)


def hit_in_all_three_tiers(rig: Rig) -> None:
    prompt = fill(rig)
    rig.only_in_storage()
    third = whole_pages(rig) // 3
    rig.ask(prompt[: 2 * third + 1])
    rig.ask(prompt[: 2 * third + 2])
    rig.evict_device(third // PAGE_TOKENS)
    split = rig.ask(prompt).split
    assert (split.device_hit, split.host_hit, split.storage_hit) == (third, third, third)


def load_fails_in_part(rig: Rig) -> None:
    prompt = fill(rig)
    rig.evict_device()
    assert rig.loads is not None
    rig.loads.on = True
    answer = rig.ask(prompt)
    rig.loads.on = False
    assert answer.split.host_hit < whole_pages(rig)
    failed = rig.engine.call_in_loop(lambda p: p.ledger.load_back.failed_pages).result()
    voided = rig.engine.call_in_loop(lambda p: p.ledger.first.voided).result()
    assert failed
    assert voided
    rig.ask(prompt)


def chunked(rig: Rig) -> None:
    prompts = [prompt_of(rig, seed) for seed in (1, 2)]
    handles = [rig.submit(prompt) for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        comparison = rig.collect(prompt, handle).comparison
        assert comparison is not None
        assert comparison.exact
    passes = rig.engine.call_in_loop(lambda p: p.executor.passes).result()
    assert passes >= 2 * whole_pages(rig) / rig.config.max_batch_tokens


def retracted(rig: Rig) -> None:
    prompts = [rig.prompt(seed, PAGE_TOKENS) for seed in (1, 2)]
    handles = [rig.submit(prompt, max_tokens=6 * PAGE_TOKENS) for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        comparison = rig.collect(prompt, handle).comparison
        assert comparison is not None
        assert comparison.exact
    assert rig.engine.call_in_loop(lambda p: p.ledger.requests.retracted).result()


def aborted_neighbour(rig: Rig) -> None:
    """Neighbours on the same prefix leave while it is being computed, loaded and decoded."""
    prompt = fill(rig)
    rig.evict_device()
    suffixes = [rig.prompt(seed, 40) for seed in (20, 21, 22)]
    asked = [np.concatenate([prompt, suffix]) for suffix in suffixes]
    first, kept, third = (rig.submit(each, max_tokens=24) for each in asked)
    rig.engine.cancel(first.request_id)
    for event in third:
        if isinstance(event, TokenEvent):
            rig.engine.cancel(third.request_id)
            break
    comparison = rig.collect(asked[1], kept).comparison
    assert comparison is not None
    assert comparison.exact
    assert rig.collect(asked[0], first, compare=False).end.reason is FinishReason.CANCELLED


SITUATIONS: dict[str, tuple[Callable[[Rig], None], dict[str, int]]] = {
    "device": (hit_on_device, {}),
    "host": (hit_on_host, {}),
    "storage": (hit_in_storage, {}),
    "mixed": (hit_in_all_three_tiers, {}),
    "partial_load_failure": (load_fails_in_part, {}),
    "chunked": (chunked, {"max_batch_tokens": 24}),
    "retracted": (retracted, {"device_pages": 11}),
    "aborted_neighbour": (aborted_neighbour, {"max_batch_tokens": 48}),
}
OTHER_MODELS = [
    "tiny-random-qwen3",
    "tiny-random-mistral",
    "tiny-random-qwen3_moe",
    "tiny-random-deepseek_v3",
]


def check(directory: Path, model: str, policy: dict[str, str], situation: str) -> None:
    act, settings = SITUATIONS[situation]
    with Rig(directory, model, **policy, **settings) as rig:
        act(rig)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(p.values()))
def test_a_llama_answers_exactly(tmp_path: Path, policy: dict[str, str], situation: str) -> None:
    check(tmp_path, "tiny-random-llama", policy, situation)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_architectures_answer_exactly(tmp_path: Path, model: str, situation: str) -> None:
    policy = POLICIES[(OTHER_MODELS.index(model) + list(SITUATIONS).index(situation)) % 4]
    check(tmp_path, model, policy, situation)


@pytest.mark.model
@pytest.mark.parametrize("situation", SITUATIONS)
def test_smollm2_answers_exactly(tmp_path: Path, situation: str) -> None:
    if not known_models(models_dir())[0].available:
        pytest.skip(known_models(models_dir())[0].source)
    policy = POLICIES[list(SITUATIONS).index(situation) % 4]
    check(tmp_path, SMOLLM2, policy, situation)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_one_zeroed_page_is_found_out(tmp_path: Path, tier: Tier) -> None:
    """The negative control: the comparison of every test above can fail."""
    with Rig(tmp_path) as rig:
        prompt = fill(rig)
        if tier is Tier.HOST:
            rig.evict_device()

        def zero_the_first_page(parts: EngineParts) -> None:
            run = next(run for run in parts.core.state.tree.walk() if run.start == 0)
            if tier is Tier.HOST:
                parts.pools.host.memory[run.host_slots[0]] = 0
            else:
                for plane in parts.pools.device.planes:
                    plane[run.device_slots[0]] = 0

        rig.engine.call_in_loop(zero_the_first_page).result()
        answer = rig.collect(prompt, rig.submit(prompt))
        assert answer.split.computed < PAGE_TOKENS
        assert answer.comparison is not None
        assert not answer.comparison.exact
