"""What a scrape gives: the names and labels of the catalogue, seeded, in a format that parses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.errors import ConfigError
from kvtiers.events import Fact
from kvtiers.metrics.catalogue import CATALOGUE
from kvtiers.metrics.gauges import Gauges
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.prometheus import PrometheusExporter
from kvtiers.metrics.readout import READERS, read_all
from kvtiers.metrics.series import COMMON_LABELS, Kind
from kvtiers.types import Attempt, PoolSpec, Purpose, StorageOp, Tier

C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

LOSSES = {"host_pressure", "write_through_unbacked_eviction", "selective_cold", "copy_failed"}
UNFULFILLED = {
    "below_threshold",
    "host_capacity",
    "device_capacity",
    "device_covered",
    "storage_transfer",
    "deadline",
    "anchor_lost",
    "device_overlap",
    "cache_admission_shortfall",
    "integrity",
    "dropped",
}
MISSES = {
    "unknown",
    "evicted",
    "dropped",
    "stranded",
    "load_declined",
    "load_failed",
    "deadline",
    "in_flight",
    "integrity",
    "sub_page_tail",
    "last_token",
}
PURPOSES = {"backup", "load_back", "prefetch", "store"}
TIERS = {"device", "host"}

# The names and labels that dashboards rely on, written out: renaming one must fail here. A label
# with None is open; the pools are those of the ledger below.
PROMISED: dict[str, tuple[Kind, dict[str, set[str] | None]]] = {
    # required by the mission
    "prefill_effective_tokens_total": (
        C,
        {"mode": {"input", "device_hit", "host_hit", "storage_hit"}},
    ),
    "hicache_backup_tokens_total": (C, {"pool": {"kv"}}),
    "hicache_backup_bytes_total": (C, {}),
    "hicache_backup_duration_seconds": (H, {}),
    "load_back_tokens_total": (C, {"pool": {"kv"}}),
    "load_back_bytes_total": (C, {}),
    "load_back_duration_seconds": (H, {}),
    "hicache_dropped_tokens_total": (C, {"reason": LOSSES, "pool": {"kv"}}),
    "evicted_tokens_total": (C, {}),
    "eviction_duration_seconds": (H, {}),
    # storage
    "prefetched_tokens_total": (C, {}),
    "backuped_tokens_total": (C, {}),
    "storage_prefetch_hit_tokens_total": (C, {}),
    "storage_prefetch_unfulfilled_tokens_total": (C, {"reason": UNFULFILLED}),
    "prefetch_pgs": (H, {}),
    "backup_pgs": (H, {}),
    "prefetch_bandwidth": (H, {}),
    "backup_bandwidth": (H, {}),
    "storage_errors_total": (C, {"backend": None, "op": None, "kind": None}),
    "storage_op_duration_seconds": (H, {"backend": None, "op": None}),
    "storage_used_bytes": (G, {}),
    "storage_quota_bytes": (G, {}),
    "storage_integrity_failures_total": (C, {"backend": None}),
    # occupancy
    "hicache_host_used_tokens": (G, {}),
    "hicache_host_total_tokens": (G, {}),
    "tier_slots": (
        G,
        {
            "tier": TIERS,
            "pool": {"kv"},
            "state": {"free", "reserved", "private", "leased", "evictable", "quarantined"},
        },
    ),
    "host_mirror_tokens": (G, {"pool": {"kv"}}),
    "ghost_pages": (G, {}),
    "ghost_capacity_pages": (G, {}),
    "token_usage": (G, {}),
    "num_used_tokens": (G, {}),
    "num_running_reqs": (G, {}),
    "num_queue_reqs": (G, {}),
    "page_size": (G, {}),
    # what nobody exports today
    "ledger_imbalance": (G, {"identity": None}),
    "tier_evicted_tokens_total": (
        C,
        {
            "tier": TIERS,
            "pool": {"kv"},
            "outcome": {"demoted", "covered", "duplicate", "removed", "dropped"},
            "reason": LOSSES | {"capacity", "command", "duplicate"},
        },
    ),
    "regret_tokens_total": (C, {"tier": TIERS, "reason": None}),
    "prefill_missed_tokens_total": (C, {"reason": MISSES}),
    "link_ceiling_bytes_per_second": (G, {"path": None}),
    "transfer_stage_seconds": (H, {"purpose": PURPOSES, "stage": {"queued", "copy", "ack"}}),
    "backup_reused_tokens_total": (C, {"pool": {"kv"}}),
    "forward_stall_seconds_total": (C, {}),
    "prefill_seconds_saved_total": (C, {"tier": {"device", "host", "storage"}}),
    "transfers_in_flight": (G, {"purpose": PURPOSES}),
    "oldest_transfer_age_seconds": (G, {"purpose": PURPOSES}),
    "namespace_tokens": (G, {"namespace": None, "tier": TIERS}),
    # requests
    "time_to_first_token_seconds": (H, {}),
    "inter_token_latency_seconds": (H, {}),
    "e2e_request_latency_seconds": (H, {}),
    "prompt_tokens_total": (C, {}),
    "generation_tokens_total": (C, {}),
    "cached_tokens_total": (C, {"cache_source": {"device", "host", "storage"}}),
    "num_retracted_requests_total": (C, {}),
}

Labels = frozenset[tuple[str, str]]


def new_ledger() -> Ledger:
    return Ledger(16, (PoolSpec("kv", 1000),), 100, 200, backends=["file"])


def scrape(exporter: PrometheusExporter) -> dict[str, dict[Labels, float]]:
    """Samples of an exposition by full name and labels, without the common labels."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        for sample in family.samples:
            assert set(COMMON_LABELS) <= set(sample.labels)
            labels = frozenset(
                item for item in sample.labels.items() if item[0] not in COMMON_LABELS
            )
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name} twice"
            found[sample.name][labels] = sample.value
    return found


