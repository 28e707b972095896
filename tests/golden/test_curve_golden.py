"""The published answers on the public Mooncake trace, through the command line a user types."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, exact_curve
from kvtiers.workload import open_trace

_DATA = Path(os.environ.get("KVTIERS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
TRACE = _DATA / "mooncake_conversation.jsonl"

pytestmark = pytest.mark.skipif(
    not TRACE.exists(), reason=f"the public trace is not at {TRACE} (set KVTIERS_DATA)"
)

KNOWN = {
    1_000: 4.45,
    2_000: 5.43,
    5_000: 11.18,
    10_000: 21.16,
    20_000: 28.78,
    30_000: 32.57,
    50_000: 35.46,
    100_000: 36.37,
    "inf": 36.64,
}


def test_curve_prints_the_nine_known_block_hit_ratios() -> None:
    capacities = ",".join(str(c) for c in KNOWN)
    result = CliRunner().invoke(
        build(["curve"]),
        f"curve {TRACE} --definition blocks --unit blocks --capacities {capacities} --json",
        catch_exceptions=False,
    )
    document = json.loads(result.stdout)
    assert list(document) == ["definition", "unit", "denominator", "points"]
    assert (document["definition"], document["unit"]) == ("blocks", "blocks")
    assert document["denominator"] == 288_500
    found = {p["capacity"]: round(100 * p["hit_ratio"], 2) for p in document["points"]}
    assert found == KNOWN


@pytest.mark.parametrize(
    ("definition", "percent"),
    [
        (Definition.BLOCKS, 36.64),
        (Definition.TOKENS, 37.36),
        (Definition.FULL_BLOCKS, 38.23),
        (Definition.REQUESTS, 40.94),
    ],
)
def test_each_definition_gives_its_own_known_ceiling(
    definition: Definition, percent: float
) -> None:
    curve = exact_curve(TraceColumns.load(open_trace(TRACE)), definition)
    assert round(100 * curve.ceiling, 2) == percent
