"""Quire under LMCache's names, and Quire's store under LMCache.

:class:`QuireL2Adapter` is a plug-in of LMCache's server (docs/lmcache.md). :class:`LMCacheEngine`,
:class:`SPTBlendRetriever` and :class:`CacheBlendImpl` are the blending classes of LMCache 0.3.7,
over :mod:`quire.blend`. LMCache itself is not needed to import this.
"""

from __future__ import annotations

from quire.lmcache._blending import CacheBlendImpl, LMCacheEngine, SPTBlendRetriever
from quire.lmcache._l2_adapter import QuireL2Adapter

__all__ = ["CacheBlendImpl", "LMCacheEngine", "QuireL2Adapter", "SPTBlendRetriever"]