@pytest.fixture
def fresh() -> dict[str, dict[Labels, float]]:
    return scrape(PrometheusExporter(new_ledger(), Gauges, model_name="m"))


def labelled(**labels: str) -> Labels:
    return frozenset(labels.items())


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_series_has_its_type_its_labels_and_every_value_from_the_start(
    name: str, fresh: Mapping[str, Mapping[Labels, float]]
) -> None:
    kind, labels = PROMISED[name]
    series = next(series for series in CATALOGUE if series.name == name)
    assert series.kind is kind
    assert set(series.label_names) == set(labels)
    for label in series.labels:
        values = labels[label.name]
        if values is not None:
            assert set(label.values) == values
    if any(label.open_set for label in series.labels):
        return
    suffix = "_count" if kind is H else ""
    expected = {
        frozenset(zip(series.label_names, values, strict=True))
        for values in itertools.product(*(label.values for label in series.labels))
    }
    assert set(fresh[f"sglang:{name}{suffix}"]) == expected


def test_every_series_of_the_catalogue_is_in_the_first_scrape_with_help_and_type() -> None:
    exporter = PrometheusExporter(new_ledger(), Gauges, model_name="m")
    text = exporter.render().decode()
    for series in CATALOGUE:
        name = f"sglang:{series.name}"
        assert f"# HELP {name} [{series.unit}] " in text
        assert f"# TYPE {name} {series.kind}\n" in text


def test_a_fresh_exporter_shows_nothing_but_zeros_capacities_and_settings(
    fresh: Mapping[str, Mapping[Labels, float]],
) -> None:
    nonzero = {
        (name, labels): value
        for name, samples in fresh.items()
        for labels, value in samples.items()
        if value
    }
    assert nonzero == {
        ("sglang:page_size", labelled()): 16,
        ("sglang:hicache_host_total_tokens", labelled()): 3200,
        ("sglang:tier_slots", labelled(tier="device", pool="kv", state="free")): 100,
        ("sglang:tier_slots", labelled(tier="host", pool="kv", state="free")): 200,
    }


def test_the_catalogue_and_the_readers_name_the_same_series_once() -> None:
    names = [series.name for series in CATALOGUE]
    assert len(names) == len(set(names))
    assert set(READERS) == set(names)


def test_every_reader_gives_as_many_label_values_as_its_series_has_labels() -> None:
    gauges = Gauges(
        namespace_pages={("aa", Tier.HOST): 3},
        link_ceiling_bytes_per_second={"device_to_host": 1e9},
    )
    for series, samples in read_all(new_ledger(), gauges):
        assert samples, f"{series.name} has no sample"
        for values, _ in samples:
            assert len(values) == len(series.labels), series.name
            for value, label in zip(values, series.labels, strict=True):
                assert label.open_set or value in label.values, f"{series.name}: {value}"


