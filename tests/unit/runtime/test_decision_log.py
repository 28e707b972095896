"""A recorded cache replays to the same facts, and a log that was changed is noticed."""

from __future__ import annotations

import inspect
import json
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, PrefixCache, Refused
from kvtiers.errors import ConfigError, DecisionLogError, LeaseEnded
from kvtiers.events import Copy, HiCacheAck, Lookup
from kvtiers.runtime.decision_log import (
    CALLS,
    KEYS_MAX,
    DecisionLogFile,
    KeyDeltas,
    RecordedCache,
    config_from_plain,
)
from kvtiers.testing.cache_driver import NAMESPACE, CacheDriver, serving_cache
from kvtiers.testing.replay import main, replay
from kvtiers.types import (
    CacheConfig,
    CopyCosts,
    FailReason,
    Namespace,
    PoolSpec,
    PrefetchPolicy,
    Retention,
    SlotUnit,
    StoreOn,
    Tier,
    WritePolicy,
    token_key,
)

CONFIG = CacheConfig(
    device_pages=12,
    host_pages=16,
    page_tokens=2,
    storage=True,
    pools=(
        PoolSpec("kv", 128),
        PoolSpec("state", 64, unit=SlotUnit.STATE),
        PoolSpec("draft", 7, follows="kv"),
    ),
    write_policy=WritePolicy.WRITE_BACK,
    retention=Retention.EXCLUSIVE,
    store_on=StoreOn.EVICT,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    prefetch_threshold_tokens=1,
    copy_costs=CopyCosts(0.5, 0.25, 0.125),
    cleaner_low=0.3,
    cleaner_high=0.6,
)
OTHER_NAMESPACE = Namespace("a-model", lora="b", salt="c", extra="d")


def _play(cache: PrefixCache, seed: int, steps: int) -> None:
    """Random calls, drained after each, every kind of them and some that raise."""
    rng = random.Random(seed)
    copies: list[Copy] = []
    late: list[Copy] = []
    lookups: list[Lookup] = []
    leases: list[tuple[Any, list[int]]] = []
    pins: list[int] = []
    tickets: list[tuple[int, list[int]]] = []
    for step in range(steps):
        now = step / 7
        if step % 3 == 0:
            tokens = rng.choices(range(2), k=rng.randrange(1, 14))
            namespace = rng.choice([NAMESPACE, OTHER_NAMESPACE])
            ticket = None
            if tickets and rng.random() < 0.5:
                ticket, tokens = tickets.pop()
                namespace = NAMESPACE
            got = cache.admit(
                step, token_key(tokens), namespace, now, reserve_tokens=3, ticket_id=ticket
            )
            if not isinstance(got, Blocked | Refused):
                leases.append((got, tokens))
            elif ticket is not None:
                cache.cancel_prefetch(ticket, now)
        elif step % 3 == 1 and leases:
            lease, tokens = leases.pop(rng.randrange(len(leases)))
            if lease.voided or lease.load_ops or rng.random() < 0.1:
                cache.abort(lease, now)
            else:
                for _ in range(3):
                    tokens.append(rng.randrange(2))
                    if not cache.extend(lease, len(tokens), now):
                        tokens.pop()
                    cache.commit(lease, token_key(tokens), len(tokens), now)
                fork = cache.fork(lease, 10_000 + step, now) if rng.random() < 0.3 else None
                rng.choice([cache.finish, cache.retract])(lease, now)
                if fork is not None and not isinstance(fork, Blocked):
                    leases.append((fork, tokens))
                with pytest.raises(LeaseEnded):
                    cache.finish(lease, now)
        elif step % 3 == 2:
            kind = rng.randrange(9)
            if kind == 0:
                cache.evict(rng.choice([Tier.DEVICE, Tier.HOST]), rng.randrange(4), now)
            elif kind == 1 and rng.random() < 0.2:
                cache.flush(rng.choice([Tier.DEVICE, Tier.HOST]), now)
            elif kind == 2:
                pin = cache.pin(token_key([0, 1, 0, 1]), NAMESPACE, now, rng.choice([0.5, 1e9]))
                pins += [] if pin is None or rng.random() < 0.9 else [pin]
            elif kind == 3 and pins:
                cache.tick(now)
            elif kind == 4 and rng.random() < 0.1:
                cache.detach_storage(now)
                cache.attach_storage(now)
            elif kind > 4:
                tokens = rng.choices(range(2), k=rng.randrange(4, 14))
                ticket = cache.prefetch(step, token_key(tokens), NAMESPACE, now)
                tickets += [] if ticket is None else [(ticket, tokens)]
        for order in cache.take_orders():
            if isinstance(order, Copy):
                copies.append(order)
            elif isinstance(order, Lookup):
                lookups.append(order)
        if copies and rng.random() < 0.7:
            copy = copies.pop(rng.randrange(len(copies)))
            if rng.random() < 0.2:
                late.append(copy)
                cache.ack(HiCacheAck(copy.op_id, 0, ended=False, queued=0.1), now)
            else:
                ok = rng.randrange(copy.pages + 1)
                failure = None if ok == copy.pages else FailReason.TRANSFER
                cache.ack(HiCacheAck(copy.op_id, ok, failure, num_tokens_by_pool={"kv": ok}), now)
        if late and rng.random() < 0.3:
            cache.ack(HiCacheAck(late.pop().op_id, 0), now)
        if lookups:
            lookup = lookups.pop()
            cache.found(lookup.ticket_id, rng.randrange(lookup.pages + 1), now)
        cache.take_facts()


