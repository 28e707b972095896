"""What a server refuses: a 4xx in the OpenAI shape with a message that helps, and it goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from conftest import RunningServer, StartServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

REFUSALS = [
    (COMPLETIONS, {"model": "nope", "prompt": "a"}, 404, "this server has 'tiny'"),
    (COMPLETIONS, {"model": "tiny", "prompt": ""}, 400, "at least 1 character"),
    (COMPLETIONS, {"model": "tiny", "prompt": []}, 400, "at least 1 item"),
    (COMPLETIONS, {"model": "tiny", "prompt": [True]}, 400, "valid integer"),
    (COMPLETIONS, {"model": "tiny", "prompt": [""]}, 400, "at least 1 character"),
    (COMPLETIONS, {"model": "tiny", "prompt": ["a"] * 65}, 400, "at most 64 items"),
    (COMPLETIONS, {"model": "tiny", "prompt": [9999]}, 400, "outside the vocabulary"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a" * 1024}, 400, "shorten the prompt"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "greater than"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 1024}, 400, "at most 1023"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 5000}, 400, "at most 4096"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 10**9}, 400, "output-tokens-max"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "temperature": 3}, 400, "temperature"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "echo": True}, 400, "'echo' is not supported"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "wat": 1}, 400, "'wat' is not a parameter"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "n": 0}, 400, "'n'"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "n": "2"}, 400, "valid integer"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": True}, 400, "valid integer"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "temperature": "0"}, 400, "valid number"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "stream": "yes"}, 400, "valid boolean"),
    (COMPLETIONS, {"prompt": "a"}, 400, "'model' is required"),
    (CHAT, {"model": "tiny", "messages": []}, 400, "at least 1 item"),
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": 10**9}, 400, "at most 4096"),
    (CHAT, {"model": "tiny", "messages": IMAGE}, 400, "takes text only"),
    (CHAT, {"model": "tiny", "messages": USER, "tools": [{}]}, 400, "'tools' is not supported"),
    (CHAT, {"model": "tiny", "messages": USER, "top_logprobs": 2}, 400, "set logprobs as well"),
    (CHAT, {"model": "tiny", "messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
]


def _assert_openai_shape(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSALS)
def test_a_request_that_cannot_be_served_is_told_why(
    server: RunningServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    _assert_openai_shape(server.http.post(path, json=body), status, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model": "tiny", ', "not valid JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"", "no JSON body"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "\xe9"}', "not valid UTF-8"),
        (b'{"model": "\\ud800", "prompt": "a"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "surrogate"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "depth limit"),
    ],
)
def test_a_body_that_is_no_request_is_told_why(
    server: RunningServer, content: bytes, words: str
) -> None:
    headers = {"content-type": "application/json"}
    response = server.http.post(COMPLETIONS, content=content, headers=headers)
    _assert_openai_shape(response, 400, words)


def test_where_json_breaks_is_told_in_the_message_and_is_no_parameter(
    server: RunningServer,
) -> None:
    headers = {"content-type": "application/json"}
    blanks = b" " * (1 << 20)
    for content, words in ((b'{"model": "x", }', "at character 13: "), (blanks, "is empty")):
        error = server.http.post(COMPLETIONS, content=content, headers=headers).json()["error"]
        assert (error["param"], error["code"]) == (None, "malformed_json")
        assert words in error["message"]


def test_a_body_that_is_wrong_everywhere_gets_a_short_answer(server: RunningServer) -> None:
    wrong = {f"wat{i}": 1 for i in range(10_000)}
    for body in ({"prompt": [1.5] * 100_000}, {"prompt": ["a"] * 65}, {"prompt": "a", **wrong}):
        response = server.http.post(COMPLETIONS, json={"model": "tiny", **body})
        assert response.status_code == 400
        assert len(response.content) < 2000


def test_a_body_beyond_the_limit_is_refused(server: RunningServer) -> None:
    body = b'{"model": "tiny", "prompt": "' + b"a" * (5 << 20) + b'"}'
    _assert_openai_shape(server.http.post(COMPLETIONS, content=body), 413, "--body-mib-max")


def test_a_page_that_is_not_there_has_the_same_shape(server: RunningServer) -> None:
    _assert_openai_shape(server.http.get("/v2/completions"), 404, "Not Found")
    _assert_openai_shape(server.http.get(COMPLETIONS), 405, "Method Not Allowed")


def test_the_server_goes_on_after_all_that(server: RunningServer) -> None:
    answer = server.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    assert server.ledger()["balanced"]


def test_a_sane_request_id_is_kept_and_another_replaced(server: RunningServer) -> None:
    kept = server.http.get("/health", headers={"x-request-id": "trace-17"})
    assert kept.headers["x-request-id"] == "trace-17"
    replaced = server.http.get("/health", headers={"x-request-id": "a b"})
    assert replaced.headers["x-request-id"] not in ("", "a b")


def test_keys_guard_generation_and_admin_apart(start_server: StartServer) -> None:
    server = start_server("--api-key", "user-key", "--admin-key", "admin-key")
    user = {"Authorization": "Bearer user-key"}
    admin = {"Authorization": "Bearer admin-key"}
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert server.http.post(COMPLETIONS, json=body).status_code == 401
    assert server.http.post(COMPLETIONS, json=body, headers=admin).status_code == 401
    assert server.http.post(COMPLETIONS, json=body, headers=user).status_code == 200
    assert server.http.get("/cache/state", headers=user).status_code == 401
    assert server.http.get("/cache/state", headers=admin).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_an_api_key_alone_closes_the_admin_api(start_server: StartServer) -> None:
    server = start_server("--api-key", "user-key")
    headers = {"Authorization": "Bearer user-key"}
    _assert_openai_shape(server.http.get("/cache/state", headers=headers), 403, "--admin-key")