def test_values_reach_the_exposition_with_their_labels() -> None:
    ledger = new_ledger()
    exporter = PrometheusExporter(
        ledger,
        lambda: Gauges(queued_requests=3, oldest_transfer_age_seconds={Purpose.STORE: 1.5}),
        model_name="m",
    )
    ledger.fold(
        [
            (Fact.ADMITTED, 1, Attempt.FIRST, 100, 0, 7),
            (Fact.COMPUTED, 1, Attempt.FIRST, 100),
            (Fact.ISSUED, 2, Purpose.BACKUP, 4),
            (Fact.COPY_TIMED, Purpose.BACKUP, 4, 0.0, 0.01, 0.0),
        ]
    )
    found = scrape(exporter)
    assert found["sglang:prefill_effective_tokens_total"][labelled(mode="input")] == 100
    assert found["sglang:num_queue_reqs"][labelled()] == 3
    assert found["sglang:oldest_transfer_age_seconds"][labelled(purpose="store")] == 1.5
    assert found["sglang:transfers_in_flight"][labelled(purpose="backup")] == 1
    buckets = found["sglang:hicache_backup_duration_seconds_bucket"]
    assert buckets[labelled(le="0.01")] == 1  # a bound belongs to its bucket
    assert buckets[labelled(le="0.009")] == 0
    assert buckets[labelled(le="+Inf")] == 1
    assert found["sglang:hicache_backup_duration_seconds_sum"][labelled()] == 0.01


def test_an_imbalance_is_visible_to_an_alert() -> None:
    ledger = new_ledger()
    exporter = PrometheusExporter(ledger, Gauges, model_name="m")
    assert set(scrape(exporter)["sglang:ledger_imbalance"].values()) == {0}
    ledger.fold([(Fact.SETTLED, 1, Purpose.BACKUP, 2)])
    found = scrape(exporter)["sglang:ledger_imbalance"]
    assert found[labelled(identity="late_backup")] == -2


def test_a_store_that_is_attached_later_is_seeded_when_it_is_first_heard_of() -> None:
    ledger = new_ledger()
    exporter = PrometheusExporter(ledger, Gauges, model_name="m")
    ledger.fold([(Fact.STORAGE_OP, "memory", StorageOp.EXISTS, 0.1, 0, 0, None)])
    errors = scrape(exporter)["sglang:storage_errors_total"]
    for backend in ("file", "memory"):
        assert errors[labelled(backend=backend, op="read", kind="integrity")] == 0


def test_prefix_and_the_operators_own_labels_are_on_every_sample() -> None:
    exporter = PrometheusExporter(
        new_ledger(),
        Gauges,
        model_name='quoted "name"\\',
        tp_rank=1,
        dp_rank=2,
        extra_labels={"zone": "a"},
        prefix="kvtiers_",
    )
    samples = [
        sample
        for family in text_string_to_metric_families(exporter.render().decode())
        for sample in family.samples
    ]
    assert samples
    for sample in samples:
        assert sample.name.startswith("kvtiers_")
        assert sample.labels["model_name"] == 'quoted "name"\\'
        assert sample.labels["tp_rank"] == "1"
        assert sample.labels["pp_rank"] == "0"
        assert sample.labels["dp_rank"] == "2"
        assert sample.labels["zone"] == "a"


@pytest.mark.parametrize(
    ("prefix", "labels", "words"),
    [
        ("9lives:", {}, "prefix '9lives:'"),
        ("a-b", {}, "prefix 'a-b'"),
        ("", {"dash-ed": "x"}, "label 'dash-ed'"),
        ("", {"pool": "x"}, "label 'pool'"),
        ("", {"model_name": "x"}, "label 'model_name'"),
        ("", {"le": "x"}, "label 'le'"),
    ],
)
def test_names_that_prometheus_would_not_take_are_refused_at_the_start(
    prefix: str, labels: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        PrometheusExporter(new_ledger(), Gauges, model_name="m", prefix=prefix, extra_labels=labels)


def test_ledger_and_catalogue_do_not_need_prometheus_or_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys; import kvtiers.metrics.readout, kvtiers.metrics.docs; "
        "sys.exit(bool({'prometheus_client', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
