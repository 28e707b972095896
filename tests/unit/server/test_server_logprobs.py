"""How tokens are spelled where their probabilities are told."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import ByteCodec

from kvtiers.server.logprobs import by_spelling, entry, spelled


class TwinCodec(ByteCodec):
    """Tokens 1 and 2 are both written "twin"."""

    def token_bytes(self, token: int) -> bytes | None:
        return b"twin" if token in (1, 2) else super().token_bytes(token)


def test_a_token_that_is_text_is_spelled_as_text() -> None:
    assert entry(ByteCodec(), ord("a"), -0.5) == {"token": "a", "logprob": -0.5, "bytes": [97]}


def test_a_part_of_a_character_is_spelled_by_its_bytes() -> None:
    assert spelled(ByteCodec(), 0xF0) == r"bytes:\xf0"
    assert entry(ByteCodec(), 0xF0, None)["bytes"] == [0xF0]


def test_a_special_token_has_a_name_and_no_bytes() -> None:
    assert entry(ByteCodec(), 0, -1.0) == {"token": "\x00", "logprob": -1.0, "bytes": None}


def test_parts_of_characters_do_not_hide_each_other() -> None:
    top = [(0xF0, -0.1), (0x9F, -2.0), (0xA6, -3.0)]
    assert by_spelling(ByteCodec(), top) == {
        r"bytes:\xf0": -0.1,
        r"bytes:\x9f": -2.0,
        r"bytes:\xa6": -3.0,
    }


@pytest.mark.parametrize("top", [[(1, -0.5), (2, -3.0)], [(2, -3.0), (1, -0.5)]])
def test_of_two_tokens_spelled_alike_the_likelier_is_shown(top: list[tuple[int, float]]) -> None:
    assert by_spelling(TwinCodec(), top) == {"twin": -0.5}
