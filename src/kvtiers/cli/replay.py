"""`kvtiers replay`: a trace through the real cache, in virtual time or without any."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvtiers.cli.checks import check_positive, check_sizes, check_whole
from kvtiers.cli.endings import ends_in_words
from kvtiers.cli.machine_options import (
    MachineFlags,
    PageTokensOption,
    SpeedOption,
    page_tokens_of,
)
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.cli.replay_text import print_logical, print_replay
from kvtiers.cli.serving_options import ServingFlags
from kvtiers.cli.trace_options import (
    JsonOption,
    KvBytesOption,
    ModelOption,
    TraceArgument,
    TraceFlags,
    kv_bytes_of,
    print_json,
)
from kvtiers.errors import ConfigError
from kvtiers.planner.logical import STAGING, LogicalResult, replay_logically
from kvtiers.planner.replay import ReplayConfig
from kvtiers.planner.replay import replay as replay_in_time
from kvtiers.planner.summary import summarise
from kvtiers.planner.units import PAGES_MAX, CapacityScale, CapacityUnit, enough_text
from kvtiers.types import (
    CacheConfig,
    PoolSpec,
    Retention,
    StoreOn,
    WritePolicy,
)


@ends_in_words
@with_option_groups
def replay(
    trace: TraceArgument,
    *,
    device: Annotated[float, typer.Option(help="Size of the device tier.", show_default=False)],
    host: Annotated[float, typer.Option(help="Size of the host tier; 0: none.")] = 0.0,
    storage: Annotated[float, typer.Option(help="Size of storage, inf allowed; 0: none.")] = 0.0,
    unit: Annotated[
        CapacityUnit | None,
        typer.Option(
            help="Unit of sizes (blocks: of the trace); default gib, and blocks with --logical."
        ),
    ] = None,
    logical: Annotated[
        bool, typer.Option("--logical", help="Decisions only: no time, one request at a time.")
    ] = False,
    write_policy: Annotated[
        WritePolicy, typer.Option(help="When to back up.")
    ] = WritePolicy.WRITE_THROUGH,
    retention: Annotated[
        Retention, typer.Option(help="What the host gives up first.")
    ] = Retention.INCLUSIVE,
    store_on: Annotated[StoreOn, typer.Option(help="When to store.")] = StoreOn.BACKUP,
    eviction: Annotated[str, typer.Option(help="Eviction policy.")] = "lru",
    page_tokens: PageTokensOption = None,
    speed: SpeedOption = 1.0,
    model: ModelOption = None,
    kv_bytes_per_token: KvBytesOption = None,
    machine: MachineFlags,
    serving: ServingFlags,
    json: JsonOption = False,
    reading: TraceFlags,
) -> None:
    """Drive the cache and the scheduler that serve with a trace, in virtual time.

    Prints hits per tier, TTFT and end-to-end times, queueing, what went over each link and what
    was lost; --json has the whole ledger and the series over time. A machine that nobody
    calibrated is printed as unvalidated. With --logical only the cache's decisions are replayed:
    serial, prompts only, copies instantaneous, the partial last block a page, last-token rule off.
    """
    _check_tiers(device, host, storage, retention, write_policy)
    check_whole(1, page_tokens=page_tokens)
    check_positive(speed=speed)
    kv_bytes = kv_bytes_of(model, kv_bytes_per_token)
    policies: dict[str, Any] = {
        "write_policy": write_policy,
        "retention": retention,
        "store_on": store_on,
        "eviction": eviction,
    }
    if logical:
        _check_logical(storage, page_tokens, speed, machine, serving)
        columns = reading.load(trace)
        scale = CapacityScale(unit or CapacityUnit.BLOCKS, columns.block_tokens, kv_bytes)
        config = CacheConfig(
            device_pages=_pages(scale, "--device", device),
            host_pages=_pages(scale, "--host", host),
            **policies,
        )
        result = replay_logically(columns, config)
        if json:
            print_json(_logical_json(result, config))
        else:
            print_logical(result, config)
        return

    shape, found = machine.with_model(model)
    if kv_bytes_per_token is not None:
        shape = replace(shape, kv_bytes_per_token=kv_bytes_per_token)
    settings = found.serving(serving.known())
    columns = reading.load(trace)
    size = page_tokens_of(page_tokens, columns.block_tokens)
    if unit is CapacityUnit.BLOCKS:  # the trace's, which are not pages
        unit = CapacityUnit.TOKENS
        device, host, storage = (n * columns.block_tokens for n in (device, host, storage))
    scale = CapacityScale(unit or CapacityUnit.GIB, size, shape.kv_bytes_per_token)
    pool = PoolSpec("kv", shape.kv_bytes_per_token * size)
    cache = CacheConfig(
        device_pages=_pages(scale, "--device", device),
        host_pages=_pages(scale, "--host", host),
        storage=_pages(scale, "--storage", storage) > 0,
        page_tokens=size,
        pools=(pool,),
        prefetch_policy=settings.prefetch_policy,
        prefetch_threshold_tokens=settings.prefetch_threshold_tokens,
        **policies,
    )
    # late copies are in the ledger and in the report; the live server's log lines say no more
    logging.getLogger("kvtiers.runtime").setLevel(logging.ERROR)
    outcome = summarise(
        replay_in_time(
            columns,
            ReplayConfig(
                cache=cache,
                machine=found,
                scheduler=settings.scheduler(),
                storage_pages=scale.blocks(storage),
                speed=speed,
            ),
        )
    )
    if json:
        print_json({**outcome, "serving": settings.to_dict()})
    else:
        print_replay(outcome, shape.name, settings)


def _check_tiers(
    device: float, host: float, storage: float, retention: Retention, write_policy: WritePolicy
) -> None:
    """`ConfigError` for tiers that no cache has, in the words of the options."""
    if math.isinf(device) or math.isinf(host):
        raise ConfigError(
            "--device and --host need finite sizes in a replay; only --storage may be inf"
        )
    check_positive(device=device)
    check_sizes(host=host)
    if storage < 0:
        raise ConfigError(f"--storage is {storage:g}; it must be 0 or more, inf allowed")
    if storage > 0 and not host:
        raise ConfigError(
            "--storage is reached through the host tier: give --host as well, or leave --storage "
            "out"
        )
    if retention is Retention.EXCLUSIVE and write_policy is not WritePolicy.WRITE_BACK:
        raise ConfigError(
            f"--retention exclusive with --write-policy {write_policy} would throw away host "
            "copies just before the device drops the pages; give --write-policy write_back or "
            "--retention inclusive"
        )


def _check_logical(
    storage: float,
    page_tokens: int | None,
    speed: float,
    machine: MachineFlags,
    serving: ServingFlags,
) -> None:
    """`ConfigError` for options that need time, which a logical replay has not."""
    without_meaning = {
        "--storage": storage > 0,
        "--page-tokens": page_tokens is not None,
        "--speed": speed != 1.0,
        "the options of the machine": machine != MachineFlags(),
        **dict.fromkeys(serving.given, True),
    }
    given = [name for name, is_given in without_meaning.items() if is_given]
    if given:
        raise ConfigError(
            f"--logical replays decisions without time, one page per block: {', '.join(given)} "
            "cannot apply; leave that out, or --logical"
        )


def _pages(scale: CapacityScale, flag: str, size: float) -> int:
    """Whole pages of a tier of this size; `ConfigError` for one that cannot hold any."""
    if math.isinf(size):
        return sys.maxsize
    pages = int(scale.blocks(size))
    if size > 0 and not pages:
        raise ConfigError(
            f"{flag} {size:g} ({scale.unit}) holds no page of {scale.block_tokens} tokens; give at "
            f"least {enough_text(scale.units_per_block)}"
        )
    if pages > PAGES_MAX and flag != "--storage":
        raise ConfigError(
            f"{flag} {size:g} ({scale.unit}) is {pages:.3g} pages of {scale.block_tokens} tokens; "
            f"a replay keeps account of {PAGES_MAX:,} at most: give less, or count in larger pages"
        )
    return pages


def _logical_json(result: LogicalResult, config: CacheConfig) -> dict[str, Any]:
    return {
        "definition": "blocks",
        "denominator": result.prompt_blocks,
        "hit_ratio": result.hit_ratio,
        "hit_blocks": {"device": result.device_hit_blocks, "host": result.host_hit_blocks},
        "requests": result.requests,
        "refused_requests": result.refused_requests,
        "device_blocks": config.device_pages,
        "host_blocks": config.host_pages,
        "write_policy": config.write_policy.value,
        "retention": config.retention.value,
        "note": STAGING if config.retention is Retention.EXCLUSIVE else "",
        "ledger": result.ledger.to_dict(),
    }
