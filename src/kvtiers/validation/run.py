"""Conducts a validation: calibrate, play and record, calibrate again, replay, compare.

The machine is measured before and after the run and both count alike, on a server of its own that
stays up and idle meanwhile: the books of the recorded one hold the workload and nothing else.

    directory/   calibration.json   the machine
                 trace.jsonl        what the recorded server was asked (salted hashes, no text)
                 live.json          its settings and its books at the end
                 *.log              of the two servers

`measure` fills a directory, `judge` compares what one holds; so a run can be judged again, and on
another machine.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvtiers.demo.client import DemoError
from kvtiers.demo.server_process import ServerProcess
from kvtiers.errors import ConfigError, TraceError
from kvtiers.planner.calibrate import Experiment, fit, machine_of, observe
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.machines import Machine, calibration_document, read_calibration
from kvtiers.planner.replay import ReplayResult, replay
from kvtiers.planner.served import HttpServed
from kvtiers.types import HitSplit
from kvtiers.validation.compare import Answered, Comparison, compare
from kvtiers.validation.counts import Counts, counts_of_ledger
from kvtiers.validation.live import LiveRun, RunBrokeOff, play
from kvtiers.validation.settings import Settings
from kvtiers.validation.workload import WorkloadShape
from kvtiers.workload import TraceRequest, open_trace

VERSION = 1
SPEED_REPLAYS = 5
"""Replays that look for the speed that the machine had during the run."""


class Stages(Protocol):
    """Who is told how far a validation is."""

    def begin(self, what: str, total: int) -> Callable[[], None]:
        """A stage of so many parts begins; call what is returned after each."""
        ...


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation that has been judged."""

    settings: Settings
    machine: Machine
    comparison: Comparison
    live: LiveRun
    replayed: ReplayResult
    slower_after: float
    """The steps of the calibration after the run over the same steps before it: 1 where nothing
    else used the machine more or less than before."""
    slowness: float
    """Steps during the run over those of the calibrations, by the times between tokens."""
    at_speed: Comparison
    """The same comparison with all steps that much longer. Reported beside, not judged."""

    @property
    def busy_share(self) -> float:
        """Of its time, what the replayed machine computed."""
        return self.replayed.busy_seconds / max(self.replayed.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **self.comparison.to_dict(),
            "live": {
                "seconds": self.live.seconds,
                "concurrent_max": self.live.concurrent_max,
                "balanced": self.live.balanced,
                "slower_after": self.slower_after,
            },
            "replayed": {
                "seconds": self.replayed.seconds,
                "steps": self.replayed.steps,
                "busy_share": self.busy_share,
            },
            "at_the_speed_of_the_run": {"slowness": self.slowness, **self.at_speed.to_dict()},
            "settings": self.settings.to_dict(),
            "calibration": calibration_document(self.machine),
        }


def measure(
    settings: Settings,
    shape: WorkloadShape,
    directory: Path,
    stages: Stages,
    experiment: Experiment | None = None,
) -> None:
    """Calibrate one server, record the workload on a fresh one, keep all of it in `directory`.

    Raises `RunBrokeOff` when a server does not start, breaks off or does not drain, or the
    directory cannot be written, and `ConfigError` when it cannot be calibrated.
    """
    experiment = experiment or Experiment(flush=True)
    parts = experiment.measurements
    with _server(settings, directory / "calibrating", stages) as calibrated:
        served = HttpServed(calibrated.url)
        before = observe(served, experiment, stages.begin("calibrate it", parts))
        shape = shape.paced(fit(before.prefills, before.decodes))

        # Fresh tiers and fresh books: what the calibration left behind is no part of the trace.
        record = ["--record", str(directory / "trace.jsonl")]
        with _server(settings, directory / "recording", stages, record) as recording:
            answered = stages.begin(
                f"the workload, recorded: {shape.clients} clients at once", shape.requests
            )
            live = play(recording.url, shape, answered)
        again = replace(experiment, seed=experiment.seed + 1)
        after = observe(served, again, stages.begin("calibrate again", parts))
        machine = machine_of(
            before.together(after), served.link_ceilings, "this machine", "before and after the run"
        )
    _write(directory / "calibration.json", calibration_document(machine))
    _write(
        directory / "live.json",
        {
            "kvtiers_validation": VERSION,
            "settings": settings.to_dict(),
            "slower_after": after.over(before),
            "workload": asdict(shape),
            "run": asdict(live),
        },
    )


