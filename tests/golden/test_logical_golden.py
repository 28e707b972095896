"""The real cache on the public trace, without time: the same nine ratios, and tiers that add up."""

import os
from pathlib import Path

import pytest

from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, HitCurve, exact_curve
from kvtiers.planner.logical import replay_logically
from kvtiers.planner.prompts import PromptKeys
from kvtiers.types import CacheConfig, Retention, WritePolicy
from kvtiers.workload import open_trace

_DATA = Path(os.environ.get("KVTIERS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
TRACE = _DATA / "mooncake_conversation.jsonl"

pytestmark = pytest.mark.skipif(
    not TRACE.exists(), reason=f"the public trace is not at {TRACE} (set KVTIERS_DATA)"
)


@pytest.fixture(scope="module")
def columns() -> TraceColumns:
    return TraceColumns.load(open_trace(TRACE))


@pytest.fixture(scope="module")
def curve(columns: TraceColumns) -> HitCurve:
    return exact_curve(columns, Definition.BLOCKS)


@pytest.fixture(scope="module")
def keys(columns: TraceColumns) -> PromptKeys:
    return PromptKeys(columns)


@pytest.mark.parametrize(
    ("blocks", "percent"),
    [
        (1_000, 4.45),
        (2_000, 5.43),
        (5_000, 11.18),
        (10_000, 21.16),
        (20_000, 28.78),
        (30_000, 32.57),
        (50_000, 35.46),
        (100_000, 36.37),
        (300_000, 36.64),
    ],
)
def test_one_lru_tier_gives_the_known_ratio_and_equals_the_curve(
    columns: TraceColumns, curve: HitCurve, keys: PromptKeys, blocks: int, percent: float
) -> None:
    result = replay_logically(columns, CacheConfig(device_pages=blocks), keys=keys)
    assert result.refused_requests == 0
    assert round(100 * result.hit_ratio, 2) == percent
    assert result.hit_ratio == pytest.approx(curve.hit_ratio(blocks), abs=1e-12)


def test_two_inclusive_tiers_equal_the_curve_at_the_larger(
    columns: TraceColumns, curve: HitCurve, keys: PromptKeys
) -> None:
    config = CacheConfig(device_pages=1_000, host_pages=5_000)
    result = replay_logically(columns, config, keys=keys)
    assert result.hit_ratio == pytest.approx(curve.hit_ratio(5_000), abs=1e-12)


def test_two_exclusive_tiers_equal_the_curve_at_the_sum_but_for_staging(
    columns: TraceColumns, curve: HitCurve, keys: PromptKeys
) -> None:
    config = CacheConfig(
        device_pages=2_000,
        host_pages=8_000,
        write_policy=WritePolicy.WRITE_BACK,
        retention=Retention.EXCLUSIVE,
    )
    result = replay_logically(columns, config, keys=keys)
    one_prompt = int(columns.blocks_per_request.max())
    low, high = (curve.hit_ratio(10_000 + d) for d in (-one_prompt, one_prompt))
    assert low <= result.hit_ratio <= high
