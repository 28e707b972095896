"""Calibration: a server whose cost is known is measured in virtual time and found again."""

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers.cli import build
from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import Experiment, fit, observe
from kvtiers.planner.machines import StepCost, find_machine
from kvtiers.planner.models import MODELS

TRUE = StepCost(0.004, 0.030, 1e-3, 2e-7, 5e-6)


class VirtualServer:
    """Takes exactly the time that `TRUE` says; concurrent requests share a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: set[tuple[int, ...]] = set()
        self.lock = threading.Lock()
        self.waiting: dict[tuple[int, ...], int] = {}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        key = tuple(prompt)
        with self.lock:
            if key not in self.seen:
                self.now += TRUE.seconds(len(prompt), len(prompt) ** 2 / 2, 0)
                self.seen.add(key)
            for made in range(1, max_tokens):
                context = len(prompt) + made
                self.now += TRUE.seconds(1, context, context)

    def link_ceilings(self) -> dict[str, float]:
        return {"device_to_host": 5e9}


def test_the_fit_finds_the_cost_of_a_server_again() -> None:
    server = VirtualServer()
    lengths = (64, 256, 1024, 4096)
    prefills, decodes = observe(server, Experiment(lengths), clock=lambda: server.now)
    assert len(prefills) == len(lengths)
    assert {o.tokens for o in decodes} == {1, 4}
    found = fit(prefills, decodes)
    for tokens in lengths:
        pairs = tokens**2 / 2
        expected = TRUE.seconds(tokens, pairs, 0)
        assert found.seconds(tokens, pairs, 0) == pytest.approx(expected, rel=0.05)
    for context in (64, 1_000, 4_000):
        expected = TRUE.seconds(1, context, context)
        assert found.seconds(1, context, context) == pytest.approx(expected, rel=0.05)


def test_no_number_of_a_fit_is_negative() -> None:
    server = VirtualServer()
    prefills, decodes = observe(server, Experiment(), clock=lambda: server.now)
    noisy = [
        type(o)(o.tokens, o.pairs, o.context_tokens, 0.1 / (i + 1)) for i, o in enumerate(prefills)
    ]
    cost = fit(noisy, decodes)
    assert cost.seconds_per_token >= 0
    assert cost.seconds_per_pair >= 0


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least three"):
        Experiment((64, 64, 128))


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "m"}]}))
        else:
            name = "sglang:link_ceiling_bytes_per_second"
            self._answer(f'{name}{{model_name="m",path="device_to_host"}} 7e+09\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"]
        made = body["max_tokens"] if body["max_tokens"] < 5_000 else 1
        self._answer(json.dumps({"usage": {"completion_tokens": made}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_command_writes_a_file_that_replays_can_use(url: str, tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    result = CliRunner().invoke(
        build(["calibrate"]), ["calibrate", url, "--out", str(out)], catch_exceptions=False
    )
    assert "written to" in result.stdout
    machine = find_machine(str(out), MODELS["smollm2-135m"])
    assert machine.validated is not None
    assert url in machine.status
    assert machine.device_to_host.bytes_per_second == 7e9


@pytest.mark.parametrize(
    ("address", "message"),
    [("localhost", "http://HOST:PORT"), ("http://127.0.0.1:9", "does not answer")],
)
def test_an_address_without_a_server_is_an_error(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(build(["calibrate"]), ["calibrate", address], catch_exceptions=False)
