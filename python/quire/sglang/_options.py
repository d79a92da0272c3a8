"""`--hicache-storage-backend-extra-config`: the store, and how the backend uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire import errors
from quire._numbers import text, timeout
from quire._store_arguments import store_arguments

__all__ = ["Options", "shard_name"]

# What SGLang reads there itself.
_OF_SGLANG = (
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)  # fmt: skip
_TIERS = ("directory", "redis", "ram_bytes")


@dataclasses.dataclass(frozen=True)
class Options:
    """store: arguments of quire.ChunkStore. model, revision: what the weights are called. salt: of
    the chunks. load_timeout: seconds that one call may wait for pages; what has not come then is a
    miss. store_timeout: seconds that pages have to be written; then they count as not stored."""

    store: Mapping[str, Any]
    model: str
    revision: str
    salt: str
    load_timeout: float
    store_timeout: float

    @classmethod
    def read(cls, extra: Mapping[str, Any], model: str | None) -> Options:
        """Raises BadArgumentError for an unknown name or a wrong value."""
        left = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
        store = store_arguments(left, _WHERE)
        options = cls(
            store=store,
            model=text(left.pop("model", model or ""), f"{_WHERE}: model"),
            revision=text(left.pop("revision", ""), f"{_WHERE}: revision"),
            salt=text(left.pop("cache_salt", ""), f"{_WHERE}: cache_salt"),
            load_timeout=_seconds(left, "load_timeout", 10.0),
            store_timeout=_seconds(left, "store_timeout", 30.0),
        )
        if left:
            raise errors.BadArgumentError(f"{_WHERE} has the unknown names {sorted(left)}")
        if not options.model:
            raise errors.BadArgumentError(
                f"{_WHERE}: SGLang gives no name of the model; name it as model"
            )
        if not any(store.get(name) for name in _TIERS):
            raise errors.BadArgumentError(
                f"{_WHERE} has none of {', '.join(_TIERS)}; give a directory or Redis"
            )
        return options


_WHERE = "QuireHiCacheStorage: the extra config"


def _seconds(left: dict[str, Any], name: str, default: float) -> float:
    return timeout(left.pop(name, default), f"{_WHERE}: {name}", 3600.0)


def shard_name(config: Any) -> str:
    """The part of a page that the rank of a HiCacheStorageConfig has. Ranks of equal names have
    equal pages.

    An MLA model's latents are equal on all tensor ranks, and one of them writes. Data-parallel
    replicas have equal pages, too.
    """
    ranks = [
        ("pp", config.pp_rank, config.pp_size),
        ("cp", getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)),
        ("dcp", getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)),
    ]
    if not config.is_mla_model:
        ranks.append(("tp", config.tp_rank, config.tp_size))
    parts = [f"{name}{rank}of{size}" for name, rank, size in ranks]
    return ".".join(["mla" if config.is_mla_model else "mha", *parts])