def judge(directory: Path, tolerance: float, stages: Stages) -> Validation:
    """Replay what a directory holds and compare. Raises `ConfigError` or `TraceError` for files
    that are missing or are not what they should be."""
    settings, live, slower_after = _read_live(directory / "live.json")
    machine = read_calibration(directory / "calibration.json")
    requests = list(open_trace(directory / "trace.jsonl"))
    answered = [_recorded(request, number) for number, request in enumerate(requests)]
    columns = TraceColumns.load(requests)
    done = stages.begin("replay it in virtual time", 1 + SPEED_REPLAYS)
    # late copies are in the ledger and in the table; log lines would say no more
    logging.getLogger("kvtiers.runtime").setLevel(logging.ERROR)

    def replayed_at(slowness: float) -> ReplayResult:
        there = replace(machine, cost=machine.cost.times(slowness))
        result = replay(columns, settings.replay_config(live.kv_bytes_per_token, there))
        done()
        return result

    def compared(result: ReplayResult) -> Comparison:
        books = counts_of_ledger(result.ledger)
        return compare(live.counts, books, answered, _replayed(result), tolerance)

    result = replayed_at(1.0)
    slowness, at_speed = at_the_speed_of(requests, result, replayed_at)
    return Validation(
        settings,
        machine,
        compared(result),
        live,
        result,
        slower_after,
        slowness,
        compared(at_speed),
    )


def at_the_speed_of(
    requests: Sequence[TraceRequest],
    result: ReplayResult,
    replayed_at: Callable[[float], ReplayResult],
) -> tuple[float, ReplayResult]:
    """How much slower than calibrated the machine was during the run, and the replay on that one.

    One number for all costs of a step, from the mean time between tokens alone: neither hits nor
    times to first token have a say in it.
    """
    gaps = sum(request.output_tokens - 1 for request in requests)
    measured = [request.measured for request in requests]
    live = sum((m.e2e_seconds or 0.0) - (m.ttft_seconds or 0.0) for m in measured if m) / max(
        1, gaps
    )
    slowness, tried = 1.0, []
    for _ in range(1 + SPEED_REPLAYS):
        seconds = sum(r.e2e_seconds - (r.ttft_seconds or 0.0) for r in result.requests)
        gap = seconds / max(1, gaps)
        if not (live > 0 and gap > 0):
            break
        tried.append((abs(gap / live - 1), slowness, result))
        if len(tried) > SPEED_REPLAYS:
            break
        # requests that decode longer meet more others, so gaps grow faster than steps
        slowness *= (live / gap) ** 0.6
        result = replayed_at(slowness)
    _, slowness, result = min(tried, key=lambda each: each[0], default=(0.0, 1.0, result))
    return slowness, result


# ---------------------------------------------------------------------- the two sides' requests


def _recorded(request: TraceRequest, number: int) -> Answered:
    measured = request.measured
    if measured is None or measured.ttft_seconds is None:
        raise TraceError(
            f"request {number} of the trace says nothing of what the server measured; only traces "
            "that `kvtiers serve --record` wrote can be compared"
        )
    split = HitSplit(
        measured.device_hit, measured.host_hit, measured.storage_hit, measured.computed
    )
    return Answered(split, measured.ttft_seconds)


def _replayed(result: ReplayResult) -> list[Answered]:
    answered = []
    for request in sorted(result.requests, key=lambda each: each.number):
        if request.split is None or request.ttft_seconds is None:
            raise ConfigError(
                f"the replay ended request {request.number} as {request.outcome} where the server "
                "answered it: the two do not have the same limits"
            )
        answered.append(Answered(request.split, request.ttft_seconds))
    return answered


# ---------------------------------------------------------------------- servers and files


@contextmanager
def _server(
    settings: Settings, name: Path, stages: Stages, more: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """A server for as long as the context lasts; it must drain and exit 0 at the end."""
    storage = name.with_name(f"{name.name}-storage")
    shutil.rmtree(storage, ignore_errors=True)
    ready = stages.begin(f"start the {name.name} server", 1)
    server = ServerProcess([*settings.server_arguments(storage), *more], name.with_suffix(".log"))
    try:
        server.wait_until_listening()
        ready()
        yield server
        status = server.stop()
        if status:
            raise RunBrokeOff(f"the server exited with {status}:\n{server.end_of_log()}")
    except DemoError as error:  # of the child process, which the demo has as well
        raise RunBrokeOff(str(error)) from error
    finally:
        server.kill()
        shutil.rmtree(storage, ignore_errors=True)


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise RunBrokeOff(f"{path} cannot be written: {error.strerror or error}") from error


def _read_live(path: Path) -> tuple[Settings, LiveRun, float]:
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["kvtiers_validation"] != VERSION:
            raise KeyError("kvtiers_validation")
        run = document["run"]
        return (
            Settings.from_dict(document["settings"]),
            LiveRun(**{**run, "counts": Counts(**run["counts"])}),
            float(document["slower_after"]),
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is no record of a validation of version {VERSION}, or is damaged "
            f"({type(error).__name__}: {error}); measure again with --keep"
        ) from error
