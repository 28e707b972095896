"""What the server says at start, and which settings it warns of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine

from kvtiers.errors import ConfigError
from kvtiers.server.advice import decisions, warnings
from kvtiers.server.settings import ServerSettings
from kvtiers.types import Retention, WritePolicy


def _engine(device_pages: int = 64, host_pages: int = 256, **config: object) -> FakeEngine:
    engine = FakeEngine()
    engine.device_pages, engine.host_pages = device_pages, host_pages
    engine.config = replace(engine.config, **config)
    return engine


def test_a_sensible_setting_has_no_warning() -> None:
    assert warnings(_engine()) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (_engine(device_pages=16), "longer prompts are refused"),
        (_engine(host_pages=64), "nearly useless"),
        (_engine(host_pages=0, write_policy=WritePolicy.WRITE_BACK), "nowhere to write back to"),
        (_engine(storage_dir=Path("x"), storage_gib=1e-6), "after a restart only"),
        (_engine(storage_dir=Path("x"), prefetch_threshold_tokens=512), "read from storage"),
        (_engine(load_back_threshold_tokens=512), "ever loaded back"),
        (_engine(num_threads=512), "slower"),
    ],
)
def test_a_setting_that_makes_a_tier_useless_is_warned_of(engine: FakeEngine, words: str) -> None:
    found = warnings(engine)
    assert len(found) == 1
    assert words in found[0]


def test_distinct_pages_make_a_small_host_useful() -> None:
    exclusive = {"write_policy": WritePolicy.WRITE_BACK, "retention": Retention.EXCLUSIVE}
    assert warnings(_engine(host_pages=32, **exclusive)) == []


def test_it_says_what_each_tier_holds_in_tokens_and_bytes() -> None:
    said = decisions(_engine(storage_dir=Path("kv"), storage_gib=1.0), {"device_to_host": 8.25e9})
    assert "kv       64 bytes per token, pages of 16 tokens (1.00 KiB)" in said
    assert "host     4,096 tokens (256 pages, 256.00 KiB)" in said
    assert "storage  kv, quota 16,777,216 tokens (1,048,576 pages, 1.00 GiB)" in said
    assert "link     device to host 8.2 GB/s" in said


@pytest.mark.parametrize("key", ["schlüssel", " key", "key\n", "\x07"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key holds what an Authorization header cannot"):
        ServerSettings(api_key=key)
    with pytest.raises(ConfigError, match="--admin-key holds what an Authorization header cannot"):
        ServerSettings(admin_key=key)


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ServerSettings(host="", port=70_000, body_bytes_max=0, api_key="", pin_budget_share=2)
    for words in ("--host", "--port", "--body-mib-max", "--api-key", "--pin-budget-share"):
        assert words in str(error.value)
