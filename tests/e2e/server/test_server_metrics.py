"""/metrics of a real server: every series is there from the start, with 0."""

from __future__ import annotations

import time

from conftest import RunningServer, StartServer
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.metrics.catalogue import CATALOGUE
from kvtiers.metrics.series import Kind
from kvtiers.types import LOSS_REASONS

MODES = {"input", "device_hit", "host_hit", "storage_hit"}


def test_a_fresh_server_shows_every_series_at_zero(start_server: StartServer) -> None:
    server = start_server("--metrics-prefix", "kvtiers_")
    text = server.http.get("/metrics").raise_for_status().text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for series in CATALOGUE:
        name = f"kvtiers_{series.name}"
        family = families.get(name) or families.get(name.removesuffix("_total"))
        assert family is not None, f"{name} is missing"
        if series.kind is Kind.COUNTER:
            audits = series.name == "ledger_audits_total"  # they run while nothing else does
            assert audits or all(sample.value == 0 for sample in family.samples), name
    effective = families["kvtiers_prefill_effective_tokens"].samples
    assert {sample.labels["mode"] for sample in effective} == MODES
    dropped = families["kvtiers_hicache_dropped_tokens"].samples
    assert {sample.labels["reason"] for sample in dropped} == {str(r) for r in LOSS_REASONS}
    assert {sample.labels["model_name"] for sample in effective} == {"tiny"}


def test_a_prompt_that_comes_back_shows_in_the_what_if_curve(start_server: StartServer) -> None:
    server = start_server()
    for _ in range(3):
        body = {"model": "tiny", "prompt": list(range(1, 200)), "max_tokens": 4}
        server.http.post("/v1/completions", json=body).raise_for_status()
    ratios = server.http.get("/cache/state").raise_for_status().json()["what_if"]
    # Two of three prompts, apart from the tokens of the last, partial page.
    assert 0.5 < ratios["device"]["x1"] < 2 / 3
    end = time.monotonic() + 10  # gauges are up to a quarter of a second old
    shown = what_if_of(server)
    while shown["device", "x1"] != ratios["device"]["x1"] and time.monotonic() < end:
        time.sleep(0.05)
        shown = what_if_of(server)
    assert shown["device", "x1"] == ratios["device"]["x1"]
    assert shown["storage", "x1"] == 0  # there is none


def what_if_of(server: RunningServer) -> dict[tuple[str, str], float]:
    text = server.http.get("/metrics").raise_for_status().text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    samples = families["sglang:what_if_hit_ratio"].samples
    return {(s.labels["tier"], s.labels["capacity"]): s.value for s in samples}
