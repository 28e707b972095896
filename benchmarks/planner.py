"""How fast the planner is: the curve, its peer, replays and plans, on real and made-up traffic.

    python benchmarks/planner.py TRACE [--peer-python PYTHON] [--only curve,...] [--json FILE]

`TRACE` is the public Mooncake conversation trace. `--peer-python` is the interpreter of a separate
virtual environment with the package kvcache-simulator, whose C++ sweep over the eight known sizes
is timed in the same run, alternating with our curve. `plan` is not among the benchmarks that run
unless it is asked for with `--only plan`. Every other figure is the best of a few runs, in
seconds of wall time, and the load of the machine is printed with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, exact_curve
from kvtiers.planner.evaluate import Setting, evaluate, with_short_outputs
from kvtiers.planner.logical import replay_logically
from kvtiers.planner.machines import machine_of_table
from kvtiers.planner.models import MODELS
from kvtiers.planner.plan import Space, make_plan
from kvtiers.planner.prompts import PromptKeys
from kvtiers.planner.sample import sampled_curve
from kvtiers.planner.search import Candidate, Prices, Target
from kvtiers.types import CacheConfig, Retention, WritePolicy
from kvtiers.workload import SynthesisSpec, open_trace, synthesise

SIZES = [1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000]

_PEER = """
import json, sys, time
from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.trace import parse_trace_lines
with open(sys.argv[1]) as lines:
    trace = parse_trace_lines(lines, block_size=512)
ensure_cpp_simulator()
sizes = json.loads(sys.argv[2])
times = []
for _ in range(int(sys.argv[3])):
    start = time.perf_counter()
    run_cpp_sweep(trace, capacities=sizes, policies=["lru"], warmup_requests=0)
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


def best(runs: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def curve(columns: TraceColumns, path: Path, peer_python: str | None) -> dict[str, Any]:
    """The exact curve, parsing excluded, alternating with the peer's eight sizes."""

    def ours() -> None:
        columns.__dict__.pop("previous", None)  # what an earlier run left cached
        exact_curve(columns, Definition.BLOCKS)

    figures: dict[str, Any] = {"references": columns.references}
    our_times, peer_times = [], []
    for _ in range(3):
        our_times.append(best(3, ours))
        if peer_python is not None:
            command = [peer_python, "-c", _PEER, str(path), json.dumps(SIZES), "2"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peer_times += json.loads(done.stdout)
    figures["exact_curve_seconds"] = min(our_times)
    start = time.process_time()
    ours()
    figures["exact_curve_processor_seconds"] = time.process_time() - start
    if peer_times:
        figures["kvcache_simulator_eight_sizes_seconds"] = min(peer_times)
    return figures


def sample(requests: int) -> dict[str, Any]:
    """About ten million references: exact and sampled, and how far apart they are."""
    columns = TraceColumns.load(synthesise(SynthesisSpec(requests)))
    start = time.perf_counter()
    exact = exact_curve(columns)
    exact_seconds = time.perf_counter() - start
    start = time.perf_counter()
    sampled = sampled_curve(columns, 0.1)
    sampled_seconds = time.perf_counter() - start
    sizes = np.unique(np.geomspace(1, exact.saturated_at_blocks, 300).astype(int))
    errors = [abs(sampled.hit_ratio(s) - exact.hit_ratio(s)) for s in sizes]
    return {
        "references": columns.references,
        "exact_seconds": exact_seconds,
        "sampled_seconds": sampled_seconds,
        "largest_error": max(errors),
        "mean_error": float(np.mean(errors)),
        "largest_stated_standard_error": max(sampled.standard_error(s) for s in sizes[::10]),
    }


def logical(columns: TraceColumns) -> dict[str, Any]:
    """Decisions only: the real core over every prompt."""
    keys = PromptKeys(columns)
    one = CacheConfig(device_pages=10_000)
    two = CacheConfig(device_pages=2_000, host_pages=8_000)
    return {
        "one_tier_seconds": best(2, lambda: replay_logically(columns, one, keys=keys)),
        "two_tiers_seconds": best(2, lambda: replay_logically(columns, two, keys=keys)),
    }


def replay(columns: TraceColumns) -> dict[str, Any]:
    """With scheduler and time: every request, and the screening that a plan is made of.

    Seconds of processor time as well, since a replay is one process among others.
    """
    model = MODELS["llama-3.1-8b"]
    setting = Setting(model, machine_of_table("h200", model, 4), page_tokens=512)
    candidate = Candidate(440.0, 1024.0, 0.0, WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE)
    short = with_short_outputs(columns)
    figures: dict[str, Any] = {"requests": columns.requests}
    screening = setting.screening(columns.block_tokens)
    for name, trace, of in (("screening", short, screening), ("full", columns, setting)):
        keys = PromptKeys(trace)
        wall, cpu = time.perf_counter(), time.process_time()
        evaluate(trace, keys, of, candidate, full=of is setting)
        figures[f"{name}_seconds"] = time.perf_counter() - wall
        figures[f"{name}_processor_seconds"] = time.process_time() - cpu
    return figures


def plan(columns: TraceColumns) -> dict[str, Any]:
    """A plan that screens about two hundred configurations, on two processes; minutes."""
    model = MODELS["llama-3.1-8b"]
    setting = Setting(model, machine_of_table("h200", model, 3), page_tokens=64)
    hosts = [384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096]
    space = Space(338.7, host_sizes=hosts, storage_sizes=[1024, 2048, 4096, 8192])
    wall = time.perf_counter()
    made = make_plan(columns, setting, space, Target(4.0), Prices(), name="trace", processes=2)
    of_workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "considered": made.considered,
        "excluded_by_curve": sum(made.excluded.values()),
        "screened": len(made.screened) + len(made.given_up),
        "given_up": len(made.given_up),
        "replayed_in_full": len(made.replayed),
        "seconds": time.perf_counter() - wall,
        "processor_seconds": of_workers.ru_utime + of_workers.ru_stime,
    }


def readers(path: Path) -> dict[str, Any]:
    """Reading: requests per second, and memory that does not grow with the trace."""
    start = time.perf_counter()
    requests = sum(1 for _ in open_trace(path))
    seconds = time.perf_counter() - start
    tracemalloc.start()
    peaks = []
    for share in (4, 1):
        tracemalloc.reset_peak()
        for number, _ in enumerate(open_trace(path)):
            if number * share >= requests:
                break
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    return {
        "requests_per_second": requests / seconds,
        "peak_bytes_a_quarter": peaks[0],
        "peak_bytes_the_whole": peaks[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", default="readers,curve,sample,logical,replay")
    parser.add_argument("--sample-requests", type=int, default=14_500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("kvtiers.runtime").setLevel(logging.ERROR)

    columns = TraceColumns.load(open_trace(arguments.trace))
    benchmarks: dict[str, Callable[[], dict[str, Any]]] = {
        "readers": lambda: readers(arguments.trace),
        "curve": lambda: curve(columns, arguments.trace, arguments.peer_python),
        "sample": lambda: sample(arguments.sample_requests),
        "logical": lambda: logical(columns),
        "replay": lambda: replay(columns),
        "plan": lambda: plan(columns),
    }
    results: dict[str, Any] = {
        "machine": {
            "platform": platform.platform(),
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        }
    }
    for name in arguments.only.split(","):
        results[name] = benchmarks[name]()
        print(name, json.dumps(results[name]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
