"""Incremental text and stop strings: whatever the cuts, the pieces join to the whole answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.engine.detokenizer import Detokenizer


def decode_bytes(tokens: list[int]) -> str:
    """A tokenizer of one token per byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def run(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(decode_bytes, stop)
    pieces = []
    for token in text:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped_by is not None:
            break
    return [*pieces, detokenizer.finish()], detokenizer.stopped_by


def test_a_character_of_several_tokens_appears_when_it_is_whole() -> None:
    pieces, _ = run("aé😀b".encode())
    assert pieces == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_text_are_passed_on_as_replacement_characters() -> None:
    pieces, _ = run(b"\xff" * 20)
    assert "".join(pieces) == "�" * 20


def test_what_is_unfinished_at_the_end_is_not_lost() -> None:
    pieces, _ = run("a😀".encode()[:-1])
    assert "".join(pieces) == "a�"


def test_a_stop_string_ends_the_text_before_it() -> None:
    pieces, stopped_by = run(b"one two three", ("two",))
    assert "".join(pieces) == "one "
    assert stopped_by == "two"


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    pieces, stopped_by = run(b"ab abc", ("abd",))
    assert "".join(pieces) == "ab abc"
    assert pieces[:2] == ["", ""]
    assert stopped_by is None


def test_the_first_of_several_stop_strings_counts() -> None:
    pieces, stopped_by = run(b"x END y STOP", ("STOP", "END"))
    assert "".join(pieces) == "x "
    assert stopped_by == "END"


def test_a_stop_string_within_one_token_cuts_inside_it() -> None:
    detokenizer = Detokenizer(lambda tokens: "hello world" * len(tokens), ("wor",))
    assert detokenizer.push(1) == "hello "
    assert detokenizer.stopped_by == "wor"
    assert detokenizer.push(1) == ""


def test_an_empty_stop_string_stops_nothing() -> None:
    pieces, stopped_by = run(b"text", ("",))
    assert "".join(pieces) == "text"
    assert stopped_by is None


@pytest.mark.parametrize("cut", range(1, 12))
def test_text_is_rendered_as_a_whole_where_neighbours_matter(cut: int) -> None:
    """Some tokenizers drop the space before a first word: pieces must not lose it."""

    def decode(tokens: list[int]) -> str:
        return "".join(f" w{t}" for t in tokens).lstrip()

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token) for token in range(cut)]
    assert "".join([*pieces, detokenizer.finish()]) == decode(list(range(cut)))


@given(st.text(alphabet="ab €😀", max_size=30), st.lists(st.text(alphabet="ab €", max_size=3)))
def test_the_pieces_are_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, stopped_by = run(text.encode(), tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s and s in text]
    if not ends:
        assert ("".join(pieces), stopped_by) == (text, None)
    else:
        assert stopped_by is not None
        assert stopped_by in stop
        shown = "".join(pieces)
        assert text.startswith(shown + stopped_by)
        assert len(shown + stopped_by) == min(ends)
