"""`kvtiers serve --record`: what a live server was asked, read back and replayed by the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import RunningServer, StartServer
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.workload import open_trace

PAGE_TOKENS = 16
SYSTEM = "You are the librarian of a very small town, and every book in it is known to you. " * 4
QUESTIONS = ("Where is the atlas?", "Who borrowed the dictionary?", "Is there any poetry at all?")


def _ask(server: RunningServer, prompt: str, **more: Any) -> int:
    """Ask; the prompt tokens that were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens_details"].values())


def _planner(line: str) -> dict[str, Any]:
    words = line.split()
    found = CliRunner().invoke(build(words[:1]), words, catch_exceptions=False)
    return json.loads(found.stdout)


def test_a_recorded_run_is_replayed_to_the_hits_that_the_server_measured(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.jsonl"
    monkeypatch.setenv("KVTIERS_RECORD", str(path))
    server = start_server()
    prompts = [SYSTEM + question for question in QUESTIONS]
    prompts.append(prompts[0] + " And, while we are at it, where are all the other maps kept?")
    live_hits = [_ask(server, prompt) for prompt in prompts]
    live_hits.append(_ask(server, prompts[0], cache_salt="another town"))
    refused = {"model": "tiny", "prompt": SYSTEM * 9, "max_tokens": 4}
    assert server.http.post("/v1/completions", json=refused).status_code == 400
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": "stop me",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        },
    ) as response:
        next(response.iter_lines())
    server.wait_until_quiet()
    assert server.terminate() == 0
    assert f"recorded 6 requests in {path}, left out 0" in server.log()

    text = path.read_text()
    assert "librarian" not in text
    assert '"prompt"' not in text
    *asked, left = open_trace(path)
    assert [r.input_tokens for r in asked] == [len(p) for p in [*prompts, prompts[0]]]
    assert [r.output_tokens for r in asked] == [4] * 5
    assert 1 <= left.output_tokens < 900
    assert [r.arrival_seconds for r in asked] == sorted(r.arrival_seconds for r in asked)
    assert live_hits[0] == 0
    assert all(live_hits[1:4])
    assert live_hits[4] == 0
    for request, hits in zip(asked, live_hits, strict=True):
        measured = request.measured
        assert measured is not None
        assert measured.device_hit + measured.host_hit + measured.storage_hit == hits

    # No prompt is asked twice under one salt, so that whole pages are all that can be found, and
    # these tiers hold everything: curve, logical replay and live server must agree to the token.
    tokens = sum(live_hits)
    curve = _planner(f"curve {path} --capacities inf --json")
    assert curve["denominator"] == sum(r.input_tokens for r in [*asked, left])
    assert curve["points"][0]["hit_ratio"] * curve["denominator"] == pytest.approx(tokens)
    logical = _planner(f"replay {path} --logical --device 96 --host 256 --json")
    assert logical["hit_blocks"]["device"] * PAGE_TOKENS == tokens
    in_time = _planner(
        f"replay {path} --device 96 --host 256 --unit blocks --page-tokens 16 "
        "--model llama-3.1-8b --json"
    )
    assert sum(in_time["hits"]["tokens"][tier] for tier in ("device", "host", "storage")) == tokens


def test_a_bad_path_is_refused_at_once_with_the_way_out(
    start_server: StartServer, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"cannot record to .*: No such file or directory"):
        start_server("--record", str(tmp_path / "missing" / "live.jsonl"))
