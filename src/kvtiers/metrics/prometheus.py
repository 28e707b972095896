"""The Prometheus exporter: a collector that reads the ledger when somebody scrapes.

Owns the exposition: prefix, common labels, text format. The only module that imports
prometheus_client, whose own counters would cost ten to fifty times an integer add on the hot path.
Nothing is counted here; what is exported is what `readout` finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtiers.errors import ConfigError
from kvtiers.metrics.catalogue import CATALOGUE
from kvtiers.metrics.gauges import GaugeSource
from kvtiers.metrics.histogram import Histogram
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.readout import Sample, read_all
from kvtiers.metrics.series import COMMON_LABELS, Kind, Series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEFAULT_PREFIX = "sglang:"

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


class PrometheusExporter(Collector):
    """Every series of the catalogue over one ledger, in the Prometheus text format.

    `gauges` is asked once per scrape for what facts cannot tell. `extra_labels` are the
    operator's own, put on every series after the common ones. Raises `ConfigError` for a prefix
    or a label that Prometheus would not take, or that a series has already.
    """

    def __init__(
        self,
        ledger: Ledger,
        gauges: GaugeSource,
        *,
        model_name: str,
        tp_rank: int = 0,
        pp_rank: int = 0,
        dp_rank: int = 0,
        extra_labels: Mapping[str, str] | None = None,
        prefix: str = DEFAULT_PREFIX,
    ) -> None:
        extra = dict(extra_labels or {})
        if problems := name_problems(prefix, extra):
            raise ConfigError("; ".join(problems))
        self._ledger = ledger
        self._gauges = gauges
        self._prefix = prefix
        self._label_names = (*COMMON_LABELS, *extra)
        self._label_values = (
            model_name,
            str(tp_rank),
            str(pp_rank),
            str(dp_rank),
            *extra.values(),
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """All series as the body of a scrape (`CONTENT_TYPE`). May be called from any thread."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One metric family per series, read in one moment between two folds."""
        for series, samples in read_all(self._ledger, self._gauges()):
            yield self._family(series, samples)

    def _family(self, series: Series, samples: list[Sample]) -> Metric:
        name = self._prefix + series.name
        help_text = series.help_text()
        labels = (*self._label_names, *series.label_names)
        family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if series.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(name, help_text, labels=labels)
        elif series.kind is Kind.COUNTER:
            family = CounterMetricFamily(name, help_text, labels=labels)
        else:
            family = GaugeMetricFamily(name, help_text, labels=labels)
        for label_values, value in samples:
            values = (*self._label_values, *map(str, label_values))
            if isinstance(value, Histogram):
                assert isinstance(family, HistogramMetricFamily), f"{name} is no histogram"
                family.add_metric(values, value.cumulative(), value.total)
            else:
                assert not isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
                family.add_metric(values, value)
        return family


def name_problems(prefix: str, extra_labels: Iterable[str]) -> list[str]:
    """What Prometheus would not take of a prefix and the names of extra labels."""
    problems = []
    if not _PREFIX.fullmatch(prefix):
        problems.append(
            f"metrics prefix '{prefix}' is not a valid start of a Prometheus name; use letters, "
            "digits, '_' and ':', as in 'kvtiers_'"
        )
    taken = {*COMMON_LABELS, "le", *(name for each in CATALOGUE for name in each.label_names)}
    for label in extra_labels:
        if not _LABEL.fullmatch(label):
            problems.append(f"metrics label '{label}' is not a valid Prometheus label name")
        elif label in taken:
            problems.append(f"metrics label '{label}' is one that series have already; rename it")
    return problems
