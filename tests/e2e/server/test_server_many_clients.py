"""Many clients at once, some of whom leave in the middle: every request ends and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import RunningServer, StartServer

CLIENTS = 64
WORDS = ["heron", "mill", "ferry", "rope", "clock", "orchard", "market", "lantern", "turf", "bell"]
SOAK_SECONDS = float(os.environ.get("KVTIERS_SOAK_SECONDS", "600"))
MEMORY_GROWTH_MIB_MAX = 64


class Client:
    """One client: asks again and again, in one of four ways, until the time is over."""

    def __init__(self, number: int, seed: int, http: httpx.AsyncClient, outcomes: Counter) -> None:
        self.random = random.Random(seed * 1000 + number)
        self.http = http
        self.outcomes = outcomes

    def body(self) -> dict:
        topic = self.random.randrange(6)
        words = random.Random(topic).choices(WORDS, k=30)  # a prefix that clients share
        words += self.random.choices(WORDS, k=self.random.randrange(1, 20))
        return {
            "model": "tiny",
            "prompt": " ".join(words),
            "max_tokens": self.random.randrange(1, 40),
            "temperature": self.random.choice([0, 1]),
            "n": self.random.choice([1, 1, 1, 2]),
            "priority": self.random.randrange(3),
            "cache_salt": self.random.choice([None, None, "a", "b"]),
        }

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            way = self.random.choice(["whole", "stream", "leave", "give up"])
            try:
                self.outcomes[await self.ask(way)] += 1
            except httpx.TimeoutException:
                assert way == "give up", f"{way}: the server did not answer in time"
                self.outcomes[way] += 1

    async def ask(self, way: str) -> str:
        body = self.body()
        if way in ("whole", "give up"):
            timeout = 60 if way == "whole" else self.random.uniform(0.01, 0.5)
            answer = await self.http.post("/v1/completions", json=body, timeout=timeout)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage["prompt_tokens_details"]
            missed = sum(details["missed_tokens"].values())
            assert usage["prompt_tokens"] == details["cached_tokens"] + missed
            return "whole"
        leave_after = self.random.randrange(1, 10) if way == "leave" else 1 << 30
        lines = 0
        async with self.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, timeout=60
        ) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                lines += line.startswith("data: ")
                if lines >= leave_after:
                    return "leave"
                assert "error" not in line[:20], line
        assert line == "data: [DONE]" or not line
        return "stream"


async def _play(server: RunningServer, seconds: float, seed: int) -> Counter:
    outcomes: Counter = Counter()
    limits = httpx.Limits(max_connections=CLIENTS * 2, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, limits=limits) as http:
        clients = [Client(number, seed, http, outcomes) for number in range(CLIENTS)]
        until = time.monotonic() + seconds
        await asyncio.gather(*(client.run(until) for client in clients))
    return outcomes


def _assert_nothing_is_left(server: RunningServer) -> None:
    state = server.wait_until_quiet(60)
    device, host = state["device"]["pages"], state["host"]["pages"]
    assert device["private"] == device["reserved"] == device["quarantined"] == 0
    assert host["private"] == host["reserved"] == host["quarantined"] == 0
    ledger = server.ledger()
    assert ledger["balanced"], [i for i in ledger["identities"] if i["left"] != i["right"]]
    assert server.child.poll() is None
    assert "Traceback" not in server.log()


def _assert_the_decisions_replay(decisions: Path) -> None:
    """The same calls on a fresh cache, in another process, give the same facts byte for byte."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvtiers.testing.replay", str(decisions)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _open_sockets(server: RunningServer) -> int:
    """Connections that the server holds; files of the storage come and go by themselves."""
    count = 0
    for file in Path(f"/proc/{server.child.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed while we looked
            count += os.readlink(file).startswith("socket:")
    return count


def _memory_mib(server: RunningServer) -> float:
    status = Path(f"/proc/{server.child.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _settled_sockets(server: RunningServer, wanted: int) -> int:
    """Open sockets once closed connections are gone, or after a while."""
    give_up = time.monotonic() + 10
    while _open_sockets(server) > wanted and time.monotonic() < give_up:
        time.sleep(0.1)
    return _open_sockets(server)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_64_clients_of_whom_some_leave_leak_nothing(
    start_server: StartServer, tmp_path: Path, write_policy: str
) -> None:
    decisions = tmp_path / "decisions.jsonl"
    server = start_server(
        *("--storage", str(tmp_path / "storage"), "--schedule-policy", "priority"),
        *("--write-policy", write_policy, "--decision-log", str(decisions)),
    )
    server.state()
    sockets_before = _open_sockets(server)
    outcomes = asyncio.run(_play(server, 8.0, seed=1))
    assert set(outcomes) >= {"whole", "stream", "leave"}, outcomes
    _assert_nothing_is_left(server)
    assert _settled_sockets(server, sockets_before) <= sockets_before
    assert server.terminate() == 0
    _assert_the_decisions_replay(decisions)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_64_clients_for_ten_minutes_leak_nothing(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(
        *("--storage", str(tmp_path / "storage"), "--storage-gib", "0.1"),
        *("--schedule-policy", "priority"),
    )
    asyncio.run(_play(server, 30.0, seed=2))  # warm: allocator, caches, pools of threads
    _assert_nothing_is_left(server)
    sockets_before, memory_before = _open_sockets(server), _memory_mib(server)
    outcomes = asyncio.run(_play(server, SOAK_SECONDS, seed=3))
    assert sum(outcomes.values()) > CLIENTS
    _assert_nothing_is_left(server)
    assert _settled_sockets(server, sockets_before) <= sockets_before
    assert _memory_mib(server) - memory_before < MEMORY_GROWTH_MIB_MAX
    assert server.terminate() == 0
