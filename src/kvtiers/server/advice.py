"""What the server decided, in a few lines, and which settings make a tier useless.

Pure: reads an engine's numbers, returns sentences. A warning names the setting, says what follows
from it, and the way out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvtiers.engine.port import Engine
from kvtiers.types import Retention, WritePolicy

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def decisions(engine: Engine, link_ceilings: Mapping[str, float]) -> list[str]:
    """What an operator wants to know before the first request, one line per thing.

    `link_ceilings` are measured bytes per second by path.
    """
    config = engine.config
    page_bytes = engine.kv_bytes_per_token * config.page_tokens
    lines = [
        f"model    {engine.model_name}, {config.dtype}, context {engine.context_tokens} tokens, "
        f"{config.num_threads} compute thread(s)",
        f"kv       {engine.kv_bytes_per_token:,} bytes per token, pages of {config.page_tokens} "
        f"tokens ({_size(page_bytes)})",
        f"device   {_tier(engine.device_pages, config.page_tokens, page_bytes)}",
        f"host     {_tier(engine.host_pages, config.page_tokens, page_bytes)}",
    ]
    if config.storage_dir is None:
        lines.append("storage  none")
    else:
        quota_bytes = int(config.storage_gib * GIB)
        quota = (
            f"quota {_tier(quota_bytes // page_bytes, config.page_tokens, page_bytes)}"
            if quota_bytes
            else "no quota"
        )
        lines.append(f"storage  {config.storage_dir}, {quota}")
    lines.append(
        f"policy   {config.write_policy}, {config.retention}, store on {config.store_on}, "
        f"evict {config.eviction}, prefetch {config.prefetch_policy} "
        f"from {config.prefetch_threshold_tokens} tokens"
    )
    for path, bytes_per_second in link_ceilings.items():
        lines.append(f"link     {path.replace('_', ' ')} {bytes_per_second / 1e9:.1f} GB/s")
    lines.append(
        f"limits   {config.max_running_requests} running and {config.max_waiting_requests} waiting "
        f"requests, {config.max_batch_tokens} tokens per step"
    )
    return lines


def warnings(engine: Engine) -> list[str]:
    """Settings that make a tier useless, or a request impossible that one would expect to work."""
    config = engine.config
    found: list[str] = []
    device_tokens = engine.device_pages * config.page_tokens
    host_tokens = engine.host_pages * config.page_tokens
    if device_tokens < engine.context_tokens:
        found.append(
            f"the device tier holds {device_tokens} tokens, less than the context of "
            f"{engine.context_tokens}: longer prompts are refused; raise --device-gib"
        )
    if (
        engine.host_pages
        and config.retention is Retention.INCLUSIVE
        and host_tokens <= device_tokens
    ):
        found.append(
            f"the host tier ({host_tokens} tokens) is not larger than the device tier "
            f"({device_tokens}) and keeps the same pages (retention inclusive): it is nearly "
            "useless; raise --host-gib, or use --write-policy write_back --retention exclusive"
        )
    if not engine.host_pages and config.write_policy is WritePolicy.WRITE_BACK:
        found.append("--write-policy write_back without a host tier has nowhere to write back to")
    quota_tokens = int(config.storage_gib * GIB) // engine.kv_bytes_per_token
    if config.storage_dir is not None and 0 < quota_tokens <= host_tokens:
        found.append(
            f"the storage quota ({quota_tokens} tokens) is not larger than the host tier "
            f"({host_tokens}): storage helps after a restart only; raise --storage-gib"
        )
    if config.storage_dir is not None and config.prefetch_threshold_tokens >= engine.context_tokens:
        found.append(
            f"--prefetch-threshold-tokens {config.prefetch_threshold_tokens} is beyond the context "
            f"of {engine.context_tokens}: nothing is ever read from storage; lower it"
        )
    if config.load_back_threshold_tokens >= engine.context_tokens:
        found.append(
            f"--load-back-threshold-tokens {config.load_back_threshold_tokens} is beyond the "
            f"context of {engine.context_tokens}: nothing is ever loaded back; lower it"
        )
    cores = os.cpu_count() or 1
    if config.num_threads > cores:
        found.append(f"--num-threads {config.num_threads} on {cores} cores makes every step slower")
    return found


def _tier(pages: int, page_tokens: int, page_bytes: int) -> str:
    if not pages:
        return "none"
    return f"{pages * page_tokens:,} tokens ({pages:,} pages, {_size(pages * page_bytes)})"


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"
