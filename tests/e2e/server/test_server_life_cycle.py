"""Start, disconnects, drain, restart, kill: what a server keeps and what it lets go."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from conftest import RunningServer, StartServer
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 900, "ignore_eos": True}


def _wait_for(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.02)


def test_it_says_what_it_decided_and_warns_of_a_useless_tier(start_server: StartServer) -> None:
    server = start_server("--host-pages", "90")
    log = server.log()
    assert "kv       256 bytes per token, pages of 16 tokens" in log
    assert "device   1,536 tokens (96 pages" in log
    assert "warning: the host tier (1440 tokens) is not larger than the device tier" in log


def test_every_option_can_be_given_by_environment(start_server: StartServer, monkeypatch) -> None:
    monkeypatch.setenv("KVTIERS_WRITE_POLICY", "write_back")
    monkeypatch.setenv("KVTIERS_RETENTION", "exclusive")
    server = start_server()
    policies = server.state()["policies"]
    assert (policies["write_policy"], policies["retention"]) == ("write_back", "exclusive")


@pytest.mark.parametrize("name", ["KVTIERS_API_KEY", "KVTIERS_ADMIN_KEY"])
def test_a_key_that_is_set_and_empty_is_not_taken_for_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    found = CliRunner().invoke(build(["serve"]), ["serve", "no-such-model"])
    assert isinstance(found.exception, ConfigError)
    assert f"{name} is set and empty" in str(found.exception)


def test_a_client_that_leaves_a_stream_ends_its_request(server: RunningServer) -> None:
    made_before = _generated_tokens(server)
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    _wait_for(lambda: server.state()["running_requests"] == 0)
    assert _generated_tokens(server) - made_before < LONG["max_tokens"]
    assert server.ledger()["balanced"]


def test_a_client_that_gives_up_waiting_ends_its_request(server: RunningServer) -> None:
    made_before = _generated_tokens(server)
    try:
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.3)
    except httpx.TimeoutException:
        pass
    _wait_for(lambda: server.state()["running_requests"] == 0)
    assert _generated_tokens(server) - made_before < LONG["max_tokens"]


def _generated_tokens(server: RunningServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("sglang:generation_tokens_total{")
    )


def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_0(
    start_server: StartServer,
) -> None:
    server = start_server()
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
        )
    )
    asking.start()
    _wait_for(lambda: server.state()["running_requests"] == 1)
    server.child.send_signal(signal.SIGTERM)
    _wait_for(lambda: server.http.get("/ready").status_code == 503)
    assert server.http.get("/health").json() == {"status": "draining"}
    late = server.http.post("/v1/completions", json={**LONG, "max_tokens": 1})
    assert late.status_code == 503
    asking.join(60)
    assert server.child.wait(60) == 0
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_a_drain_that_is_too_short_says_so_and_exits_1(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "0")
    asking = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
    )
    asking.start()
    _wait_for(lambda: server.state()["running_requests"] == 1)
    assert server.terminate() == 1
    asking.join(60)
    assert "a larger --drain-seconds lets them end" in server.log()


def test_what_was_acknowledged_as_stored_survives_sigkill(
    start_server: StartServer, tmp_path: Path
) -> None:
    prompt = "These words were stored before the process was killed without any warning. " * 3
    arguments = ("--storage", str(tmp_path / "storage"), "--prefetch-policy", "wait_complete")
    server = start_server(*arguments)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    server.http.post("/v1/completions", json=body).raise_for_status()
    stored = server.wait_until_quiet()["copies"]["store"]["ok_tokens"]
    assert stored == len(prompt) // 16 * 16
    server.kill()
    again = start_server(*arguments)
    usage = again.http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    details = usage["prompt_tokens_details"]["cached_tokens_details"]
    assert details == {"device": 0, "host": 0, "storage": (len(prompt) - 1) // 16 * 16}


def test_a_taken_port_and_a_bad_setting_are_told_in_one_line(
    server: RunningServer, tiny_model: Path
) -> None:
    import subprocess
    import sys

    port = server.url.rsplit(":", 1)[1]
    for arguments, words in (
        (["--port", port], "choose another --port"),
        (["--port", "0", "--retention", "exclusive"], "use write_back or inclusive"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "kvtiers.cli", "serve", str(tiny_model), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 2
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
