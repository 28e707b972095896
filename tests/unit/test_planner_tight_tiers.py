"""A replay of tiers that are too small for the traffic comes to an end, whatever its tiers hold."""

import pytest

from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.evaluate import Evaluation, Setting, evaluate
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.prompts import PromptKeys
from kvtiers.planner.search import Candidate
from kvtiers.types import Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, synthesise


@pytest.mark.timeout(120)
@pytest.mark.parametrize("retention", Retention)
@pytest.mark.parametrize("host_gib", [0.5, 1.0, 4.0])
def test_victims_that_want_the_same_room_on_host_come_to_an_end(
    retention: Retention, host_gib: float
) -> None:
    """With 1 GiB, exclusive, victims above held pages once took each other's copies for ever."""
    columns = TraceColumns.load(synthesise(SynthesisSpec(200)))
    model = MODELS["llama-3.1-8b"]
    setting = Setting(model, machine_of_table("h200", model, 1), page_tokens=16, speed=20.0)
    candidate = Candidate(2.0, host_gib, 8.0, WritePolicy.WRITE_BACK, retention)
    ended = evaluate(columns, PromptKeys(columns), setting, candidate, full=True)
    assert isinstance(ended, Evaluation)
    assert ended.outcome is not None
    requests = ended.outcome["requests"]
    assert requests["served"] + requests["refused"] == 200
