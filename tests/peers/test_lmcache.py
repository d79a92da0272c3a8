"""LMCache itself with quire.lmcache.QuireL2Adapter as the second tier of its storage manager, as its
server makes one from `--l2-adapter`. Runs in LMCache's environment: `./test peers`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed import api, config, internal_api
from lmcache.v1.distributed.storage_manager import StorageManager

_LAYOUT = api.MemoryLayoutDesc(shapes=[torch.Size((2, 3, 256, 64))], dtypes=[torch.bfloat16])
_BYTES = 2 * 3 * 256 * 64 * 2
_PATIENCE = 60.0
_COUNT = 6


def keys(salt: str = "") -> list[Any]:
    return [api.ObjectKey(bytes([i]) * 32, "m/test", 0, cache_salt=salt) for i in range(_COUNT)]


@contextlib.contextmanager
def manager(folder: Path, **params: Any) -> Iterator[Any]:
    adapter = {
        "type": "plugin",
        "module_path": "quire.lmcache",
        "class_name": "QuireL2Adapter",
        "adapter_params": {"directory": str(folder), **params},
    }
    arguments = ["--l1-size-gb", "0.05", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    made = StorageManager(config.parse_args([*arguments, "--l2-adapter", json.dumps(adapter)]))
    try:
        yield made
    finally:
        made.close()


class Told(internal_api.L2AdapterListener):  # type: ignore[misc]
    """What the adapter tells LMCache, and a wait for it."""

    def __init__(self, storage: Any) -> None:
        self._changed = threading.Condition()
        self.held: set[Any] = set()
        storage.register_l2_listener(self)

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        with self._changed:
            self.held.update(keys)
            self._changed.notify_all()

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        """Not asked about."""

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        with self._changed:
            self.held.difference_update(keys)
            self._changed.notify_all()

    def wait_for(self, wanted: list[Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.held == set(wanted), _PATIENCE), self.held


def store(storage: Any, wanted: list[Any]) -> Told:
    told = Told(storage)
    objects = storage.reserve_write(wanted, _LAYOUT)
    assert len(objects) == len(wanted)
    for key, each in objects.items():
        each.tensor.copy_(_content(key))
    storage.finish_write(wanted)
    told.wait_for(wanted)
    return told


def _content(key: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key.chunk_hash[0])
    return torch.randn(2, 3, 256, 64, generator=generator).to(torch.bfloat16)


def fetched(storage: Any, wanted: list[Any]) -> int:
    """Leading objects that come from the second tier, each of them equal."""
    group = api.GroupedObjectKeys(wanted, 0, _LAYOUT)
    handle = storage.submit_prefetch_task(api.PrefetchTaskSpec([group]))
    assert storage.wait_prefetch_status(handle, _PATIENCE)
    result = storage.query_prefetch_status(handle)
    count = int(result.l2_hit_cells[0].count_leading_ones())
    assert int(result.hit_cells[0].popcount()) == count
    if count:
        with storage.read_prefetched_results(wanted[:count]) as objects:
            for key, each in zip(wanted, objects, strict=False):
                assert torch.equal(each.tensor, _content(key))
        storage.finish_read_prefetched(wanted[:count])
    return count


def test_objects_of_one_process_are_found_by_the_next(tmp_path: Path) -> None:
    with manager(tmp_path) as storage:
        store(storage, keys())
        assert storage.report_status()["is_healthy"]
    with manager(tmp_path) as storage:
        assert fetched(storage, keys("other")) == 0
        assert fetched(storage, keys()) == _COUNT
        assert storage.report_status()["is_healthy"]


@pytest.mark.parametrize("damaged", [0, 3])
def test_a_damaged_object_ends_the_prefix(tmp_path: Path, damaged: int) -> None:
    with manager(tmp_path) as storage:
        store(storage, keys())
    content = _content(keys()[damaged]).view(torch.uint8).numpy().tobytes()[:256]
    (file,) = [each for each in tmp_path.rglob("*.qkv") if content in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(content) + 100] ^= 1
    file.write_bytes(data)
    with manager(tmp_path) as storage:
        assert fetched(storage, keys()) == damaged


def test_usage_and_deletion_by_salt(tmp_path: Path) -> None:
    with manager(tmp_path) as storage:
        told = store(storage, keys("ann"))
        assert storage.get_usage_bytes_by_cache_salt() == {"ann": _COUNT * _BYTES}
        ((_, adapter),) = storage.l2_adapters()
        adapter.delete(keys("ann")[2:])
        told.wait_for(keys("ann")[:2])
        assert storage.get_usage_bytes_by_cache_salt() == {"ann": 2 * _BYTES}
    with manager(tmp_path) as storage:
        assert fetched(storage, keys("ann")) == 2
