"""The loop that every reader shares: lines to records to requests, checked, counted, reported.

A `TraceFormat` knows one record; the `TraceReader` knows the file: it numbers lines, keeps time in
order, and either raises a `TraceError` that names file and line or counts what it skipped. It
holds one request at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvtiers.errors import TraceError
from kvtiers.workload.lines import Line, OnError, numbered_lines
from kvtiers.workload.request import RecordError, TraceProblem, TraceRequest

SPAN_SECONDS_MAX = 31 * 86_400.0
REQUESTS_PER_SECOND_MAX = 1_000.0
"""A trace beyond these most likely has its times in another unit than the reader was told."""

_EXAMPLES_MAX = 5


class TraceFormat(Protocol):
    """What one kind of file means. `time_unit_given`: the user said so, so it is not doubted."""

    name: str
    time_unit_given: bool

    def header(self, record: Mapping[str, Any]) -> bool:
        """Take the first record of the file; False: it is a request like any other."""
        ...

    def parse(self, record: Mapping[str, Any]) -> TraceRequest:
        """A record as a request; raises `RecordError`."""
        ...


@dataclass(slots=True)
class ReadReport:
    """What a reader has done so far. `examples` names the first few skipped lines."""

    requests: int = 0
    skipped: Counter[TraceProblem] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def skipped_requests(self) -> int:
        return self.skipped.total()

    def summary(self) -> str:
        """One line for people: what was read and what was left out, and why."""
        text = f"{self.requests:,} requests read"
        if self.skipped:
            reasons = ", ".join(f"{count:,} {what}" for what, count in self.skipped.most_common())
            text += f"; {self.skipped_requests:,} skipped ({reasons})"
        return text


class TraceReader:
    """The requests of a file, in order of arrival; iterate once per pass, the report starts anew.

    Raises `TraceError` for the first record that cannot be used (`OnError.FAIL`) or counts it
    (`OnError.SKIP`), and in both cases for a file without a single usable request.
    """

    def __init__(self, path: Path, trace_format: TraceFormat, on_error: OnError) -> None:
        self.path = path
        self.format = trace_format
        self.on_error = on_error
        self.report = ReadReport()

    def __iter__(self) -> Iterator[TraceRequest]:
        report = self.report = ReadReport()
        first_seconds: float | None = None
        last_seconds = span_seconds = 0.0
        first_record = True
        for line in numbered_lines(self.path):
            if line.problem is None and not line.text.strip():
                continue
            try:
                record = _record(line)
                if first_record:
                    first_record = False
                    if self.format.header(record):
                        continue
                request = self.format.parse(record)
                if request.arrival_seconds < last_seconds:
                    raise RecordError(
                        TraceProblem.TIME_GOES_BACK,
                        f"arrives at {request.arrival_seconds:g} s, before the request above it "
                        f"at {last_seconds:g} s; sort the file by time",
                    )
                if first_seconds is None:
                    first_seconds = request.arrival_seconds
                self._check_span(request.arrival_seconds - first_seconds)
            except RecordError as error:
                self._refuse(line.number, error)
                continue
            last_seconds = request.arrival_seconds
            span_seconds = last_seconds - first_seconds
            report.requests += 1
            yield request
        if not report.requests:
            raise TraceError(f"{self.path}: holds no usable request ({report.summary()})")
        self._check_rate(span_seconds)

    def _refuse(self, line_number: int, error: RecordError) -> None:
        message = f"{self.path}:{line_number}: {error}"
        if self.on_error is OnError.FAIL:
            raise TraceError(message) from None
        self.report.skipped[error.problem] += 1
        if len(self.report.examples) < _EXAMPLES_MAX:
            self.report.examples.append(message)

    def _check_span(self, span_seconds: float) -> None:
        if span_seconds > SPAN_SECONDS_MAX and not self.format.time_unit_given:
            raise RecordError(
                TraceProblem.IMPLAUSIBLE_TIME,
                f"arrives {span_seconds / 86_400:.0f} days after the first request; if the "
                "timestamps are milliseconds, say --time-unit ms, else --time-unit s",
            )

    def _check_rate(self, span_seconds: float) -> None:
        requests = self.report.requests
        if self.format.time_unit_given or requests < 1_000:
            return
        if requests > REQUESTS_PER_SECOND_MAX * span_seconds:
            raise TraceError(
                f"{self.path}: {requests:,} requests within {span_seconds:.3g} s; if the "
                "timestamps are seconds, say --time-unit s, else --time-unit ms"
            )


def _record(line: Line) -> dict[str, Any]:
    if line.problem is not None:
        raise RecordError(line.problem, line.message)
    try:
        record = json.loads(line.text)
    except (ValueError, RecursionError) as error:  # no JSON, a number too long, nested too deep
        if not line.ended:
            raise RecordError(
                TraceProblem.TRUNCATED, "the file ends inside this record; is it truncated?"
            ) from None
        raise RecordError(TraceProblem.NOT_JSON, f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordError(
            TraceProblem.NOT_AN_OBJECT, f"a record is a JSON object; got {type(record).__name__}"
        )
    return record
