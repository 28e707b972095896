"""Recording a live server: ends in any order make a trace in order of arrival."""

import random
import threading
from pathlib import Path

import pytest

from kvtiers.errors import ProtocolError
from kvtiers.types import token_key
from kvtiers.workload import (
    Measured,
    OnError,
    RecordedTraceWriter,
    TraceOptions,
    TraceRecorder,
    open_trace,
)

KEY = token_key(range(20))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live.jsonl"


def recorder_at(path: Path, **options: int) -> TraceRecorder:
    return TraceRecorder(RecordedTraceWriter(path, block_tokens=4, salt=b"s"), **options)


def arrivals(path: Path) -> list[float]:
    return [r.arrival_seconds for r in open_trace(path)]


def test_requests_are_written_in_order_of_arrival_however_they_end(path: Path) -> None:
    recorder = recorder_at(path)
    for number in range(50):
        recorder.begin(number, number / 10)
    order = list(range(50))
    random.Random(3).shuffle(order)
    for number in order:
        recorder.end(number, KEY, token_key([1]), measured=Measured(16, 0, 0, 4))
    recorder.close()
    assert arrivals(path) == [number / 10 for number in range(50)]
    assert recorder.left_out == 0


def test_what_never_ended_or_failed_is_left_out_and_counted(path: Path) -> None:
    recorder = recorder_at(path)
    for number in range(4):
        recorder.begin(number, float(number))
    recorder.end(1, KEY, b"")
    recorder.leave_out(0)
    recorder.end(3, KEY, b"")
    recorder.close()
    recorder.close()
    assert arrivals(path) == [1.0, 3.0]
    assert recorder.left_out == 2


def test_a_request_that_holds_up_too_many_is_given_up(path: Path) -> None:
    recorder = recorder_at(path, held_max=2)
    for number in range(5):
        recorder.begin(number, float(number))
    for number in (1, 2, 3):
        recorder.end(number, KEY, b"")
    assert recorder.left_out == 1
    recorder.end(0, KEY, b"")  # too late: nothing happens
    recorder.end(4, KEY, b"")
    recorder.close()
    assert arrivals(path) == [1.0, 2.0, 3.0, 4.0]


def test_a_request_is_recorded_once(path: Path) -> None:
    recorder = recorder_at(path)
    recorder.begin(1, 0.0)
    with pytest.raises(ProtocolError, match="already"):
        recorder.begin(1, 1.0)
    recorder.end(2, KEY, b"")  # unknown: it began before the recording
    recorder.end(1, KEY, b"")
    recorder.close()
    recorder.begin(3, 2.0)  # after the end nothing is recorded
    recorder.end(3, KEY, b"")
    assert arrivals(path) == [0.0]


def test_ends_from_many_threads_are_all_written(path: Path) -> None:
    recorder = recorder_at(path)
    for number in range(200):
        recorder.begin(number, float(number))

    def end_every_eighth(first: int) -> None:
        for number in range(first, 200, 8):
            recorder.end(number, KEY, token_key([number]))

    threads = [threading.Thread(target=end_every_eighth, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert arrivals(path) == [float(number) for number in range(200)]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_every_record_written_so_far_can_be_read_before_the_file_is_closed(
    tmp_path: Path, ending: str
) -> None:
    if ending.endswith("zst"):
        pytest.importorskip("zstandard", reason="zstd traces need kvtiers[plan]")
    path = tmp_path / f"live.{ending}"
    writer = RecordedTraceWriter(path, block_tokens=4)
    for number in range(5):
        writer.append(float(number), KEY, b"")
        reader = open_trace(path, TraceOptions(on_error=OnError.SKIP))
        assert len(list(reader)) == number + 1
    writer.close()
    assert arrivals(path) == [0.0, 1.0, 2.0, 3.0, 4.0]
