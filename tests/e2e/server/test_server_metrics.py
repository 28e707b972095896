"""/metrics of a real server: every series is there from the start, with 0."""

from __future__ import annotations

from conftest import StartServer
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.metrics.schema import CATALOGUE, Kind
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
