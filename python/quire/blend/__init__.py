"""CacheBlend: KV of text that was computed elsewhere, used at any place of a prompt.

:class:`BlendRetriever` fetches the KV of the segments of prompts, layer by layer in the
background. :class:`BlendExecutor` moves cached keys to their new positions, finds the tokens whose
cached KV is far from fresh KV, and puts fresh rows in their place. :mod:`quire.blend.rows` has the
single steps. What comes out is approximate unless all tokens are recomputed: do not store it as
exact KV.

Arrays are NumPy's or torch's, in memory of the host: float32, float16 or bfloat16. torch is not
needed.
"""

from __future__ import annotations

from quire.blend.controller import (
    RATIO_FLOOR,
    LoadingController,
    is_worth_loading,
    recompute_ratio,
)
from quire.blend.executor import BlendExecutor, BlendOutput
from quire.blend.retriever import (
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
    FoundSegment,
    SegmentSource,
)
from quire.blend.rows import (
    BlendDocument,
    KeyRotation,
    batch_positions,
    gather_rows,
    scatter_rows,
    select_tokens,
    shift_keys,
    token_deviations,
)
from quire.blend.segment_memory import SegmentMemory

__all__ = [
    "RATIO_FLOOR",
    "BlendDocument",
    "BlendExecutor",
    "BlendOutput",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "FoundSegment",
    "KeyRotation",
    "LoadingController",
    "SegmentMemory",
    "SegmentSource",
    "batch_positions",
    "gather_rows",
    "is_worth_loading",
    "recompute_ratio",
    "scatter_rows",
    "select_tokens",
    "shift_keys",
    "token_deviations",
]
