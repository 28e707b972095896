"""Both sides of a validation are configured alike, and its workload is what it claims to be."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs kvtiers[serve]")

from typer.main import get_command  # noqa: E402

from kvtiers.cli import build  # noqa: E402
from kvtiers.engine.config import EngineConfig  # noqa: E402
from kvtiers.engine.engine import LLMEngine  # noqa: E402
from kvtiers.errors import ConfigError  # noqa: E402
from kvtiers.planner.machines import machine_of_table  # noqa: E402
from kvtiers.planner.models import MODELS  # noqa: E402
from kvtiers.testing.tiny_models import save_tiny_model  # noqa: E402
from kvtiers.types import PrefetchPolicy, Retention, WritePolicy  # noqa: E402
from kvtiers.validation.settings import Settings  # noqa: E402
from kvtiers.validation.workload import WorkloadShape, clients_of  # noqa: E402

SHAPE = WorkloadShape(pause_seconds=5.0)
MACHINE = machine_of_table("h200", MODELS["llama-3.1-8b"])


def _engine_config(settings: Settings, directory: Path) -> EngineConfig:
    """What `kvtiers serve` makes of a validation's arguments."""
    arguments = settings.server_arguments(directory / "storage")
    context = get_command(build(["serve"])).commands["serve"].make_context("serve", arguments)  # type: ignore[attr-defined]
    given = {name: value for name, value in context.params.items() if value is not None}
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(
        **{name: value for name, value in given.items() if name in known},
        storage_dir=given.get("storage"),
    )


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            write_policy=WritePolicy.WRITE_BACK,
            retention=Retention.EXCLUSIVE,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            storage=False,
            max_batch_tokens=512,
        ),
    ],
    ids=["default", "write_back"],
)
def test_a_replay_has_the_cache_and_the_scheduler_of_the_server(
    settings: Settings, tmp_path: Path
) -> None:
    save_tiny_model("tiny-random-llama", tmp_path / "model")
    settings = Settings.from_dict({**settings.to_dict(), "model": str(tmp_path / "model")})
    engine = LLMEngine.load(_engine_config(settings, tmp_path))
    try:
        replayed = settings.replay_config(engine.kv_bytes_per_token, MACHINE)
        assert replayed.cache == engine.parts.cache.config
        live = engine.parts.scheduler._config
        for field in fields(live):
            if field.name not in ("eos_token_ids", "repeat_max"):
                assert getattr(replayed.scheduler, field.name) == getattr(live, field.name)
    finally:
        engine.stop()


def test_settings_survive_a_file() -> None:
    settings = Settings(retention=Retention.EXCLUSIVE, write_policy=WritePolicy.WRITE_BACK)
    assert Settings.from_dict(settings.to_dict()) == settings
    with pytest.raises(ConfigError, match="no settings of a validation"):
        Settings.from_dict({"model": "m"})


def test_the_workload_is_the_same_for_the_same_seed() -> None:
    shape = SHAPE
    one, other = clients_of(shape), clients_of(shape)
    assert [c.visits for c in one] == [c.visits for c in other]
    assert [c.visits for c in one] != [c.visits for c in clients_of(replace(SHAPE, seed=2))]
    assert sum(len(c.visits) for c in one) == shape.requests


def test_a_slower_machine_is_asked_less_often_and_a_given_pause_is_kept() -> None:
    cost = MACHINE.cost
    factors = (1, 8, 16, 1_000)
    pauses = [WorkloadShape().paced(cost.times(factor)).pause_seconds for factor in factors]
    assert (pauses[0], pauses[3]) == (1.0, 10.0), "the least and the most"
    assert pauses[1] is not None
    assert pauses[2] == pytest.approx(2 * pauses[1])
    assert SHAPE.paced(cost.times(60)) == SHAPE
    with pytest.raises(ConfigError, match="needs its pause"):
        clients_of(WorkloadShape())


def test_conversations_share_system_prompts_and_texts_and_nothing_else() -> None:
    firsts = [
        "".join(message["content"] for message in conversation.ask())
        for client in clients_of(SHAPE)
        for conversation in client.conversations
    ]
    systems = {client.conversations[0].messages[0]["content"] for client in clients_of(SHAPE)}
    assert len(systems) == 2
    shared = [len(_common(one, other)) for one, other in itertools.combinations(firsts, 2)]
    longest_system = max(map(len, systems))
    assert any(characters > longest_system + 1_000 for characters in shared), "a text is shared"
    assert len(set(firsts)) > len(firsts) / 2, "most ask something of their own"


def test_a_conversation_goes_on_from_the_answers() -> None:
    conversation = clients_of(SHAPE)[0].conversations[0]
    first = conversation.ask()
    conversation.hear("It was lit in 1871.")
    second = conversation.ask()
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": "It was lit in 1871."}
    assert len(second[-1]["content"]) < 100, "the text is sent once"


def _common(one: str, other: str) -> str:
    return "".join(a for a, _ in itertools.takewhile(lambda p: p[0] == p[1], zip(one, other)))  # noqa: B905
