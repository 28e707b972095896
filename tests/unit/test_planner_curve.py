"""The curve against the plainest LRU cache there is, and what follows from its shape."""

import itertools
import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.errors import ConfigError, TraceError
from kvtiers.planner.columns import TraceColumns, previous_reference
from kvtiers.planner.curve import (
    DEFAULT_CAPACITIES_MIN,
    Definition,
    curve_of_positions,
    default_capacities,
    exact_curve,
    tier_shares,
)
from kvtiers.planner.dominance import count_earlier_smaller, sum_earlier_smaller
from kvtiers.planner.sample import sampled_curve
from kvtiers.planner.stack_distance import never, stack_positions
from kvtiers.planner.units import (
    GIB,
    CapacityScale,
    CapacityUnit,
    enough_text,
    parse_capacities,
    size_text,
)
from kvtiers.types import Retention, Tier
from kvtiers.workload import SynthesisSpec, TraceRequest, synthesise

BLOCK = 4


def requests_of(prompts: list[list[int]], tail_tokens: int = BLOCK) -> list[TraceRequest]:
    """Prompts given by block contents; ids name block and everything before it."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            arrival_seconds=float(i),
            input_tokens=BLOCK * (len(prompt) - 1) + tail_tokens,
            output_tokens=1,
            block_ids=np.array(
                [ids.setdefault(tuple(prompt[: k + 1]), len(ids)) for k in range(len(prompt))]
            ),
            block_tokens=BLOCK,
        )
        for i, prompt in enumerate(prompts)
    ]


def lru_hits(requests: list[TraceRequest], capacity: int) -> list[int]:
    """Hit blocks per request of one LRU cache, simulated block by block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        ids = request.block_ids.tolist()
        hits.append(sum(1 for _ in itertools.takewhile(cache.__contains__, ids)))
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


@given(prompts, st.integers(1, BLOCK))
@settings(max_examples=150, deadline=None)
def test_the_curve_equals_a_simulated_lru_cache_at_every_capacity(
    contents: list[list[int]], tail_tokens: int
) -> None:
    requests = requests_of(contents, tail_tokens)
    columns = TraceColumns.load(requests)
    columns.require_prefix_ids()
    positions = stack_positions(columns)
    curves = {d: curve_of_positions(columns, positions, d) for d in Definition}
    for capacity in range(1, columns.references + 2):
        hits = lru_hits(requests, capacity)
        tokens = [min(r.input_tokens, BLOCK * h) for r, h in zip(requests, hits, strict=True)]
        ratios = [t / r.input_tokens for t, r in zip(tokens, requests, strict=True)]
        expected = {
            Definition.BLOCKS: sum(hits) / columns.references,
            Definition.TOKENS: sum(tokens) / sum(r.input_tokens for r in requests),
            Definition.REQUESTS: sum(ratios) / len(requests),
            Definition.FULL_BLOCKS: sum(hits)
            / max(1, sum(r.input_tokens // BLOCK for r in requests)),
        }
        for definition, value in expected.items():
            assert curves[definition].hit_ratio(capacity) == pytest.approx(value)


@given(st.permutations(range(37)), st.data())
@settings(max_examples=50, deadline=None)
def test_dominance_counts_equal_counting_by_hand(order: list[int], data: st.DataObject) -> None:
    bounds = [data.draw(st.integers(0, i)) for i in range(len(order))]
    weights = np.linspace(0.5, 3.0, len(order))
    expected = [
        [j for j in range(bound) if order[j] < value]
        for value, bound in zip(order, bounds, strict=True)
    ]
    values, limits = np.array(order), np.array(bounds)
    assert count_earlier_smaller(values, limits).tolist() == [len(js) for js in expected]
    sums = sum_earlier_smaller(values, limits, weights)
    assert sums == pytest.approx([weights[js].sum() for js in expected])


@given(st.lists(st.integers(-3, 3), max_size=30), st.booleans())
def test_the_previous_reference_is_the_last_equal_one(ids: list[int], wide: bool) -> None:
    if wide:
        ids = [i << 60 for i in ids]
    expected = [max((j for j in range(i) if ids[j] == ids[i]), default=-1) for i in range(len(ids))]
    assert previous_reference(np.array(ids, np.int64)).tolist() == expected


def test_a_block_never_seen_has_no_position() -> None:
    columns = TraceColumns.load(requests_of([[1, 2], [1, 3]]))
    assert stack_positions(columns).tolist() == [never(columns)] * 2 + [1, never(columns)]


def test_a_prompt_is_looked_up_in_the_state_at_its_start() -> None:
    # one block fits: the head of the repeated prompt is there, whatever the prompt itself evicts
    curve = exact_curve(TraceColumns.load(requests_of([[1, 2, 3], [1, 2, 3]])), Definition.BLOCKS)
    assert [curve.hit_ratio(c) * 6 for c in range(5)] == pytest.approx([0, 1, 2, 3, 3])


def test_an_id_that_follows_another_block_than_before_is_refused() -> None:
    first, second = requests_of([[1, 2], [3, 4]])
    second.block_ids[1] = first.block_ids[1]
    columns = TraceColumns.load([first, second])
    with pytest.raises(TraceError, match="follows another block"):
        columns.require_prefix_ids()


def test_two_block_sizes_in_one_trace_are_refused() -> None:
    first = requests_of([[1]])[0]
    other = TraceRequest(1.0, 8, 1, np.array([9]), 8)
    with pytest.raises(TraceError, match="blocks of 8 tokens"):
        TraceColumns.load([first, other])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="no request"):
        TraceColumns.load([])


@pytest.fixture(scope="module")
def made_up() -> TraceColumns:
    return TraceColumns.load(synthesise(SynthesisSpec(1_500, seed=3, block_tokens=64)))


def test_doubling_a_capacity_never_lowers_the_curve(made_up: TraceColumns) -> None:
    curve = exact_curve(made_up)
    ratios = [curve.hit_ratio(2**k) for k in range(30)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == curve.ceiling


def test_the_capacity_for_a_ratio_is_the_smallest_that_reaches_it(made_up: TraceColumns) -> None:
    curve = exact_curve(made_up)
    for share in (0.1, 0.5, 0.9, 1.0):
        target = share * curve.ceiling
        blocks = curve.capacity_for(target)
        assert blocks is not None
        assert curve.hit_ratio(blocks) >= target - 1e-9
        assert curve.hit_ratio(blocks - 1) < target
    assert curve.capacity_for(curve.ceiling + 0.01) is None


def test_tiers_read_off_one_curve_add_up_to_their_joint_capacity(made_up: TraceColumns) -> None:
    curve = exact_curve(made_up)
    tiers = [(Tier.DEVICE, 300.0), (Tier.HOST, 900.0), (Tier.STORAGE, 500.0)]
    inclusive = tier_shares(curve, tiers, Retention.INCLUSIVE)
    exclusive = tier_shares(curve, tiers, Retention.EXCLUSIVE)
    assert sum(s.hit_ratio for s in inclusive) == pytest.approx(curve.hit_ratio(900))
    assert sum(s.hit_ratio for s in exclusive) == pytest.approx(curve.hit_ratio(1_700))
    assert inclusive[2].hit_ratio == 0  # an inclusive storage below the host's size adds nothing


def test_a_sampled_curve_lies_within_its_stated_error(made_up: TraceColumns) -> None:
    exact = exact_curve(made_up)
    for seed in range(3):
        sampled = sampled_curve(made_up, 0.3, seed=seed)
        assert sampled.sampled_references < made_up.references
        for blocks in (2_000, 8_000, 20_000, math.inf):
            error = abs(sampled.hit_ratio(blocks) - exact.hit_ratio(blocks))
            assert error <= 4 * sampled.standard_error(blocks) + 1e-3


def test_a_sample_of_everything_is_exact(made_up: TraceColumns) -> None:
    exact, sampled = exact_curve(made_up), sampled_curve(made_up, 1.0)
    assert sampled.hits == pytest.approx(exact.hits)
    assert sampled.standard_error(1_000) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, math.nan])
