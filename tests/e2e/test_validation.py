"""A real server under eight clients, and the replay of what it recorded, with a tiny model.

The tiers are so sized that what a prompt finds does not hang on a millisecond: the device is too
small for all conversations, the host holds everything, and clients pause longer than a tiny model
computes. What then is left to differ is which of two copies of a page a hit was booked to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import Experiment
from kvtiers.testing.tiny_models import save_tiny_model
from kvtiers.validation.run import Validation, judge, measure
from kvtiers.validation.settings import Settings
from kvtiers.validation.workload import WorkloadShape

pytest.importorskip("torch", reason="needs kvtiers[serve]")

SHAPE = WorkloadShape(
    clients=8,
    conversations=2,
    turns=2,
    pause_seconds=0.5,
    answer_tokens_max=8,
    text_characters_max=300,
)


class _Silent:
    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, int]] = {}

    def begin(self, what: str, total: int) -> Callable[[], None]:
        self.parts[what] = (0, total)

        def done() -> None:
            seen, _ = self.parts[what]
            self.parts[what] = (seen + 1, total)

        return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, _Silent]:
    """A measured run: two servers are started, one is calibrated, one is recorded."""
    directory = tmp_path_factory.mktemp("validation")
    save_tiny_model("tiny-random-llama", directory / "model")
    settings = Settings(model=str(directory / "model"), device_pages=256, host_pages=2048)
    stages = _Silent()
    experiment = Experiment(lengths=(16, 64, 256), vocab_tokens=200, repeats=1, flush=True)
    measure(settings, SHAPE, directory, stages, experiment)
    return directory, stages


@pytest.fixture(scope="module")
def judged(run: tuple[Path, _Silent]) -> Validation:
    directory, stages = run
    return judge(directory, 0.07, stages)


def test_every_stage_is_told_to_its_end(run: tuple[Path, _Silent], judged: Validation) -> None:
    _, stages = run
    assert len(stages.parts) == 6
    for what, (seen, total) in stages.parts.items():
        assert seen == total, what


def test_both_sides_saw_the_same_prompts(judged: Validation) -> None:
    assert judged.comparison.requests == SHAPE.requests == len(judged.replayed.requests)
    live, replayed = (
        sum(getattr(row, side) for row in judged.comparison.hits) for side in ("live", "replayed")
    )
    assert live == replayed == judged.comparison.prompt_tokens
    assert judged.live.balanced
    assert judged.live.concurrent_max > 1


def test_what_was_computed_agrees_and_hits_came_from_the_same_tiers(judged: Validation) -> None:
    """With a host that holds everything, what is computed hangs on the order of arrivals alone.

    Which tier a hit came from may differ for a prompt that arrives in the very step that evicts it;
    one of these 32 prompts is 3 % of all tokens.
    """
    comparison = judged.comparison
    rows = {row.name: row for row in comparison.hits}
    assert rows["device"].live > 0
    assert rows["host"].live > 0
    assert rows["storage"].live == rows["storage"].replayed == 0, "host has it all"
    assert abs(comparison.share(rows["computed"])) <= 0.02
    assert abs(comparison.share(rows["host"])) <= 0.07
    assert comparison.equal_splits >= SHAPE.requests - 4


def test_a_kept_run_is_judged_again_by_the_command(run: tuple[Path, _Silent]) -> None:
    directory, _ = run
    words = ["validate", "--again", str(directory), "--json"]
    found = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    document = json.loads(found.stdout)
    assert found.exit_code == (0 if document["passed"] else 1)
    assert document["requests"] == SHAPE.requests
    assert document["calibration"]["links"]["storage_read"]["bytes_per_second"] > 0

    # The same run on tiers that it did not have must be seen to differ.
    live = json.loads((directory / "live.json").read_text())
    live["settings"]["host_pages"] = 4
    (directory / "other").mkdir()
    (directory / "other" / "live.json").write_text(json.dumps(live))
    for name in ("trace.jsonl", "calibration.json"):
        (directory / "other" / name).write_bytes((directory / name).read_bytes())
    words = ["validate", "--again", str(directory / "other")]
    found = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    assert found.exit_code == 1
    assert "DIFFER" in found.stdout


def test_a_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"live\.json: cannot be read: No such file"):
        judge(tmp_path, 0.02, _Silent())
    for damaged in ("", "[]", "{}", '{"kvtiers_validation": 1, "run": {}}'):
        (tmp_path / "live.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"live\.json: is no record of a validation"):
            judge(tmp_path, 0.02, _Silent())
