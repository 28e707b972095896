"""The speed of the machine during a run is found from times between tokens, and from nothing else.

The trace is recorded from a replay, on a machine that is slower than the one the search starts at.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.machines import Machine, machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.replay import ReplayResult, replay
from kvtiers.validation.run import at_the_speed_of
from kvtiers.validation.settings import Settings
from kvtiers.workload import Measured, SynthesisSpec, TraceRequest, synthesise

MODEL = MODELS["llama-3.1-8b"]
MACHINE = machine_of_table("a10", MODEL)
SETTINGS = Settings(device_pages=4_000, host_pages=8_000, context_tokens=32_768)


def _replayed(requests: list[TraceRequest], machine: Machine) -> ReplayResult:
    config = SETTINGS.replay_config(MODEL.kv_bytes_per_token, machine)
    return replay(TraceColumns.load(requests), config)


def _slower(factor: float) -> Machine:
    return replace(MACHINE, cost=MACHINE.cost.times(factor))


def _recorded(factor: float) -> list[TraceRequest]:
    """What a machine that is slower by `factor` would have recorded."""
    spec = SynthesisSpec(40, seed=3, block_tokens=16, sessions_per_second=0.2)
    requests = list(synthesise(spec))
    served = sorted(_replayed(requests, _slower(factor)).requests, key=lambda each: each.number)
    return [
        replace(
            request,
            measured=Measured(*end.split[:4], end.ttft_seconds, end.e2e_seconds),
        )
        for request, end in zip(requests, served, strict=True)
        if end.split is not None
    ]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_the_speed_of_the_run_is_found_again(factor: float) -> None:
    requests = _recorded(factor)
    assert len(requests) == 40
    found, result = at_the_speed_of(
        requests,
        _replayed(requests, MACHINE),
        lambda slowness: _replayed(requests, _slower(slowness)),
    )
    assert found == pytest.approx(factor, rel=0.05)
    live = np.median([r.measured.ttft_seconds for r in requests if r.measured])
    replayed = np.median([r.ttft_seconds for r in result.requests])
    assert replayed == pytest.approx(live, rel=0.1)


def test_a_run_of_single_tokens_tells_no_speed() -> None:
    requests = [replace(r, output_tokens=1, output_block_ids=None) for r in _recorded(1.0)]
    result = _replayed(requests, MACHINE)
    assert at_the_speed_of(requests, result, lambda _: pytest.fail("nothing to look for")) == (
        1.0,
        result,
    )


def test_all_costs_of_a_slower_machine_are_that_much_larger() -> None:
    cost = replace(MACHINE.cost, single_seconds=0.02)
    twice = cost.times(2.0)
    for tokens, pairs, context in ((1, 500, 500), (8, 4_000, 4_000), (512, 131_072, 0)):
        assert twice.seconds(tokens, pairs, context) == pytest.approx(
            2 * cost.seconds(tokens, pairs, context)
        )
    assert MACHINE.cost.times(3.0).single_seconds is None