def _record(path: Path, seed: int = 1, steps: int = 400, config: CacheConfig = CONFIG) -> None:
    file = DecisionLogFile(path)
    cache = RecordedCache(serving_cache(config), file.write)
    _play(cache, seed, steps)
    cache.end()
    file.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_replay_to_equal_facts_in_another_process(tmp_path: Path, seed: int) -> None:
    _record(tmp_path / "log", seed)
    ended = subprocess.run(
        [sys.executable, "-m", "kvtiers.testing.replay", str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "facts equal" in ended.stdout
    assert "no end" not in ended.stdout


def test_the_random_calls_are_of_every_kind(tmp_path: Path) -> None:
    made = set()
    for seed in range(4):
        _record(tmp_path / "log", seed)
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        made |= {line["call"] for line in lines if "call" in line}
        made |= {"raised" for line in lines if "raised" in line}
    assert made >= CALLS - {"unpin"} | {"raised"}


def test_every_changing_call_of_the_interface_is_recorded() -> None:
    looking = {"match", "recount", "prefetch_ready", "take_facts", "take_orders"}
    methods = {
        name
        for name, value in inspect.getmembers(PrefixCache, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods - looking == CALLS
    for name in methods:
        assert inspect.signature(getattr(RecordedCache, name)).parameters.keys() == (
            inspect.signature(getattr(PrefixCache, name)).parameters.keys()
        )


def _lines(path: Path) -> list[str]:
    _record(path)
    return path.read_text().splitlines(keepends=True)


def test_a_changed_fact_is_noticed_where_it_stands(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "log")
    number, line = next((n, x) for n, x in enumerate(lines) if n > 100 and '{"facts":[[0,' in x)
    facts = json.loads(line)["facts"]
    facts[0][3] += 1
    lines[number] = json.dumps({"facts": facts}, separators=(",", ":")) + "\n"
    done = replay(lines)
    assert done.difference is not None
    assert done.difference.line == number + 1
    assert done.difference.recorded == lines[number][:-1]
    assert done.difference.replayed == line[:-1]


@pytest.mark.parametrize("damage", ["drop", "swap", "argument", "config"])
def test_a_changed_call_is_noticed(tmp_path: Path, damage: str) -> None:
    lines = _lines(tmp_path / "log")
    number = next(n for n, x in enumerate(lines) if n > 100 and '"call":"ack"' in x)
    if damage == "drop":
        del lines[number]
    elif damage == "swap":
        other = next(n for n, x in enumerate(lines) if n > number and '"call":"admit"' in x)
        lines[number], lines[other] = lines[other], lines[number]
    elif damage == "argument":
        line = json.loads(lines[number])
        line["with"]["ack"]["op_id"] += 100_000
        lines[number] = json.dumps(line, separators=(",", ":")) + "\n"
    else:
        lines[0] = lines[0].replace('"device_pages":12', '"device_pages":11')
    done = replay(lines)
    assert done.difference is not None


def test_the_command_shows_the_first_difference_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    lines = _lines(path)
    number = next(n for n, x in enumerate(lines) if n > 100 and '"facts"' in x)
    path.write_text("".join(lines[:number] + lines[number + 1 :]))
    assert main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert "differs" in shown
    assert "recorded:" in shown
    assert "replayed:" in shown


def test_a_log_cut_short_replays_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    text = "".join(_lines(path))
    path.write_text(text[: len(text) // 2])
    assert main([str(path)]) == 0
    assert "no end" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        '{"decision_log":99,"config":{}}\n',
        '{"decision_log":1,"config":{}}\n',
        "[]\n",
    ],
)
def test_what_is_not_a_log_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    assert main([str(path)]) == 2
    with pytest.raises(DecisionLogError):
        replay(text.splitlines(keepends=True))


def test_a_call_nobody_knows_and_a_lease_nobody_granted_are_refused(tmp_path: Path) -> None:
    header = _lines(tmp_path / "log")[0]
    for line in (
        '{"call":"__init__","now":0,"with":{},"gave":null}\n',
        '{"call":"take_facts","now":0,"with":{},"gave":null}\n',
        '{"call":"finish","now":0,"with":{"lease":7},"gave":null}\n',
        '{"something":1}\n',
    ):
        with pytest.raises(DecisionLogError, match="line 2"):
            replay([header, line])


def test_a_cache_that_decides_otherwise_is_noticed(tmp_path: Path) -> None:
    class Other(UnifiedRadixCache):
        def evict(self, tier: Tier, pages: int, now: float) -> int:
            return super().evict(tier, max(0, pages - 1), now)

    lines = _lines(tmp_path / "log")
    done = replay(lines, lambda config: cast(PrefixCache, Other(config)))
    assert done.difference is not None
    assert '"call":"evict"' in done.difference.recorded


def test_the_configuration_survives_the_header_field_by_field(tmp_path: Path) -> None:
    header = json.loads(_lines(tmp_path / "log")[0])
    assert config_from_plain(header["config"]) == CONFIG


def test_a_growing_key_is_written_once() -> None:
    writer, reader = KeyDeltas(), KeyDeltas()
    prompt = np.arange(5000, dtype="<i4").tobytes()
    first = writer.shorten(1, prompt)
    second = writer.shorten(1, prompt + b"abcd")
    assert len(first[1]) > 20_000
    assert len(second[1]) == 8
    assert reader.restore(1, first) == prompt
    assert reader.restore(1, second) == prompt + b"abcd"


def test_keys_come_back_whatever_order_requests_come_in() -> None:
    rng = random.Random(5)
    writer, reader = KeyDeltas(), KeyDeltas()
    for _ in range(4 * KEYS_MAX):
        request = rng.randrange(2 * KEYS_MAX)
        key = bytes(rng.choices(b"ab", k=4 * rng.randrange(4)))
        assert reader.restore(request, writer.shorten(request, key)) == key


def test_a_recorded_cache_behaves_as_the_cache_it_wraps() -> None:
    lines: list[str] = []

    def recorded(config: CacheConfig) -> PrefixCache:
        return cast(PrefixCache, RecordedCache(serving_cache(config), lines.append))

    driver = CacheDriver(CacheConfig(device_pages=8, host_pages=8, page_tokens=2), recorded)
    tokens = list(range(9))
    assert driver.serve(tokens).device_hit == 0
    assert driver.serve(tokens).device_hit == 8
    assert driver.match(tokens) == (4, 4, 4)
    assert len(lines) > 5


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    _record(tmp_path / "log", steps=1)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_path_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="existing directory"):
        DecisionLogFile(tmp_path / "missing" / "log")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    file = DecisionLogFile(Path("/dev/full"))
    cache = RecordedCache(serving_cache(CONFIG), file.write)
    _play(cache, 1, 400)
    file.close()
    assert file.failure is not None
