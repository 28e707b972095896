"""Isolation by salt, and what the operator can see and do under /cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import RunningServer, StartServer, write_tiny_model


def _ask(server: RunningServer, prompt: str, **more: Any) -> dict[str, int]:
    """Cached tokens by tier."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def _hits(server: RunningServer) -> int:
    tokens = server.state()["prefill_tokens"]
    return sum(n for mode, n in tokens.items() if mode != "input")


NOTHING = {"device": 0, "host": 0, "storage": 0}
PROMPT = "A tenant's own words, which no other tenant may find in any tier of the cache. " * 4
REUSABLE = (len(PROMPT) - 1) // 16 * 16


def test_two_salts_never_hit_each_other_not_even_after_a_restart(
    start_server: StartServer, tmp_path: Path
) -> None:
    storage = ("--storage", str(tmp_path / "storage"), "--prefetch-policy", "wait_complete")
    server = start_server(*storage)
    assert _ask(server, PROMPT, cache_salt="red") == NOTHING
    assert _ask(server, PROMPT, cache_salt="blue") == NOTHING
    assert _ask(server, PROMPT) == NOTHING
    assert _hits(server) == 0
    assert sum(_ask(server, PROMPT, cache_salt="red").values()) == REUSABLE
    server.wait_until_quiet()
    assert server.terminate() == 0
    again = start_server(*storage)
    assert _ask(again, PROMPT, cache_salt="green") == NOTHING
    assert _hits(again) == 0
    assert _ask(again, PROMPT, cache_salt="red")["storage"] == REUSABLE
    assert again.ledger()["balanced"]


def test_another_model_on_the_same_storage_never_hits(
    start_server: StartServer, tmp_path: Path
) -> None:
    storage = ("--storage", str(tmp_path / "storage"), "--prefetch-policy", "wait_complete")
    server = start_server(*storage)
    _ask(server, PROMPT)
    server.wait_until_quiet()
    assert server.terminate() == 0
    other = start_server(*storage, model=write_tiny_model(tmp_path / "other" / "tiny", seed=1))
    assert _ask(other, PROMPT) == NOTHING
    assert _hits(other) == 0


def test_every_tier_serves_what_the_one_above_has_lost(server: RunningServer) -> None:
    prompt = "Served from device, then from host, and then from storage as well, page by page. " * 3
    reusable = (len(prompt) - 1) // 16 * 16
    _ask(server, prompt)
    assert _ask(server, prompt)["device"] == reusable
    server.wait_until_quiet()
    for tiers, served_by in (["device"], "host"), (["device", "host"], "storage"):
        for tier in tiers:
            flushed = server.http.post("/cache/flush", json={"tier": tier}).raise_for_status()
            assert flushed.json()["removed_pages"] > 0
        assert _ask(server, prompt)[served_by] == reusable
        server.wait_until_quiet()
    server.http.post("/cache/flush", json={"tier": "storage"}).raise_for_status()
    for tier in ("device", "host"):
        server.http.post("/cache/flush", json={"tier": tier}).raise_for_status()
    assert _ask(server, prompt) == NOTHING
    assert server.ledger()["balanced"]


def test_the_ledger_spells_every_identity_out(server: RunningServer) -> None:
    report = server.ledger()
    assert report["balanced"]
    assert all(each["left"] == each["right"] and each["formula"] for each in report["identities"])


def test_metrics_and_state_are_read_from_the_same_books(server: RunningServer) -> None:
    _ask(server, PROMPT)
    server.wait_until_quiet()
    tokens = server.state()["prefill_tokens"]
    metrics = server.http.get("/metrics").raise_for_status()
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    for mode, value in tokens.items():
        lines = [
            line
            for line in metrics.text.splitlines()
            if line.startswith("sglang:prefill_effective_tokens_total{")
            and f'mode="{mode}"' in line
        ]
        assert [float(line.rsplit(" ", 1)[1]) for line in lines] == [float(value)]


def test_a_pin_survives_a_flush_until_it_is_let_go(server: RunningServer) -> None:
    prompt = "Keep this prefix whatever happens to the rest of the cache, please, thank you. " * 2
    _ask(server, prompt)
    pin = server.http.post("/cache/pins", json={"prompt": prompt}).raise_for_status().json()
    assert pin["tokens"] > 0
    server.http.post("/cache/flush", json={"tier": "device"}).raise_for_status()
    assert _ask(server, prompt)["device"] == (len(prompt) - 1) // 16 * 16
    held = server.http.get("/cache/pins").json()
    assert [p["pin_id"] for p in held["pins"]] == [pin["pin_id"]]
    assert server.http.delete(f"/cache/pins/{pin['pin_id']}").status_code == 200
    assert server.http.delete(f"/cache/pins/{pin['pin_id']}").status_code == 404
    assert server.http.get("/cache/pins").json()["pinned_tokens"] == 0


def test_pins_stay_within_their_budget(start_server: StartServer) -> None:
    server = start_server("--pin-budget-share", "0.06")  # 5 of 96 device pages
    _ask(server, PROMPT)
    refused = server.http.post("/cache/pins", json={"prompt": PROMPT})
    assert refused.status_code == 409
    assert "--pin-budget-share" in refused.json()["error"]["message"]
    assert server.state()["pinned_tokens"] == 0
    accepted = server.http.post("/cache/pins", json={"prompt": PROMPT[:70]})
    assert accepted.json()["tokens"] == 64


def test_storage_is_detached_and_attached_while_the_server_runs(server: RunningServer) -> None:
    assert server.http.delete("/cache/storage").json() == {"attached": False}
    assert not server.state()["storage"]["attached"]
    _ask(server, PROMPT + "without storage")
    assert server.http.put("/cache/storage").json() == {"attached": True}
    assert server.http.put("/cache/storage").status_code == 409
    assert server.state()["storage"]["attached"]
    assert server.ledger()["balanced"]
