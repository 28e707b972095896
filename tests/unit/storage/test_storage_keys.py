"""Storage keys: the same in every process, different for anything that the bytes depend on."""

import subprocess
import sys

import numpy as np
import pytest

from kvtiers.digests import page_digests
from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.storage import PathDigests, StorageIdentity, page_refs
from kvtiers.types import Namespace, token_key

TOKENS = token_key(np.arange(8 * 16 + 5))


def identity(**changes):
    fields = {
        "namespace": Namespace("model"),
        "page_tokens": 16,
        "page_bytes": 1024,
        "layout": "float32/page-first",
    }
    return StorageIdentity(**(fields | changes))


def test_keys_are_the_same_in_every_process():
    program = (
        "import numpy as np\n"
        "from kvtiers.storage import StorageIdentity, page_refs\n"
        "from kvtiers.types import Namespace, token_key\n"
        "name = StorageIdentity(Namespace('model'), 16, 1024, 'float32/page-first')\n"
        "print(page_refs(name, token_key(np.arange(133)), 0, 8)[-1].key.hex())\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == page_refs(identity(), TOKENS, 0, 8)[-1].key.hex()


def test_everything_that_the_bytes_depend_on_changes_the_key():
    names = [
        identity(),
        identity(namespace=Namespace("model2")),
        identity(namespace=Namespace("model", lora="a")),
        identity(namespace=Namespace("model", salt="a")),
        identity(namespace=Namespace("model", extra="a")),
        identity(page_bytes=2048),
        identity(layout="bfloat16/page-first"),
        identity(pool="swa"),
        identity(shard="0/2"),
        identity(shard="1/2"),
        identity(layout="float32/page-firstk", pool="v"),
    ]
    keys = {page_refs(name, TOKENS, 0, 1)[0].key for name in names}
    assert len(keys) == len(names)


def test_page_sizes_never_share_a_key():
    small = {ref.key for ref in page_refs(identity(page_tokens=8), TOKENS, 0, 16)}
    large = {ref.key for ref in page_refs(identity(), TOKENS, 0, 8)}
    assert not small & large


def test_parts_of_an_identity_do_not_run_into_each_other():
    assert identity(layout="ab", pool="c").digest != identity(layout="a", pool="bc").digest


def test_a_key_depends_on_every_token_before_it():
    tokens = np.frombuffer(TOKENS, "<i4").copy()
    tokens[0] += 1
    mine = page_refs(identity(), TOKENS, 0, 8)
    other = page_refs(identity(), token_key(tokens), 0, 8)
    assert all(a.key != b.key for a, b in zip(mine, other, strict=True))


def test_references_are_chained_from_the_root():
    refs = page_refs(identity(), TOKENS, 0, 8)
    assert [ref.depth for ref in refs] == list(range(8))
    assert [ref.parent for ref in refs] == [b"", *(ref.key for ref in refs[:-1])]
    assert {ref.identity for ref in refs} == {identity().digest}


def test_a_range_is_named_like_the_same_pages_of_the_whole_path():
    whole = page_refs(identity(), TOKENS, 0, 8)
    assert page_refs(identity(), TOKENS, 3, 4) == whole[3:7]
    assert page_refs(identity(), TOKENS, 3, 4, parent=whole[2].key) == whole[3:7]


def test_a_path_is_hashed_only_as_far_as_asked_and_never_twice(monkeypatch):
    hashed_bytes = []

    def count(seed, key, page_bytes, digest_size=32):
        hashed_bytes.append(len(key))
        return page_digests(seed, key, page_bytes, digest_size)

    monkeypatch.setattr("kvtiers.storage.keys.page_digests", count)
    path = PathDigests(identity(), TOKENS[: 5 * 64])
    path.refs(0, 3)
    path.refs(1, 2)
    assert hashed_bytes == [3 * 64]
    path.extend(TOKENS)
    assert path.hashed_pages == 3
    assert path.refs(0, 8) == page_refs(identity(), TOKENS, 0, 8)
    assert hashed_bytes[:2] == [3 * 64, 5 * 64]


def test_a_path_extends_only_by_a_continuation_of_itself():
    path = PathDigests(identity(), TOKENS)
    with pytest.raises(ProtocolError, match="does not continue"):
        path.extend(token_key(np.arange(1, 200)))


def test_pages_beyond_the_path_are_refused():
    with pytest.raises(ProtocolError, match="8 whole pages"):
        page_refs(identity(), TOKENS, 7, 2)


def test_an_identity_of_empty_pages_is_refused():
    with pytest.raises(ConfigError):
        identity(page_bytes=0)
