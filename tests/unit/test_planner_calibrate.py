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
from kvtiers.planner.calibrate import (
    LINKS,
    Experiment,
    Moved,
    Totals,
    calibrate,
    fit,
    fit_link,
    observe,
)
from kvtiers.planner.machines import StepCost, find_machine
from kvtiers.planner.models import MODELS
from kvtiers.planner.served import HttpServed
from kvtiers.planner.serving_settings import KnownSettings
from kvtiers.transfer.virtual import Link
from kvtiers.types import PrefetchPolicy

TRUE = StepCost(0.004, 0.030, 1e-3, 2e-7, 5e-6, single_seconds=0.020)
SETTINGS = KnownSettings(max_batch_tokens=512)
TOKEN_BYTES = 1_000
TRUE_LINKS = {
    "device_to_host": Link(5e9, 20e-6),
    "host_to_device": Link(7e9, 30e-6),
    "storage_read": Link(2e9, 1e-3),
    "storage_write": Link(1e9, 2e-3),
}


class VirtualServer:
    """Takes exactly the time that `TRUE` says; prompts that are asked together share their steps.

    Write-through over unbounded tiers: a new prompt is copied to host and storage.
    """

    def __init__(self, device_tokens: int = 20_000) -> None:
        self.device_tokens = device_tokens
        self.link_ceilings = {"device_to_host": 4e9}
        self.together_max = 0
        self._sums = dict.fromkeys(("first", "first_seconds", "gaps", "gap_seconds"), 0.0)
        self._moved = dict.fromkeys(LINKS, Moved())
        self._tiers: dict[tuple[int, ...], set[str]] = {}

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.together_max = max(self.together_max, len(prompts) * max(map(len, prompts)))
        now = 0.0
        for prompt in prompts:
            tiers = self._tiers.setdefault(tuple(prompt), set())
            size = len(prompt) * TOKEN_BYTES
            if not tiers:
                now += TRUE.seconds(len(prompt), len(prompt) ** 2 / 2, 0)
                self._move("device_to_host", size)
                self._move("storage_write", size)
            elif "device" not in tiers:
                if "host" not in tiers:
                    self._move("storage_read", size)
                self._move("host_to_device", size)
            tiers |= {"device", "host", "storage"}
            self._sums["first"] += 1
            self._sums["first_seconds"] += now
        batch = len(prompts)
        for made in range(1, max_tokens):
            context = sum(len(prompt) + made for prompt in prompts)
            self._sums["gaps"] += batch
            self._sums["gap_seconds"] += batch * TRUE.seconds(batch, context, context)

    def settle(self) -> None:
        pass

    def totals(self) -> Totals:
        sums = self._sums
        return Totals(
            sums["first"],
            sums["first_seconds"],
            sums["gaps"],
            sums["gap_seconds"],
            dict(self._moved),
        )

    def settings(self) -> KnownSettings:
        return SETTINGS

    def flush(self, tier: str) -> None:
        for tiers in self._tiers.values():
            tiers.discard(tier)

    def _move(self, link: str, size: int) -> None:
        before = self._moved[link]
        seconds = TRUE_LINKS[link].seconds(size)
        self._moved[link] = Moved(before.calls + 1, before.bytes + size, before.seconds + seconds)


def test_the_fit_finds_the_cost_of_a_server_again() -> None:
    lengths = (16, 64, 256, 1024, 4096)
    seen = observe(VirtualServer(), Experiment(lengths))
    assert len(seen.prefills) == len(lengths)
    assert {o.tokens for o in seen.decodes} == {1, 2, 8}
    found = fit(seen.prefills, seen.decodes)
    for tokens in lengths:
        pairs = tokens**2 / 2
        expected = TRUE.seconds(tokens, pairs, 0)
        assert found.seconds(tokens, pairs, 0) == pytest.approx(expected, rel=0.05)
    for context in (64, 1_000, 4_000):
        for batch in (1, 2, 8):
            expected = TRUE.seconds(batch, batch * context, batch * context)
            measured = found.seconds(batch, batch * context, batch * context)
            assert measured == pytest.approx(expected, rel=0.05)


def test_every_link_is_found_when_the_tiers_may_be_emptied() -> None:
    machine = calibrate(VirtualServer(), Experiment(flush=True), "m", "now")
    assert machine.settings == SETTINGS
    for name, link in TRUE_LINKS.items():
        found = getattr(machine, name)
        assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.01)
        assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.01)


def test_one_call_that_was_slow_for_a_reason_of_its_own_does_not_tell_a_link() -> None:
    link = Link(1e9, 1e-3)
    usual = [Moved(1, size, link.seconds(size)) for size in (10**5, 10**6, 10**7) for _ in "ab"]
    found = fit_link([Moved(1, 10**6, 0.4), *usual])
    assert found is not None
    assert found.bytes_per_second == pytest.approx(1e9, rel=0.1)
    assert found.latency_seconds == pytest.approx(1e-3, rel=0.1)


def test_without_emptying_the_way_up_is_taken_from_the_way_down() -> None:
    machine = calibrate(VirtualServer(), Experiment(), "m", "now")
    down = machine.device_to_host
    assert down.bytes_per_second == pytest.approx(5e9, rel=0.01), "measured, not as probed"
    assert machine.host_to_device == down
    assert machine.storage_read == machine.storage_write


def test_prompts_that_decode_together_fit_on_the_device() -> None:
    server = VirtualServer(device_tokens=3_000)
    seen = observe(server, Experiment())
    assert server.together_max < 3_000
    assert {o.tokens for o in seen.decodes} == {1, 2, 8}
    with pytest.raises(ConfigError, match="too few for 8 of the shortest prompts"):
        observe(VirtualServer(device_tokens=300), Experiment())


