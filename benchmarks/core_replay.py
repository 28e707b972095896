"""How fast the core is: the Mooncake trace through it, alternating with SGLang's Rust tree core.

    python benchmarks/core_replay.py [--trace FILE] [--peer-python PYTHON] [--runs N]
                                     [--json FILE] [--markdown FILE]

Replays the first 3,000 requests at 1 M and 20 M tokens of device and pages of 1, 16 and 64 tokens:
one tier, and three tiers (write-through, a host of four times the device, every copy acknowledged
at once), each without and with ghosts. Leases, slots and the ledger are always on. `--peer-python`
is the Python of a separate virtual environment with sglang in it; the peer runs there, in a process
that answers one timing at a time, so both sides' runs alternate. Figures are medians of `--runs`
runs, those with ghosts single runs. Targets compare CPU time, which a busy machine disturbs least;
wall time stands beside it. Beside the replays there are probes: `core_replay_probes.py`.

`--markdown` rewrites this benchmark's section of a page from the figures. Exit status 1 when a
target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core_replay_loop import Tokens, prompts_of_trace, replay
from core_replay_ours import OneTier, OneTierWithGhosts, ThreeTiers, ThreeTiersWithGhosts
from core_replay_probes import run_probes
from core_replay_report import missed_targets, rewrite_section, text

REQUESTS = 3_000
CAPACITIES_TOKENS = (1_000_000, 20_000_000)
PAGES_TOKENS = (1, 16, 64)
OURS = {
    "one tier": OneTier,
    "one tier, ghosts": OneTierWithGhosts,
    "three tiers": ThreeTiers,
    "three tiers, ghosts": ThreeTiersWithGhosts,
}
PEER = "peer"
REPOSITORY = Path(__file__).resolve().parents[1]


class Peer:
    """The peer's process, asked for one replay at a time."""

    def __init__(self, python: Path, trace: Path, requests: int) -> None:
        program = Path(__file__).with_name("core_replay_peer.py")
        self._process = subprocess.Popen(
            [str(python), str(program), str(trace), str(requests)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.about: dict[str, str] = self._answer()

    def replay(self, page_tokens: int, capacity_tokens: int) -> dict[str, float]:
        assert self._process.stdin is not None
        asked = {"page_tokens": page_tokens, "capacity_tokens": capacity_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer: dict[str, float] = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the peer ended with status {self._process.wait()}; is sglang installed in the "
                "Python that --peer-python names?"
            )
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def replays(prompts: list[Tokens], peer: Peer | None, runs: int) -> list[dict[str, Any]]:
    """One row per capacity, page size and side: medians of alternating runs."""
    rows = []
    for capacity in CAPACITIES_TOKENS:
        for page in PAGES_TOKENS:
            timings: dict[str, list[dict[str, float]]] = {name: [] for name in (PEER, *OURS)}
            shape: dict[str, dict[str, float]] = {}
            for each_run in range(runs):
                if peer is not None:
                    timings[PEER].append(peer.replay(page, capacity))
                for name, adapter in OURS.items():
                    if adapter.ghosts and each_run:
                        continue  # not held to a target, and slow with small pages
                    timing, used = replay(adapter, prompts, page, capacity)
                    timings[name].append(timing.to_dict())
                    if name not in shape:
                        shape[name] = used.shape()  # type: ignore[attr-defined]
                    del used
            for name, each in timings.items():
                if each:
                    rows.append(_row(name, capacity, page, each, shape.get(name, {}), len(prompts)))
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    _compare_with_peer(rows)
    return rows


def _row(
    name: str,
    capacity: int,
    page: int,
    timings: list[dict[str, float]],
    shape: dict[str, float],
    requests: int,
) -> dict[str, Any]:
    cpu = sorted(each["cpu_seconds"] for each in timings)
    wall = statistics.median(each["wall_seconds"] for each in timings)
    return {
        "side": name,
        "capacity_tokens": capacity,
        "page_tokens": page,
        "cpu_us_per_request": statistics.median(cpu) / requests * 1e6,
        "cpu_us_per_request_best": cpu[0] / requests * 1e6,
        "wall_us_per_request": wall / requests * 1e6,
        "hit_share": timings[0]["hit_share"],
        **shape,
    }


def _compare_with_peer(rows: list[dict[str, Any]]) -> None:
    """Add to each row how many times faster it is than the peer in the same cell."""
    peers = {
        (row["capacity_tokens"], row["page_tokens"]): row for row in rows if row["side"] == PEER
    }
    for row in rows:
        peer = peers.get((row["capacity_tokens"], row["page_tokens"]))
        if peer is not None:
            for clock in ("cpu", "wall"):
                figure = f"{clock}_us_per_request"
                row[f"times_peer_{clock}"] = peer[figure] / row[figure]


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    default_trace = REPOSITORY.parent / "shared/data/mooncake_conversation.jsonl"
    parser.add_argument("--trace", type=Path, default=default_trace)
    parser.add_argument("--peer-python", type=Path, help="a Python with sglang installed")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="rewrite this benchmark's section in there")
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        raise SystemExit(f"there is no trace at {arguments.trace}; name one with --trace")

    peer = None
    if arguments.peer_python is None or not arguments.peer_python.is_file():
        print("no --peer-python with sglang: the comparison with the peer is left out")
    else:
        peer = Peer(arguments.peer_python, arguments.trace, REQUESTS)
    prompts = prompts_of_trace(arguments.trace, REQUESTS)
    figures: dict[str, Any] = {
        "machine": machine(),
        "command": "python benchmarks/core_replay.py"
        + (" --peer-python PYTHON" if peer is not None else "")
        + f" --runs {arguments.runs}",
        "peer": peer.about if peer is not None else None,
        "requests": len(prompts),
        "tokens": sum(map(len, prompts)),
        "runs": arguments.runs,
        "replays": replays(prompts, peer, arguments.runs),
        "probes": run_probes(prompts, arguments.runs),
    }
    if peer is not None:
        peer.close()
    print(text(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.markdown is not None:
        rewrite_section(arguments.markdown, figures)
    return 1 if missed_targets(figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
