"""Writes pages as fast as it can until it is killed. Run by test_storage_crash.py.

    storage_crash_child.py DIRECTORY QUOTA_BYTES SEED

Prints one line per acknowledged page, after the acknowledgement: "path page".
"""

import os
import random
import sys
import threading

from kvtiers.storage import FileStore
from kvtiers.testing.storage_contract import payload

from storage_crash_paths import PAGE_BYTES, PATHS, refs_of  # isort: skip


def write_until_killed(store, seed):
    rng = random.Random(seed)
    while True:
        path = rng.randrange(PATHS)
        refs = refs_of(path)[: rng.randint(1, 12)]
        outcomes = store.write_from(refs, [memoryview(payload(ref, PAGE_BYTES)) for ref in refs])
        acknowledged = [page for page, outcome in enumerate(outcomes) if outcome is None]
        os.write(1, "".join(f"{path} {page}\n" for page in acknowledged).encode())
        if rng.random() < 0.2:
            store.read_into(refs, [memoryview(bytearray(PAGE_BYTES)) for _ in refs])


def main():
    directory, quota_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    segment_bytes = (quota_bytes or 32 * 40 * PAGE_BYTES) // 4
    store = FileStore(directory, PAGE_BYTES, quota_bytes, segment_bytes=segment_bytes)
    for worker in range(3):
        threading.Thread(target=write_until_killed, args=(store, seed * 10 + worker)).start()


if __name__ == "__main__":
    main()
