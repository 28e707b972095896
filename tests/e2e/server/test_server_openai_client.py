"""The `openai` client, unchanged, against a real server on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from conftest import RunningServer

PROMPT = "The heron stood in the water all day and the wheel of the mill went round. " * 4


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion_ends_at_max_tokens_and_its_usage_adds_up(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=7, temperature=0)
    usage = answer.usage
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == len(PROMPT)
    details = usage.prompt_tokens_details.model_dump()
    cached = details["cached_tokens_details"]
    assert details["cached_tokens"] == sum(cached.values())
    assert usage.prompt_tokens == sum(cached.values()) + sum(details["missed_tokens"].values())


def test_the_second_time_the_same_prompt_hits_on_device(client: openai.OpenAI) -> None:
    prompt = "Twice the same words, and long enough to fill several pages of the cache. " * 3
    first, second = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)
        for _ in range(2)
    )
    details = second.usage.prompt_tokens_details.model_dump()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert details["cached_tokens_details"]["device"] == (len(prompt) - 1) // 16 * 16
    assert second.choices[0].text == first.choices[0].text


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    with client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "You answer in riddles."},
        {"role": "user", "content": [{"type": "text", "text": "What goes round?"}]},
    ]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=10, temperature=0
    )
    with client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    finish = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert finish == [whole.choices[0].finish_reason]


def test_several_answers_and_several_prompts_come_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["first prompt", "second prompt"], n=2, max_tokens=3, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == len("first prompt") + len("second prompt")


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return (
            client.completions.create(
                model="tiny", prompt="Once upon", max_tokens=12, temperature=1, seed=seed, top_p=0.9
            )
            .choices[0]
            .text
        )

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_logprobs_come_in_both_shapes(client: openai.OpenAI) -> None:
    plain = client.completions.create(
        model="tiny", prompt="abc", max_tokens=3, temperature=0, logprobs=2
    )
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == plain.usage.completion_tokens
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def test_the_bytes_of_all_tokens_are_the_text_also_of_broken_characters(
    client: openai.OpenAI,
) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "\U0001f9a9" * 4}],
        max_tokens=64,
        temperature=2,
        seed=3,
        logprobs=True,
        top_logprobs=5,
    )
    content = chat.choices[0].logprobs.content
    parts = [entry for entry in content if entry.token.startswith("bytes:")]
    assert parts, "a random model makes broken characters"
    assert all(len({top.token for top in entry.top_logprobs}) == 5 for entry in content)
    joined = b"".join(bytes(entry.bytes) for entry in content if entry.bytes is not None)
    assert joined.decode(errors="replace") == chat.choices[0].message.content


def test_completions_show_as_many_likely_tokens_as_were_asked_for(client: openai.OpenAI) -> None:
    plain = client.completions.create(
        model="tiny", prompt="\U0001f9a9" * 4, max_tokens=32, temperature=2, seed=3, logprobs=5
    )
    assert {len(top) for top in plain.choices[0].logprobs.top_logprobs} == {5}


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=16, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = client.completions.create(
        model="tiny", prompt="abc", max_tokens=16, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_sglang_clients_find_the_details_where_they_look(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=2,
        extra_body={"return_cached_tokens_details": True},
    )
    details = answer.model_dump()["sglext"]["cached_tokens_details"]
    assert set(details) == {"device", "host", "storage"}


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="'frequency_penalty' is not supported"):
        client.completions.create(model="tiny", prompt="a", frequency_penalty=0.5)
    with pytest.raises(openai.BadRequestError, match="context of 1024 tokens"):
        client.completions.create(model="tiny", prompt="a" * 1000, max_tokens=100)