def test_an_impossible_sampling_rate_is_refused(made_up: TraceColumns, rate: float) -> None:
    with pytest.raises(ConfigError, match=r"\(0, 1\]"):
        sampled_curve(made_up, rate)


def test_capacities_convert_to_whole_blocks() -> None:
    assert CapacityScale(CapacityUnit.TOKENS, 16).blocks(100) == 6
    assert CapacityScale(CapacityUnit.BLOCKS, 16).blocks(100) == 100
    gib = CapacityScale(CapacityUnit.GIB, 512, kv_bytes_per_token=131_072)
    assert gib.blocks(1) == 16
    assert gib.capacity(16) == 1
    assert gib.blocks(math.inf) == math.inf
    with pytest.raises(ConfigError, match="--kv-bytes-per-token"):
        CapacityScale(CapacityUnit.GIB, 512)


def test_capacities_are_parsed_in_the_order_given() -> None:
    assert parse_capacities("1_000, 2e3,inf") == [1000.0, 2000.0, math.inf]
    for wrong in ("", "1,,2", "-1", "many", "nan"):
        with pytest.raises(ConfigError, match="is not a number"):
            parse_capacities(wrong)


def test_default_capacities_span_the_rise_of_the_curve(made_up: TraceColumns) -> None:
    curve = exact_curve(made_up)
    capacities = default_capacities(curve, units_per_block=64)
    assert capacities == sorted(capacities)
    assert capacities[-1] == math.inf
    assert all(c <= 64 * curve.saturated_at_blocks for c in capacities[:-1])


@pytest.mark.parametrize("requests", [4, 8, 30])
def test_a_tiny_trace_gets_capacities_of_its_own_size(requests: int) -> None:
    spec = SynthesisSpec(requests, seed=1, block_tokens=512, chat=1, agent=0, rag=0)
    turns = list(synthesise(spec))
    curve = exact_curve(TraceColumns.load([*turns, *turns]))
    capacities = default_capacities(curve, units_per_block=512)
    assert min(DEFAULT_CAPACITIES_MIN, curve.saturated_at_blocks) < len(capacities) < 20
    assert all(curve.hit_ratio(c / 512) > 0 for c in capacities)


def test_a_trace_without_reuse_has_one_capacity() -> None:
    curve = exact_curve(TraceColumns.load(list(synthesise(SynthesisSpec(1)))))
    assert default_capacities(curve, units_per_block=16) == [math.inf]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (23_040, "22.5 KiB"),
        (92_160_000, "87.9 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (4096 * GIB, "4,096 GiB"),
        (math.inf, "inf"),
    ],
)
def test_sizes_are_told_in_the_largest_unit_of_which_there_is_one(
    size_bytes: float, text: str
) -> None:
    assert size_text(size_bytes) == text


def test_what_is_enough_is_never_rounded_down() -> None:
    assert [enough_text(v) for v in (0.001953125, 2.0, 63.01)] == ["0.00196", "2", "63.1"]
