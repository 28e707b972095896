"""Every format read, every trap named by file and line, every skip counted."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtiers.errors import ConfigError, ProtocolError, TraceError, UnknownName
from kvtiers.types import token_key
from kvtiers.workload import (
    Measured,
    OnError,
    PathHasher,
    RecordedTraceWriter,
    TraceOptions,
    TraceProblem,
    TraceRequest,
    open_trace,
    write_trace,
)

GOOD = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def mooncake(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: dict[str, Any] | str | bytes, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        raw = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n"
            for line in lines
        ]
        path.write_bytes(b"".join(raw))
        return path

    return write


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(open_trace(path, TraceOptions(**options)))


def test_mooncake_counts_milliseconds_and_blocks_of_512(file: Callable[..., Path]) -> None:
    (request,) = read(file(mooncake()))
    assert request.arrival_seconds == 1.0
    assert (request.input_tokens, request.output_tokens) == (700, 5)
    assert (request.block_tokens, request.last_block_tokens) == (512, 188)
    assert request.block_ids.tolist() == [3, 4]


def test_qwen_counts_seconds_and_blocks_of_16_and_knows_chats(file: Callable[..., Path]) -> None:
    record = {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 61.25,
        "input_length": 33,
        "output_length": 9,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2, 3],
    }
    (request,) = read(file(record))
    assert request.arrival_seconds == 61.25
    assert request.block_tokens == 16
    assert (request.chat_id, request.parent_chat_id, request.turn) == ("7", None, 1)


TRAPS = [
    (mooncake(input_length=-5), TraceProblem.NEGATIVE_LENGTH, "input_length is -5"),
    (mooncake(output_length=-1), TraceProblem.NEGATIVE_LENGTH, "output_length is -1"),
    (mooncake(input_length=0, hash_ids=[]), TraceProblem.EMPTY_PROMPT, "at least 1 token"),
    (mooncake(input_length=7.5), TraceProblem.BAD_VALUE, "whole number"),
    (mooncake(input_length=True), TraceProblem.BAD_VALUE, "whole number"),
    (mooncake(timestamp="noon"), TraceProblem.BAD_VALUE, "finite number"),
    (mooncake(timestamp=-1), TraceProblem.BAD_VALUE, "negative"),
    (mooncake(timestamp=10**400), TraceProblem.BAD_VALUE, "finite number"),
    (mooncake(output_length=10**30), TraceProblem.BAD_VALUE, "output_length is 1e+30; no more"),
    ('{"timestamp": ' + "1" * 5_000 + "}", TraceProblem.NOT_JSON, "not JSON"),
    ('{"timestamp": NaN, "input_length": 1}', TraceProblem.BAD_VALUE, "finite number"),
    (mooncake(timestamp=1000.5), TraceProblem.IMPLAUSIBLE_TIME, "--time-unit s"),
    (mooncake(timestamp=4e9), TraceProblem.IMPLAUSIBLE_TIME, "days after the first"),
    (mooncake(timestamp=999), TraceProblem.TIME_GOES_BACK, "before the request above it"),
    (mooncake(hash_ids=[1]), TraceProblem.IDS_CONTRADICT_LENGTH, "--whole-blocks-only"),
    (
        mooncake(hash_ids=list(range(44))),
        TraceProblem.IDS_CONTRADICT_LENGTH,
        "blocks of 16 tokens would fit",
    ),
    (mooncake(hash_ids=[4, 4]), TraceProblem.REPEATED_ID, "holds 4 twice"),
    (mooncake(hash_ids=[1.5, 2]), TraceProblem.BAD_VALUE, "whole numbers below"),
    (mooncake(hash_ids=["a", "b"]), TraceProblem.BAD_VALUE, "whole numbers below"),
    (mooncake(hash_ids=[2**64, 1]), TraceProblem.BAD_VALUE, "whole numbers below"),
    (mooncake(hash_ids=[[1], [2]]), TraceProblem.BAD_VALUE, "flat list"),
    (mooncake(hash_ids=5), TraceProblem.BAD_VALUE, "must be a list"),
    ({"timestamp": 1000, "hash_ids": []}, TraceProblem.MISSING_FIELD, "'input_length' is missing"),
    ("[1, 2]", TraceProblem.NOT_AN_OBJECT, "got list"),
    ("hello", TraceProblem.NOT_JSON, "not JSON"),
    (b'{"timestamp": 1000, "input_le', TraceProblem.TRUNCATED, "ends inside this record"),
    (b"\xff\xfe\x00\x80\n", TraceProblem.NOT_TEXT, "not UTF-8"),
    (b'{"a": "\x00"}\n', TraceProblem.NOT_TEXT, "NUL bytes"),
]


@pytest.mark.parametrize(("line", "problem", "message"), TRAPS, ids=lambda v: str(v)[:40])
def test_a_bad_record_fails_with_file_and_line_or_is_skipped_and_counted(
    file: Callable[..., Path], line: Any, problem: TraceProblem, message: str
) -> None:
    path = file(mooncake(), line)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)

    reader = open_trace(path, TraceOptions(on_error=OnError.SKIP))
    assert len(list(reader)) == 1
    assert dict(reader.report.skipped) == {problem: 1}
    assert str(problem) in reader.report.summary()
    assert f"{path}:2:" in reader.report.examples[0]


def test_reading_goes_on_after_skipped_records(file: Callable[..., Path]) -> None:
    path = file("nonsense", mooncake(), mooncake(timestamp=1), mooncake(timestamp=2000))
    reader = open_trace(path, TraceOptions(on_error=OnError.SKIP))
    assert [r.arrival_seconds for r in reader] == [1.0, 2.0]
    assert reader.report.skipped_requests == 2


def test_a_second_pass_over_a_reader_gives_the_same_and_counts_anew(
    file: Callable[..., Path],
) -> None:
    reader = open_trace(file(mooncake(), "x"), TraceOptions(on_error=OnError.SKIP))
    assert len(list(reader)) == len(list(reader)) == 1
    assert (reader.report.requests, reader.report.skipped_requests) == (1, 1)


@pytest.mark.parametrize("on_error", list(OnError))
def test_a_file_without_any_request_is_an_error_in_both_modes(
    file: Callable[..., Path], on_error: OnError
) -> None:
    with pytest.raises(TraceError, match="is empty"):
        read(file(b""), on_error=on_error)
    with pytest.raises(TraceError, match="is empty"):
        read(file("", "  "), on_error=on_error)
    with pytest.raises(TraceError, match="not UTF-8"):
        read(file(b"\x89PNG\r\n\x1a\n\x00\x00"), on_error=on_error)
    with pytest.raises(TraceError):
        read(file(mooncake(input_length=-1)), on_error=on_error)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened"):
        read(tmp_path / "none.jsonl")


def test_milliseconds_read_as_seconds_are_doubted_and_the_other_way_round(
    file: Callable[..., Path],
) -> None:
    fast = file(*(mooncake(timestamp=t // 10) for t in range(2_000)))
    with pytest.raises(TraceError, match="--time-unit s"):
        read(fast)
    assert read(fast, time_unit="s")[-1].arrival_seconds == 199
    assert read(fast, time_unit="ms")[-1].arrival_seconds == 0.199  # the user vouches for it
    chat = {"chat_id": 1, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    slow = file({**chat, "timestamp": 0}, {**chat, "timestamp": 7_200_000})
    with pytest.raises(TraceError, match="--time-unit ms"):
        read(slow)
    assert read(slow, time_unit="ms")[-1].arrival_seconds == 7_200


def test_ids_local_to_a_chat_are_kept_apart(file: Callable[..., Path]) -> None:
    path = file(
        mooncake(chat_id="a", hash_ids=[0, 1]),
        mooncake(chat_id="b", hash_ids=[0, 1]),
        mooncake(chat_id="a", hash_ids=[0, 2]),
    )
    first, second, third = read(path, local_ids=True, format="mooncake")
    assert not set(first.block_ids) & set(second.block_ids)
    assert first.block_ids[0] == third.block_ids[0]
    with pytest.raises(TraceError, match="chat_id is missing"):
        read(file(mooncake()), local_ids=True, format="mooncake")


def test_ids_of_whole_blocks_only_are_accepted_when_said(file: Callable[..., Path]) -> None:
    (request,) = read(file(mooncake(hash_ids=[3])), whole_blocks_only=True)
    assert (len(request.block_ids), request.last_block_tokens) == (1, 512)


def test_ids_above_int64_keep_their_identity(file: Callable[..., Path]) -> None:
    (request,) = read(file(mooncake(hash_ids=[2**64 - 1, 5])))
    assert request.block_ids.tolist() == [-1, 5]


def test_an_unknown_format_lists_the_known_ones(file: Callable[..., Path]) -> None:
    with pytest.raises(UnknownName, match="mooncake"):
        read(file(mooncake()), format="csv")
    with pytest.raises(TraceError, match="say --format"):
        read(file({"a": 1}))


@pytest.mark.parametrize("options", [{"block_tokens": 0}, {"time_unit": "minutes"}])
def test_impossible_options_are_refused(file: Callable[..., Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read(file(mooncake()), **options)


# ------------------------------------------------------------------------- compression


def test_gzip_is_told_by_its_content_and_a_truncated_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.any"
    lines = [json.dumps(mooncake(timestamp=10 * i, hash_ids=[i, i * i + 7])) for i in range(2_000)]
    packed = gzip.compress("\n".join(lines).encode())
    path.write_bytes(packed)
    assert len(read(path)) == 2_000
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="cannot decompress"):
        read(path)
    reader = open_trace(path, TraceOptions(on_error=OnError.SKIP))
    assert 0 < len(list(reader)) < 2_000
    assert reader.report.skipped[TraceProblem.TRUNCATED] == 1


def test_zstd_is_read_and_written(tmp_path: Path, file: Callable[..., Path]) -> None:
    pytest.importorskip("zstandard", reason="zstd traces need kvtiers[plan]")
    path = tmp_path / "trace.jsonl.zst"
    assert write_trace(path, read(file(mooncake())), "mooncake") == 1
    assert path.read_bytes().startswith(b"\x28\xb5\x2f\xfd")
    assert read(path)[0].block_ids.tolist() == [3, 4]


def test_a_zstd_file_that_ends_early_never_looks_whole(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd traces need kvtiers[plan]")
    rng = np.random.default_rng(0)  # what cannot be compressed well takes several blocks
    lines = [
        mooncake(timestamp=n, hash_ids=rng.integers(0, 2**62, 2).tolist()) for n in range(9_000)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    compress = zstandard.ZstdCompressor().compress
    path = tmp_path / "trace.jsonl.zst"

    def read_of(content: bytes) -> tuple[int, dict[TraceProblem, int]]:
        path.write_bytes(content)
        reader = open_trace(path, TraceOptions(on_error=OnError.SKIP, time_unit="ms"))
        return len(list(reader)), dict(reader.report.skipped)

    half = len(text) // 2
    assert read_of(compress(text)) == (9_000, {})
    assert read_of(compress(text[:half]) + compress(text[half:])) == (9_000, {})
    whole = compress(text)
    count, skipped = read_of(whole[: len(whole) // 2])
    assert 0 < count < 9_000
    assert skipped == {TraceProblem.TRUNCATED: 1}


# ------------------------------------------------------------------------- writing


def same(a: TraceRequest, b: TraceRequest) -> bool:
    return (
        a.arrival_seconds == pytest.approx(b.arrival_seconds)
        and (a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens)
        and a.block_ids.tolist() == b.block_ids.tolist()
        and a.block_tokens == b.block_tokens
    )


@pytest.mark.parametrize("name", ["mooncake", "qwen", "recorded"])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str, ending: str) -> None:
    requests = [
        TraceRequest(0.0, 20, 3, np.array([1, 2]), 16, chat_id="c", turn=1),
        TraceRequest(1.5, 40, 0, np.array([1, 3, 4]), 16, chat_id="c", turn=2),
    ]
    path = tmp_path / f"out.{ending}"
    assert write_trace(path, requests, name) == 2
    block = None if name != "mooncake" else 16
    again = read(path, block_tokens=block)
    assert all(same(a, b) for a, b in zip(requests, again, strict=True))
    if name != "mooncake":
        assert [r.turn for r in again] == [1, 2]


def test_a_chat_log_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="format to write"):
        write_trace(tmp_path / "x", [TraceRequest(0.0, 1, 1, np.array([1]), 16)], "chat")


# ------------------------------------------------------------------------- recorded


def test_a_recorded_trace_holds_salted_ids_that_agree_on_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    writer = RecordedTraceWriter(path, block_tokens=4)
    first, output = token_key([1, 2, 3, 4, 5, 6]), token_key([7, 8, 9])
    writer.append(0.5, first, output, chat_id="x", turn=1, measured=Measured(4, 0, 0, 2, 0.25, 1.0))
    writer.append(2.0, first + output + token_key([10]), token_key([]), chat_id="x", turn=2)
    writer.close()

    one, two = read(path)
    assert one.measured == Measured(4, 0, 0, 2, 0.25, 1.0)
    assert one.output_block_ids is not None
    # the next turn's prompt is the first one's history: prompt block, then the block of its output
    assert two.block_ids[:2].tolist() == [one.block_ids[0], one.output_block_ids[0]]
    assert one.block_ids[1] != two.block_ids[1]  # a partial block is not the whole one
    assert "prompt" not in path.read_text()


def test_two_recordings_of_one_prompt_have_nothing_in_common(tmp_path: Path) -> None:
    key = token_key(range(64))
    ids = [set(PathHasher(16).ids(key).tolist()) for _ in range(2)]
    assert not ids[0] & ids[1]
    assert PathHasher(16, b"salt").ids(key).tolist() == PathHasher(16, b"salt").ids(key).tolist()


def test_tokens_are_written_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    writer = RecordedTraceWriter(path, block_tokens=4, keep_tokens=True)
    writer.append(0.0, token_key([1, 2, 3]), token_key([4]))
    writer.close()
    header, record = (json.loads(line) for line in path.read_text().splitlines())
    assert header == {"kvtiers_trace": 1, "block_tokens": 4, "tokens": True}
    assert record["prompt"] == [1, 2, 3]


def test_recording_out_of_order_is_refused(tmp_path: Path) -> None:
    writer = RecordedTraceWriter(tmp_path / "live.jsonl", block_tokens=4)
    writer.append(2.0, token_key([1]), b"")
    with pytest.raises(ProtocolError, match="in order of arrival"):
        writer.append(1.0, token_key([1]), b"")
    writer.close()


def test_a_recorded_trace_of_another_version_is_refused(file: Callable[..., Path]) -> None:
    path = file({"kvtiers_trace": 2, "block_tokens": 4})
    with pytest.raises(TraceError, match="this program reads 1"):
        read(path)
    with pytest.raises(TraceError, match="header"):
        read(file({"t": 0, "in": 1, "out": 0, "ids": [1]}), format="recorded")


def test_a_measured_split_must_sum_to_the_prompt(file: Callable[..., Path]) -> None:
    header = {"kvtiers_trace": 1, "block_tokens": 4}
    record = {"t": 0, "in": 4, "out": 0, "ids": [1], "hit": [4, 0, 0, 1]}
    with pytest.raises(TraceError, match="sums to 5"):
        read(file(header, record))


# ------------------------------------------------------------------------- chat logs


def by_word(messages: Any) -> list[int]:
    words = " ".join(m["content"] for m in messages).split()
    return [len(word) for word in words]


def test_a_chat_log_becomes_blocks_of_the_tokenised_prompt(file: Callable[..., Path]) -> None:
    turn = {"role": "user", "content": "a bb ccc dddd e"}
    path = file(
        {"timestamp": 1_700_000_000.0, "messages": [turn], "usage": {"completion_tokens": 3}},
        {"created": 1_700_000_002.5, "body": {"messages": [turn, turn], "max_tokens": 9}},
    )
    first, second = read(path, tokenize=by_word, block_tokens=4)
    assert (first.arrival_seconds, second.arrival_seconds) == (0.0, 2.5)
    assert (first.input_tokens, second.input_tokens) == (5, 10)
    assert (first.output_tokens, second.output_tokens) == (3, 9)
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]


def test_a_chat_log_needs_a_tokenizer_and_times_or_an_interval(file: Callable[..., Path]) -> None:
    message = {"messages": [{"role": "user", "content": "a b"}]}
    path = file(message, message)
    with pytest.raises(ConfigError, match="--tokenizer"):
        read(path)
    with pytest.raises(TraceError, match="--interval"):
        read(path, tokenize=by_word)
    requests = read(path, tokenize=by_word, interval_seconds=2.0)
    assert [r.arrival_seconds for r in requests] == [0.0, 2.0]


def test_messages_that_cannot_be_tokenised_are_named(file: Callable[..., Path]) -> None:
    path = file({"timestamp": 0, "messages": [{"role": "user"}]})
    with pytest.raises(TraceError, match="cannot be tokenised"):
        read(path, tokenize=by_word)


def test_the_marks_of_windows_editors_do_no_harm(file: Callable[..., Path]) -> None:
    line = json.dumps(mooncake()).encode()
    (plain,) = read(file(line + b"\n"))
    (marked,) = read(file(b"\xef\xbb\xbf" + line + b"\r\n"))
    assert marked.block_ids.tolist() == plain.block_ids.tolist()
    with pytest.raises(TraceError, match="UTF-16 text; convert it"):
        read(file((line.decode() + "\n").encode("utf-16")))


def recording(**changes: Any) -> dict[str, Any]:
    return {"t": 1, "in": 20, "out": 12, "ids": [1, 2], "out_ids": [3], **changes}


HEADER = {"kvtiers_trace": 1, "block_tokens": 16, "tokens": False}


@pytest.mark.parametrize(
    ("line", "problem", "message"),
    [
        (HEADER, TraceProblem.BAD_VALUE, "more than one recording"),
        (recording(ids=[1]), TraceProblem.IDS_CONTRADICT_LENGTH, "need 2 ids"),
        (recording(out_ids=[]), TraceProblem.IDS_CONTRADICT_LENGTH, "fills 1 further blocks of 16"),
        (recording(out_ids=[3, 4]), TraceProblem.IDS_CONTRADICT_LENGTH, "out_ids holds 2 ids"),
        (recording(chat=[7]), TraceProblem.BAD_VALUE, "chat is [7]"),
        (recording(turn="first"), TraceProblem.BAD_VALUE, "turn is 'first'"),
    ],
)
def test_a_damaged_recording_is_named_and_no_option_suggested(
    file: Callable[..., Path], line: Any, problem: TraceProblem, message: str
) -> None:
    path = file(HEADER, recording(), line)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert "--" not in str(caught.value), "a recording says its block itself"
    reader = open_trace(path, TraceOptions(on_error=OnError.SKIP))
    assert len(list(reader)) == 1
    assert dict(reader.report.skipped) == {problem: 1}


def test_a_recording_without_its_header_is_told_as_one(file: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match="the first line of a recorded trace is a header"):
        read(file(recording()))
