"""What the pages say about metrics is what the code exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtiers.metrics import docs
from kvtiers.metrics.catalogue import CATALOGUE
from kvtiers.metrics.identities import IDENTITY_NAMES
from kvtiers.metrics.series import COMMON_LABELS, Kind
from kvtiers.types import LOSS_REASONS, BlockedOn, MissReason

DOCS = Path(__file__).parents[2] / "docs"


def test_the_metrics_reference_is_the_one_that_the_catalogue_generates() -> None:
    committed = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert committed == docs.render(), (
        "docs/metrics.md is out of date: run python -m kvtiers.metrics.docs docs/metrics.md"
    )


def test_the_generator_writes_a_file_or_prints_and_refuses_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "metrics.md"
    assert docs.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == docs.render()
    assert docs.main([]) == 0
    assert capsys.readouterr().out == docs.render()
    assert docs.main(["--help"]) == 2


def test_the_operating_guide_names_only_series_and_identities_that_exist() -> None:
    known = set(IDENTITY_NAMES)
    for series in CATALOGUE:
        known.add(series.name)
        if series.kind is Kind.HISTOGRAM:
            known |= {f"{series.name}_{suffix}" for suffix in ("sum", "count", "bucket")}
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    named = set(re.findall(r"sglang:([a-z0-9_]+)", page))
    assert named <= known
    assert len(named) > 20


def test_the_operating_guide_uses_only_label_values_that_exist() -> None:
    values: dict[str, set[str]] = {}
    for series in CATALOGUE:
        for label in series.labels:
            values.setdefault(label.name, set()).update(label.values)
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    selected = re.findall(r'([a-z_]+)=~?"([^"]*)"', page)
    assert selected
    for name, text in selected:
        if name in COMMON_LABELS:
            continue
        assert set(text.split("|")) <= values[name], f'{name}="{text}"'


@pytest.mark.parametrize("reason", [*MissReason, *LOSS_REASONS, *BlockedOn])
def test_the_operating_guide_says_what_to_do_about_every_reason_of_a_miss_loss_or_wait(
    reason: str,
) -> None:
    assert f"`{reason}`" in (DOCS / "operating.md").read_text(encoding="utf-8")
