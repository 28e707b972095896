"""`kvtiers serve`: a model behind the cache, over HTTP, until a signal ends it."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtiers.errors import ConfigError
from kvtiers.types import PrefetchPolicy, Retention, StoreOn, WritePolicy

CAPTURE_MIB = 1024
"""Logits kept with --debug-hooks, until they are fetched."""

_TIERS, _POLICIES, _LIMITS, _HTTP = "Tiers", "Policies", "Limits", "HTTP"


def _option(flag: str, env: str, help_text: str, panel: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        flag, envvar=f"KVTIERS_{env}", help=help_text, rich_help_panel=panel
    )
    return info


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--metrics-label '{text}' is not of the form KEY=VALUE")
    return name, value


def _mib(flag: str, number: float) -> int:
    if not 0 < number < math.inf:
        raise ConfigError(f"{flag} is {number}; it must be a finite number above 0")
    return int(number * (1 << 20))


def _check_keys_of_environment() -> None:
    """`ConfigError` for a key that is set and empty: it would be taken for none, and what somebody
    meant to guard would be open."""
    for name in ("KVTIERS_API_KEY", "KVTIERS_ADMIN_KEY"):
        if os.environ.get(name) == "":
            raise ConfigError(f"{name} is set and empty; give a key, or unset it for none")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            envvar="KVTIERS_MODEL", help="A known name, or a directory with safetensors or a GGUF."
        ),
    ] = "smollm2-135m-instruct",
    device_gib: Annotated[
        float, _option("--device-gib", "DEVICE_GIB", "KV memory on the device.", _TIERS)
    ] = 0.5,
    host_gib: Annotated[
        float, _option("--host-gib", "HOST_GIB", "KV memory on the host; 0: no host tier.", _TIERS)
    ] = 1.0,
    device_pages: Annotated[
        int | None,
        _option("--device-pages", "DEVICE_PAGES", "Instead of --device-gib, in pages.", _TIERS),
    ] = None,
    host_pages: Annotated[
        int | None,
        _option("--host-pages", "HOST_PAGES", "Instead of --host-gib, in pages.", _TIERS),
    ] = None,
    storage: Annotated[
        Path | None, _option("--storage", "STORAGE", "Directory of the storage tier.", _TIERS)
    ] = None,
    storage_gib: Annotated[
        float,
        _option(
            "--storage-gib",
            "STORAGE_GIB",
            "Quota of the storage tier; 0: no quota, it grows as far as its disk has room.",
            _TIERS,
        ),
    ] = 0.0,
    page_tokens: Annotated[
        int, _option("--page-tokens", "PAGE_TOKENS", "Tokens per page.", _TIERS)
    ] = 16,
    dtype: Annotated[
        str, _option("--dtype", "DTYPE", "float32, bfloat16 or float16.", _TIERS)
    ] = "float32",
    write_policy: Annotated[
        WritePolicy, _option("--write-policy", "WRITE_POLICY", "When to back up.", _POLICIES)
    ] = WritePolicy.WRITE_THROUGH,
    retention: Annotated[
        Retention, _option("--retention", "RETENTION", "What host gives up first.", _POLICIES)
    ] = Retention.INCLUSIVE,
    store_on: Annotated[
        StoreOn, _option("--store-on", "STORE_ON", "When host pages are stored.", _POLICIES)
    ] = StoreOn.BACKUP,
    eviction: Annotated[
        str, _option("--eviction", "EVICTION", "Which pages leave first: lru or lfu.", _POLICIES)
    ] = "lru",
    prefetch_policy: Annotated[
        PrefetchPolicy,
        _option(
            "--prefetch-policy",
            "PREFETCH_POLICY",
            "How long an admission waits for storage.",
            _POLICIES,
        ),
    ] = PrefetchPolicy.TIMEOUT,
    prefetch_threshold_tokens: Annotated[
        int,
        _option(
            "--prefetch-threshold-tokens",
            "PREFETCH_THRESHOLD_TOKENS",
            "Fewer tokens than this are not asked for in storage.",
            _POLICIES,
        ),
    ] = 64,
    load_back_threshold_tokens: Annotated[
        int,
        _option(
            "--load-back-threshold-tokens",
            "LOAD_BACK_THRESHOLD_TOKENS",
            "Fewer tokens than this are computed again rather than loaded back.",
            _POLICIES,
        ),
    ] = 1,
    schedule_policy: Annotated[
        str,
        _option(
            "--schedule-policy",
            "SCHEDULE_POLICY",
            "Order of admission: fcfs, lpm or priority.",
            _POLICIES,
        ),
    ] = "fcfs",
    context_tokens: Annotated[
        int | None,
        _option(
            "--context-tokens",
            "CONTEXT_TOKENS",
            "Prompt and answer together; default, and at most: the model's limit.",
            _LIMITS,
        ),
    ] = None,
    max_running_requests: Annotated[
        int, _option("--max-running-requests", "MAX_RUNNING_REQUESTS", "In one batch.", _LIMITS)
    ] = 64,
    max_waiting_requests: Annotated[
        int,
        _option(
            "--max-waiting-requests",
            "MAX_WAITING_REQUESTS",
            "Requests beyond these are answered 429.",
            _LIMITS,
        ),
    ] = 1024,
    max_batch_tokens: Annotated[
        int,
        _option("--max-batch-tokens", "MAX_BATCH_TOKENS", "Positions computed per step.", _LIMITS),
    ] = 1024,
    output_tokens_max: Annotated[
        int,
        _option("--output-tokens-max", "OUTPUT_TOKENS_MAX", "Longest answer, in tokens.", _LIMITS),
    ] = 4096,
    body_mib_max: Annotated[
        float, _option("--body-mib-max", "BODY_MIB_MAX", "Longest request body.", _LIMITS)
    ] = 4.0,
    request_timeout_seconds: Annotated[
        float,
        _option(
            "--request-timeout-seconds",
            "REQUEST_TIMEOUT_SECONDS",
            "A request's time. What it has made by then is its answer; without a token it "
            "fails (504).",
            _LIMITS,
        ),
    ] = 600.0,
    num_threads: Annotated[
        int, _option("--num-threads", "NUM_THREADS", "Threads that compute on a CPU.", _LIMITS)
    ] = 1,
    pin_budget_share: Annotated[
        float,
        _option(
            "--pin-budget-share",
            "PIN_BUDGET_SHARE",
            "Share of the smaller of the device and host tier that pins may hold.",
            _LIMITS,
        ),
    ] = 0.25,
    host: Annotated[str, _option("--host", "HOST", "Address to listen on.", _HTTP)] = "127.0.0.1",
    port: Annotated[
        int,
        _option(
            "--port",
            "PORT",
            "Port of /v1, /cache, /health, /ready and /metrics alike; 0: a free one.",
            _HTTP,
        ),
    ] = 8000,
    api_key: Annotated[str | None, _option("--api-key", "API_KEY", "Key for /v1.", _HTTP)] = None,
    admin_key: Annotated[
        str | None, _option("--admin-key", "ADMIN_KEY", "Key for /cache.", _HTTP)
    ] = None,
    metrics_prefix: Annotated[
        str, _option("--metrics-prefix", "METRICS_PREFIX", "Before every series' name.", _HTTP)
    ] = "sglang:",
    metrics_label: Annotated[
        list[str] | None,
        _option("--metrics-label", "METRICS_LABEL", "KEY=VALUE on every series.", _HTTP),
    ] = None,
    drain_seconds: Annotated[
        float,
        _option(
            "--drain-seconds",
            "DRAIN_SECONDS",
            "What answers in progress may still take after SIGTERM; a second signal ends them.",
            _HTTP,
        ),
    ] = 30.0,
    models_dir: Annotated[
        Path | None, _option("--models-dir", "MODELS_DIR", "Where converted models are.", _LIMITS)
    ] = None,
    decision_log: Annotated[
        Path | None,
        _option(
            "--decision-log",
            "DECISION_LOG",
            "File that records every call to the cache; it holds prompts.",
            _LIMITS,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        _option(
            "--record",
            "RECORD",
            "File that requests are recorded in as a trace, for the planner; replaced at start. "
            "Holds lengths, times and salted hashes, no text and no tokens. If it can no longer "
            "be written (a full disk), recording ends with a line in the log and serving goes on.",
            _LIMITS,
        ),
    ] = None,
    record_tokens: Annotated[
        bool,
        _option(
            "--record-tokens",
            "RECORD_TOKENS",
            "With --record: the prompts' token ids too; as confidential as the prompts.",
            _LIMITS,
        ),
    ] = False,
    debug_hooks: Annotated[
        bool,
        typer.Option(
            "--debug-hooks",
            hidden=True,
            help="Routes that reveal logits and damage pages, for the demo and tests.",
        ),
    ] = False,
) -> None:
    """Serve a model over an OpenAI-compatible API.

    Every option can also be given by environment, as shown. SIGTERM finishes the answers in
    progress and exits 0 (1 where some had to be ended); a restart on the same --storage finds
    what was stored.

    /metrics is served on --port beside the API and needs no key, for Prometheus to scrape.
    """
    from kvtiers.engine.config import EngineConfig
    from kvtiers.server.settings import ServerSettings

    _check_keys_of_environment()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        admin_key=admin_key,
        body_bytes_max=_mib("--body-mib-max", body_mib_max),
        output_tokens_max=output_tokens_max,
        request_timeout_seconds=request_timeout_seconds,
        drain_seconds=drain_seconds,
        pin_budget_share=pin_budget_share,
        metrics_prefix=metrics_prefix,
        metrics_labels=tuple(_label(text) for text in metrics_label or ()),
        record=record,
        record_tokens=record_tokens,
        debug_hooks=debug_hooks,
    )
    config = EngineConfig(
        model=model,
        dtype=dtype,
        num_threads=num_threads,
        models_dir=models_dir,
        page_tokens=page_tokens,
        device_gib=device_gib,
        device_pages=device_pages,
        host_gib=host_gib,
        host_pages=host_pages,
        storage_dir=storage,
        storage_gib=storage_gib,
        write_policy=write_policy,
        retention=retention,
        store_on=store_on,
        eviction=eviction,
        prefetch_policy=prefetch_policy,
        prefetch_threshold_tokens=prefetch_threshold_tokens,
        load_back_threshold_tokens=load_back_threshold_tokens,
        schedule_policy=schedule_policy,
        max_running_requests=max_running_requests,
        max_waiting_requests=max_waiting_requests,
        max_batch_tokens=max_batch_tokens,
        context_tokens=context_tokens,
        capture_logits_mib=CAPTURE_MIB if debug_hooks else 0,
        decision_log=decision_log,
    )
    from kvtiers.server.launch import launch

    if not launch(config, settings, lambda line: print(line, flush=True)):
        raise typer.Exit(1)