def test_two_calibrations_together_lie_between_both() -> None:
    slow, fast = (
        observe(VirtualServer(), Experiment()),
        observe(VirtualServer(), Experiment(seed=1)),
    )
    twice = [type(o)(o.tokens, o.pairs, o.context_tokens, 2 * o.seconds) for o in slow.prefills]
    slow = type(slow)(twice, slow.decodes, slow.moved)
    assert slow.over(fast) > 1.5
    both = slow.together(fast)
    seconds = [
        fit(seen.prefills, seen.decodes).prefill_seconds(512, chunk=512)
        for seen in (fast, both, slow)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.9 * seconds[1] < seconds[2]


def test_no_number_of_a_fit_is_negative() -> None:
    seen = observe(VirtualServer(), Experiment())
    noisy = [
        type(o)(o.tokens, o.pairs, o.context_tokens, 0.1 / (i + 1))
        for i, o in enumerate(seen.prefills)
    ]
    cost = fit(noisy, seen.decodes)
    assert cost.seconds_per_token >= 0
    assert cost.seconds_per_pair >= 0


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least three"):
        Experiment((64, 64, 128))


METRICS = """\
x:tier_slots{model_name="m",tier="device",pool="kv",state="free"} 4000.0
x:tier_slots{model_name="m",tier="device",pool="kv",state="evictable"} 1000.0
x:tier_slots{model_name="m",tier="host",pool="kv",state="free"} 9.0
x:page_size{model_name="m"} 16.0
x:link_ceiling_bytes_per_second{model_name="m",path="device_to_host"} 7e+09
x:transfers_in_flight{model_name="m",purpose="backup"} 0.0
x:time_to_first_token_seconds_sum{model_name="m"} %(answers)s
x:time_to_first_token_seconds_count{model_name="m"} %(answers)s
x:inter_token_latency_seconds_sum{model_name="m"} %(tokens)s
x:inter_token_latency_seconds_count{model_name="m"} %(tokens)s
"""


STATE = {
    "page_tokens": 16,
    "policies": {"write_policy": "write_back", "prefetch_policy": "best_effort"},
    "device": {"capacity_pages": 9},
}


class _Handler(http.server.BaseHTTPRequestHandler):
    """A second for each first token and for each further one."""

    answers = 0
    tokens = 0
    flushed: list[str]

    def do_GET(self) -> None:
        kind = type(self)
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "m"}]}))
        elif self.path == "/cache/state":
            if self.headers["Authorization"] == "Bearer admin":
                self._answer(json.dumps(STATE))
            else:
                self.send_error(401)
        else:
            self._answer(METRICS % {"answers": kind.answers, "tokens": kind.tokens})

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/cache/flush":
            assert self.headers["Authorization"] == "Bearer admin"
            kind.flushed.append(body["tier"])
            self._answer("{}")
            return
        assert body["ignore_eos"]
        kind.answers += 1
        kind.tokens += body["max_tokens"] - 1
        self._answer(json.dumps({"usage": {"completion_tokens": body["max_tokens"]}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def handler() -> type[_Handler]:
    return type("Handler", (_Handler,), {"flushed": []})


@pytest.fixture
def url(handler: type[_Handler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_command_writes_a_file_that_replays_can_use(
    url: str, handler: type[_Handler], tmp_path: Path
) -> None:
    out = tmp_path / "here.json"
    result = CliRunner().invoke(
        build(["calibrate"]),
        ["calibrate", url, "--out", str(out), "--flush", "--admin-key", "admin"],
        catch_exceptions=False,
    )
    assert "written to" in result.stdout
    assert "settings: prefetch policy best_effort" in result.stdout
    assert handler.flushed[:3] == ["device", "device", "host"]
    machine = find_machine(str(out), MODELS["smollm2-135m"])
    assert machine.validated is not None
    assert url in machine.status
    assert machine.device_to_host.bytes_per_second == 7e9, "nothing moved: as the server probed"
    assert machine.cost.seconds(1, 0, 0) == pytest.approx(1.0)
    assert machine.cost.seconds(64, 64**2 / 2, 0) == pytest.approx(1.0)
    assert machine.settings == KnownSettings(prefetch_policy=PrefetchPolicy.BEST_EFFORT)


def test_what_a_server_says_of_its_limits_and_policies_is_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATE, "limits", {"max_running_requests": 8, "max_batch_tokens": 512})
    assert HttpServed(url, admin_key="admin").settings() == KnownSettings(
        max_running_requests=8, max_batch_tokens=512, prefetch_policy=PrefetchPolicy.BEST_EFFORT
    )


def test_a_server_whose_state_is_closed_is_calibrated_without_its_settings(url: str) -> None:
    assert HttpServed(url).settings() == KnownSettings()
    assert HttpServed(url, admin_key="another").settings() == KnownSettings()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://[", "http://HOST:PORT"),
        ("http://127.0.0.1:port", "http://HOST:PORT"),
        ("http://127.0.0.1:9", "does not answer"),
    ],
)
def test_an_address_without_a_server_is_an_error(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(build(["calibrate"]), ["calibrate", address], catch_exceptions=False)


def test_a_server_of_something_else_is_told_as_one(
    url: str, handler: type[_Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "do_GET", lambda self: self._answer("<html>hello</html>"))
    with pytest.raises(ConfigError, match="only those can be calibrated"):
        CliRunner().invoke(build(["calibrate"]), ["calibrate", url], catch_exceptions=False)
