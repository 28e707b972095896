"""What a batch may suffer: each failure is a result of the chunk concerned, and of no other."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_bench import Bench, FakeLease, difference, tokens_of  # noqa: E402

from kvtiers.scheduling.executor import Batch, SamplingParams  # noqa: E402

A, B, C = tokens_of(1, 40), tokens_of(2, 35), tokens_of(3, 50)
LEASES = {1: FakeLease([0, 1, 2]), 2: FakeLease([3, 4, 5]), 3: FakeLease([6, 7, 8, 9])}
PROMPTS = {1: A, 2: B, 3: C}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def chunks_of(bench: Bench, **leases: FakeLease) -> list:
    return [
        bench.chunk(prompt, leases.get(f"lease_{i}", LEASES[i]), request_id=i)
        for i, prompt in PROMPTS.items()
    ]


def assert_exact(bench: Bench, logits: dict[int, np.ndarray], *request_ids: int) -> None:
    for request_id in request_ids:
        assert difference(logits[request_id], bench.expected(PROMPTS[request_id])) < 1e-4


def break_forward(bench: Bench, monkeypatch: pytest.MonkeyPatch, when, error: Exception) -> list:
    """Make the model raise `error` whenever `when(number of positions)`; returns all calls."""
    calls: list[int] = []
    inner = bench.model.model.forward

    def forward(*args: object, **kwargs: object) -> object:
        calls.append(kwargs["input_ids"].shape[1])
        if when(kwargs["input_ids"]):
            raise error
        return inner(*args, **kwargs)

    monkeypatch.setattr(bench.model.model, "forward", forward)
    return calls


def test_results_stand_where_their_chunks_stood(bench: Bench) -> None:
    """The executor packs decodes by length; results come back in the order of the batch."""
    bench.run(*(bench.chunk(p[:-1], LEASES[i], request_id=i) for i, p in PROMPTS.items()))
    result, _ = bench.run(
        bench.chunk(A, LEASES[1], len(A) - 1, request_id=1),
        bench.chunk(B, LEASES[2], 0, 20, request_id=2, sample=False),
        bench.chunk(C, LEASES[3], len(C) - 1, request_id=3),
    )
    tokens = [r.token if r else None for r in result.results]
    assert tokens == [bench.expected(A).argmax(), None, bench.expected(C).argmax()]


def test_a_forward_that_raises_for_one_sequence_fails_that_one_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = B[7]
    assert poison not in A + C
    break_forward(bench, monkeypatch, lambda ids: bool((ids == poison).any()), ValueError("bad"))
    result, logits = bench.run(*chunks_of(bench))
    assert set(result.failed) == {1}
    assert "ValueError: bad" in result.failed[1]
    assert result.results[1] is None
    assert_exact(bench, logits, 1, 3)


def test_a_batch_that_does_not_fit_into_memory_is_computed_in_parts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("no room")
    break_forward(bench, monkeypatch, lambda ids: ids.shape[1] > 60, error)
    result, logits = bench.run(*chunks_of(bench))
    assert not result.failed
    assert_exact(bench, logits, 1, 2, 3)


def test_a_model_that_always_raises_fails_every_chunk_and_nothing_escapes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_forward(bench, monkeypatch, lambda ids: True, RuntimeError("broken"))
    result, _ = bench.run(*chunks_of(bench))
    assert set(result.failed) == {0, 1, 2}
    assert list(result.results) == [None, None, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_kv_fails_the_sequence_that_reads_it_alone(bench: Bench, value: float) -> None:
    bench.run(*(bench.chunk(p[:-1], LEASES[i], request_id=i) for i, p in PROMPTS.items()))
    key_plane = bench.pools.planes[1][0]
    key_plane[4 * 16 : 5 * 16] = value  # slot 4 belongs to request 2
    result, logits = bench.run(
        *(bench.chunk(p, LEASES[i], len(p) - 1, request_id=i) for i, p in PROMPTS.items())
    )
    assert set(result.failed) == {1}
    assert "NaN or infinity" in result.failed[1]
    assert_exact(bench, logits, 1, 3)


def test_nan_in_a_chunk_that_samples_nothing_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a chunk publishes pages: they must not hold NaN although no token was chosen."""
    with torch.no_grad():
        bench.model.model.embed_tokens.weight[B[3]] = float("nan")
    result, logits = bench.run(
        bench.chunk(A, LEASES[1], request_id=1),
        bench.chunk(B, LEASES[2], 0, 10, request_id=2, sample=False),
    )
    assert set(result.failed) == {1}
    assert_exact(bench, logits, 1)


def test_nan_left_in_free_slots_never_reaches_another_sequence(bench: Bench) -> None:
    """Rows of a page that its owner has not written yet hold whatever was there before."""
    for planes in bench.pools.planes.values():
        for plane in planes:
            plane.fill_(float("nan"))
    result, logits = bench.run(*chunks_of(bench))
    assert not result.failed
    result, _ = bench.run(
        *(bench.chunk([*p, 9], LEASES[i], len(p), request_id=i) for i, p in PROMPTS.items())
    )
    assert not result.failed
    assert_exact(bench, logits, 1, 2, 3)


def test_every_layer_of_a_load_is_waited_for_before_it_is_read(bench: Bench) -> None:
    bench.run(bench.chunk(A, FakeLease([0, 1, 2], load_ops=(11,))), load_ops=(11, 12))
    layers = bench.model.config.num_hidden_layers
    assert bench.loads.waited == [((11, 12), layer) for layer in range(layers)]


def test_a_batch_without_loads_waits_for_nothing(bench: Bench) -> None:
    result, _ = bench.run(*chunks_of(bench))
    assert bench.loads.waited == []
    assert result.stall_seconds == 0


def test_a_load_that_fails_fails_those_who_rely_on_it_and_nobody_else(bench: Bench) -> None:
    bench.loads.failing = {12}
    result, logits = bench.run(
        *chunks_of(
            bench,
            lease_1=FakeLease([0, 1, 2], load_ops=(11,)),
            lease_2=FakeLease([3, 4, 5], load_ops=(12,)),
        ),
        load_ops=(11, 12),
    )
    assert set(result.failed) == {1}
    assert "load-back" in result.failed[1]
    assert_exact(bench, logits, 1, 3)


def test_a_load_is_waited_for_although_another_one_fails(bench: Bench) -> None:
    bench.loads.failing, bench.loads.slow = {12}, {11}
    result, logits = bench.run(
        *chunks_of(
            bench,
            lease_1=FakeLease([0, 1, 2], load_ops=(11,)),
            lease_2=FakeLease([3, 4, 5], load_ops=(12,)),
        ),
        load_ops=(11, 12),
    )
    assert set(result.failed) == {1}
    assert_exact(bench, logits, 1, 3)


def test_a_failed_load_is_waited_for_once_and_not_in_every_layer(bench: Bench) -> None:
    bench.loads.failing = {12}
    bench.run(bench.chunk(A, FakeLease([0, 1, 2], load_ops=(12,))), load_ops=(12,))
    assert len(bench.loads.waited) == 2


def test_a_sampled_token_does_not_depend_on_the_batch(bench: Bench) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    alone = bench.executor.run(Batch((bench.chunk(A, LEASES[1], params=params),)))
    together = bench.executor.run(
        Batch((*chunks_of(bench)[1:], bench.chunk(A, LEASES[1], params=params)))
    )
    assert alone.results[0].token == together.results[2].token


def test_the_pass_is_timed(bench: Bench) -> None:
    result, _ = bench.run(*chunks_of(bench))
    assert result.seconds > 0
