"""What a key keeps in pages and in the chunk store, however much the others compute."""

from __future__ import annotations

from quire import errors
from quire.engine import Engine
from quire.serve.tenants import Tenants

__all__ = ["guarantee_pages", "guarantee_shares"]

_PART = 2  # the half of a tier is divided; the rest is for what was used last


def guarantee_pages(engine: Engine, tenants: Tenants) -> None:
    """Divides a half of the pages among the keys by their shares: what the prefix cache keeps for a
    key within its part is given up last. KV of a client's own cache_salt has no part."""
    pages = engine.stats(wait=False)["pages_total"] // _PART
    for tenant in tenants:
        try:
            part = pages * tenant.share // tenants.share_total
            engine.set_kept_part(tenant.salt(None) or b"", part)
        except errors.BadStateError:
            return  # the server keeps no KV between requests


def guarantee_shares(engine: Engine, tenants: Tenants) -> None:
    """Divides a half of the store's RAM and folder among the keys by their shares: chunks of others
    never evict what would leave a key with less. Waits until the store is in use.

    KV of a client's own cache_salt has no guarantee: there may be any number of salts.

    Raises what kept the store from being used.
    """
    engine.wait_for_store()
    store = engine.store
    if store is None or not tenants.need_keys:
        return
    tiers = store.statistics()["tiers"]
    limits = [int(tiers[name]["bytes_max"]) for name in ("ram", "disk") if tiers[name]["present"]]
    passports = store.passports(engine.model_dir)
    if not limits or not passports:
        return
    # The guarantee is one number for all tiers, so it must fit into the smallest. There are several
    # passports where the folder has KV of other element types.
    room = min(limits) // (_PART * len(passports))
    for passport in passports:
        for tenant in tenants:
            share = room * tenant.share // tenants.share_total
            store.set_quota(passport, bytes_guaranteed=share, cache_salt=tenant.salt(None) or b"")
