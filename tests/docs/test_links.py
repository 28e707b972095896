"""What the documentation points at is there: relative links, and files named in the tour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FILE_IN_TOUR = re.compile(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text("utf-8")) if "://" not in t]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_file_of_the_tour_exists() -> None:
    named = set(FILE_IN_TOUR.findall((ROOT / "docs" / "tour.md").read_text("utf-8")))
    assert len(named) > 20
    bases = (ROOT, ROOT / "src" / "kvtiers")
    missing = [name for name in named if not any((base / name).exists() for base in bases)]
    assert not missing


def test_every_option_in_the_flag_table_exists() -> None:
    text = (ROOT / "docs" / "hicache-flags.md").read_text("utf-8")
    reference = (ROOT / "docs" / "cli.md").read_text("utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    ours = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]+", row[1])}
    assert len(ours) > 15
    assert not {flag for flag in ours if f"`{flag}`" not in reference}
