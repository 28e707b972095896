"""What `kvtiers validate` refuses before it starts a server, and in which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs kvtiers[serve]")

from typer.testing import CliRunner, Result

from kvtiers.cli import build
from kvtiers.errors import ConfigError, KvtiersError
from kvtiers.testing.tiny_models import save_tiny_model
from kvtiers.validation import run
from kvtiers.validation.preflight import RUN_FILES, check_workload
from kvtiers.validation.settings import Settings
from kvtiers.validation.workload import WorkloadShape

SHORT = WorkloadShape(turns=1, text_characters_max=100, answer_tokens_max=8)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(run, "ServerProcess", refuse)


def _validate(*words: str) -> Result:
    return CliRunner().invoke(build(["validate"]), ["validate", *words])


def _refusal(*words: str) -> str:
    found = _validate(*words)
    assert isinstance(found.exception, KvtiersError), found.output
    return str(found.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pause-seconds", "nan"], "--pause-seconds is nan; it must be a finite number"),
        (["--pause-seconds", "inf"], "--pause-seconds is inf; it must be a finite number"),
        (["--tolerance", "nan"], "--tolerance is nan; it lies in 0..1"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--clients", "0", "--turns", "-2"], "--clients is 0; it must be at least 1; --turns is"),
        (["--device-pages", "0"], "--device-pages is 0; it must be at least 1"),
        (["--device-pages", "10"], "--device-pages 10 hold 160 tokens"),
        (["--host-pages", "-1"], "--host-pages is -1; it must be at least 0"),
        (["--host-pages", "0"], "--host-pages is 0 and what goes to and from --storage"),
        (["no-such-model"], "unknown model 'no-such-model'"),
        (["/no/such/model"], "is not a directory"),
        (["--keep", "a", "--again", "b"], "--keep and --again contradict each other"),
    ],
)
def test_options_that_cannot_work_are_told_at_once(words: list[str], said: str) -> None:
    assert said in _refusal(*words)


def test_a_place_that_cannot_take_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "File exists" in _refusal("--keep", str(tmp_path / "file"))
    assert "Not a directory" in _refusal("--keep", str(tmp_path / "file" / "below"))
    (tmp_path / "live.json").touch()
    assert "holds a run already" in _refusal("--keep", str(tmp_path))


def test_a_place_without_a_whole_run_is_not_judged(tmp_path: Path) -> None:
    assert "there is no such directory" in _refusal("--again", str(tmp_path / "missing"))
    (tmp_path / RUN_FILES[0]).touch()
    said = _refusal("--again", str(tmp_path))
    assert "holds no whole run (calibration.json, live.json missing)" in said


def test_conversations_that_do_not_fit_are_told_by_their_length(tmp_path: Path) -> None:
    save_tiny_model("tiny-random-llama", tmp_path / "model")
    settings = Settings(model=str(tmp_path / "model"))
    check_workload(settings, SHORT)
    with pytest.raises(ConfigError, match="the context of a validation is 2048: ask fewer --turns"):
        check_workload(settings, WorkloadShape(turns=1))  # whole texts, a token per byte
    with pytest.raises(ConfigError, match="--device-pages 8 hold 128 tokens"):
        check_workload(replace(settings, device_pages=8), SHORT)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    save_tiny_model("tiny-random-llama", tmp_path / "model")
    for template in (tmp_path / "model").glob("chat_template*"):
        template.unlink()
    configuration = tmp_path / "model" / "tokenizer_config.json"
    configuration.write_text(configuration.read_text().replace('"chat_template"', '"none"'))
    with pytest.raises(ConfigError, match="has no chat template"):
        check_workload(Settings(model=str(tmp_path / "model")), SHORT)
