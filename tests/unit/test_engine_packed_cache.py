"""The packed, paged forward pass against the plain one of transformers, on tiny real architectures.

Exactness is measured as everywhere in this project: float32, the largest difference of any logit
within 1e-4 of the largest logit.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_bench import Bench, FakeLease, difference, tokens_of  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from kvtiers.engine.served_model import ServedModel  # noqa: E402
from kvtiers.errors import ModelError  # noqa: E402
from kvtiers.testing.tiny_models import tiny_model  # noqa: E402

FULL_ATTENTION = ["llama", "qwen3", "qwen3_moe", "deepseek_v3"]
ALL = [*FULL_ATTENTION, "mistral", "gpt_oss"]


@pytest.fixture(params=ALL)
def bench(request) -> Bench:
    return Bench(request.param)


def test_a_prefill_equals_the_plain_forward(bench: Bench) -> None:
    prompt = tokens_of(1, 70)
    result, logits = bench.run(bench.chunk(prompt, FakeLease([5, 2, 9, 1, 7])))
    assert not result.failed
    assert difference(logits[1], bench.expected(prompt)) < 1e-4
    assert result.results[0].token == bench.expected(prompt).argmax()


def test_a_chunked_prefill_equals_the_plain_forward(bench: Bench) -> None:
    prompt = tokens_of(2, 70)
    lease = FakeLease([5, 2, 9, 1, 7])
    for start, end in ((0, 10), (10, 33), (33, 34)):
        bench.run(bench.chunk(prompt, lease, start, end, sample=False))
    _, logits = bench.run(bench.chunk(prompt, lease, 34))
    assert difference(logits[1], bench.expected(prompt)) < 1e-4


def test_a_long_prompt_over_several_tiles_equals_the_plain_forward(bench: Bench) -> None:
    prompt = tokens_of(3, 600)
    _, logits = bench.run(bench.chunk(prompt, FakeLease(list(range(20, 58)))))
    assert difference(logits[1], bench.expected(prompt)) < 1e-4


def test_decodes_of_all_lengths_beside_prefills_on_reused_pages_equal_the_plain_forward(
    bench: Bench,
) -> None:
    a, b = tokens_of(4, 70), tokens_of(5, 20)
    on_a = a[:48] + tokens_of(6, 30)
    lease_a, lease_b = FakeLease([5, 2, 9, 1, 7]), FakeLease([30, 31])
    bench.run(bench.chunk(a, lease_a, request_id=1), bench.chunk(b, lease_b, request_id=2))
    result, logits = bench.run(
        bench.chunk([*a, 9], lease_a, 70, request_id=1),
        bench.chunk(on_a, FakeLease([5, 2, 9, 40, 41], shared_tokens=48), 48, request_id=3),
        bench.chunk([*b, 11], lease_b, 20, request_id=2),
        bench.chunk([*a, 8], FakeLease([5, 2, 9, 1, 50], 64), 64, request_id=4),
    )
    assert not result.failed
    for request_id, sequence in ((1, [*a, 9]), (2, [*b, 11]), (3, on_a), (4, [*a, 8])):
        assert difference(logits[request_id], bench.expected(sequence)) < 1e-4, request_id


def test_decodes_that_share_a_padded_tile_equal_the_plain_forward(bench: Bench) -> None:
    sequences = {i: tokens_of(10 + i, 40 + 3 * i) for i in range(6)}
    leases = {i: FakeLease(list(range(5 * i, 5 * i + 5))) for i in sequences}
    bench.run(*(bench.chunk(s[:-1], leases[i], request_id=i) for i, s in sequences.items()))
    _, logits = bench.run(
        *(bench.chunk(s, leases[i], len(s) - 1, request_id=i) for i, s in sequences.items())
    )
    for i, sequence in sequences.items():
        assert difference(logits[i], bench.expected(sequence)) < 1e-4, i


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_a_zeroed_page_is_noticed(name: str) -> None:
    """The negative control: the measure used everywhere here sees a single damaged page."""
    bench = Bench(name)
    prompt = tokens_of(7, 70)
    bench.run(bench.chunk(prompt, FakeLease([5, 2, 9, 1, 7])))
    for plane in bench.pools.device.planes:
        plane[2] = 0
    _, logits = bench.run(bench.chunk([*prompt, 9], FakeLease([5, 2, 9, 1, 7]), 70))
    assert difference(logits[1], bench.expected([*prompt, 9])) > 1e-2


def test_positions_of_the_tree_are_recomputed_but_never_written(bench: Bench) -> None:
    prompt = tokens_of(8, 64)
    lease = FakeLease([5, 2, 9, 1])
    bench.run(bench.chunk(prompt, lease))
    before = [plane.copy() for plane in bench.pools.device.planes]
    _, logits = bench.run(
        bench.chunk(prompt, FakeLease([5, 2, 9, 1], shared_tokens=64), 48, request_id=2)
    )
    for plane, kept in zip(bench.pools.device.planes, before, strict=True):
        assert np.array_equal(plane, kept)
    assert difference(logits[2], bench.expected(prompt)) < 1e-4


def test_what_recomputes_the_trees_positions_reads_the_trees_bytes() -> None:
    bench = Bench("llama")
    prompt = tokens_of(8, 64)
    bench.run(bench.chunk(prompt, FakeLease([5, 2, 9, 1])))
    for plane in bench.pools.device.planes:
        plane[1] = 0
    lease = FakeLease([5, 2, 9, 1], shared_tokens=64)
    _, logits = bench.run(bench.chunk(prompt, lease, 63))
    assert difference(logits[1], bench.expected(prompt)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_as_far_as_its_rounding_allows(dtype: torch.dtype) -> None:
    model = tiny_model("tiny-random-llama").to(dtype)
    bench = Bench(model=model)
    prompt = tokens_of(9, 70)
    _, logits = bench.run(bench.chunk(prompt, FakeLease([5, 2, 9, 1, 7])))
    assert bench.pools.spec.bytes_per_slot == 16 * 4 * 2 * 2 * 16 * 2
    assert difference(logits[1], bench.expected(prompt)) < 0.1


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "recurrent layers"),
        ("gemma2", {}, "soft-capped"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(
    architecture: str, settings: dict[str, object], why: str
) -> None:
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": 0,
            **settings,
        },
    )
    with pytest.raises(ModelError, match=why):
        ServedModel.of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def test_latents_of_multi_head_latent_attention_stay_compressed() -> None:
    shapes = Bench("deepseek_v3").pools.layout.planes[:2]
    assert [(p.heads, p.width) for p in shapes] == [(1, 16), (1, 8)]
