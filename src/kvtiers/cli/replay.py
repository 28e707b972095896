"""`kvtiers replay`: a trace through the real cache, in virtual time or without any."""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any

import typer

from kvtiers.cli.machine_options import (
    MachineFlags,
    PageTokensOption,
    SpeedOption,
    page_tokens_of,
)
from kvtiers.cli.option_groups import with_option_groups
from kvtiers.cli.replay_text import print_logical, print_replay
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
from kvtiers.planner.units import CapacityScale, CapacityUnit
from kvtiers.types import (
    CacheConfig,
    PoolSpec,
    PrefetchPolicy,
    Retention,
    StoreOn,
    WritePolicy,
)


@with_option_groups
def replay(
    trace: TraceArgument,
    *,
    device: Annotated[float, typer.Option(help="Size of the device tier.", show_default=False)],
    host: Annotated[float, typer.Option(help="Size of the host tier; 0: none.")] = 0.0,
    storage: Annotated[float, typer.Option(help="Size of storage, inf allowed; 0: none.")] = 0.0,
    unit: Annotated[
        CapacityUnit | None,
        typer.Option(help="Unit of sizes; default gib, and blocks with --logical."),
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
    prefetch_policy: Annotated[
        PrefetchPolicy, typer.Option(help="How long an admission waits for storage.")
    ] = PrefetchPolicy.TIMEOUT,
    page_tokens: PageTokensOption = None,
    speed: SpeedOption = 1.0,
    model: ModelOption = None,
    kv_bytes_per_token: KvBytesOption = None,
    machine: MachineFlags,
    json: JsonOption = False,
    reading: TraceFlags,
) -> None:
    """Drive the cache and the scheduler that serve with a trace, in virtual time.

    Prints hits per tier, TTFT and end-to-end times, queueing, what went over each link and what
    was lost; --json has the whole ledger and the series over time. A machine that nobody
    calibrated is printed as unvalidated. With --logical only the cache's decisions are replayed:
    serial, prompts only, copies instantaneous, the partial last block a page, last-token rule off.
    """
    columns = reading.load(trace)
    policies: dict[str, Any] = {
        "write_policy": write_policy,
        "retention": retention,
        "store_on": store_on,
        "eviction": eviction,
        "prefetch_policy": prefetch_policy,
    }
    if logical:
        scale = CapacityScale(
            unit or CapacityUnit.BLOCKS,
            columns.block_tokens,
            kv_bytes_of(model, kv_bytes_per_token),
        )
        config = CacheConfig(
            device_pages=int(scale.blocks(device)),
            host_pages=int(scale.blocks(host)),
            storage=storage > 0,
            **policies,
        )
        result = replay_logically(columns, config)
        if json:
            print_json(_logical_json(result, config))
        else:
            print_logical(result, config)
        return

    kv_bytes_of(model, kv_bytes_per_token)  # not both
    shape, found = machine.with_model(model)
    size = page_tokens_of(page_tokens, columns.block_tokens)
    scale = CapacityScale(unit or CapacityUnit.GIB, size, shape.kv_bytes_per_token)
    if math.isinf(device) or math.isinf(host):
        raise ConfigError("device and host need finite sizes in a replay; only storage may be inf")
    pool = PoolSpec("kv", shape.kv_bytes_per_token * size)
    cache = CacheConfig(
        device_pages=int(scale.blocks(device)),
        host_pages=int(scale.blocks(host)),
        storage=storage > 0,
        page_tokens=size,
        pools=(pool,),
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
                storage_pages=scale.blocks(storage),
                speed=speed,
            ),
        )
    )
    if json:
        print_json(outcome)
    else:
        print_replay(outcome, shape.name)


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
