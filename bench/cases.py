"""What is measured: every case with its sides, the work that bounds it, and what it should reach
(the goals are those of the project's issue on speed)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import models
from generation import OWN_TOKENS

GROUPS = {
    "a": "Decode attention",
    "b": "Prefill attention",
    "c": "Planning a step",
    "d": "Whole models",
    "e": "Start and memory",
    "f": "Chunks in tiers",
    "g": "First token with KV from a tier",
    "h": "Token trees",
    "i": "Latent attention (MLA)",
    "j": "Beside TVM's own cache",
    "k": "Speculative decoding",
    "l": "Growth",
    "m": "Serving",
    "n": "Blending",
    "o": "Beams of transformers",
    "p": "First token under vLLM",
    "q": "Transfer between caches and processes",
}

HEADS = 32
HEAD_DIM = 128
# Bytes of a stored number; of a code with its part of the scale of its head.
_ELEMENT = {"bfloat16": 2, "float32": 4, "int8": 1 + 4 / 128, "float8_e4m3fn": 1 + 4 / 128}
_SHORT = {"bfloat16": "bf16", "float32": "f32", "int8": "i8", "float8_e4m3fn": "fp8"}


@dataclasses.dataclass(frozen=True)
class Side:
    """One program that does the work of a case. `worker` names its kind (driver.Workers)."""

    name: str
    worker: str
    request: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """`against` a side: Quire at least so many times as fast (as small), or, if `adds` is set, at
    most so many seconds slower; "bound": at least this part of it, where memory is fast
    `in_fast_memory`; "limit": at most so many seconds; "most": at most so much. `side`: who should
    be faster, if not Quire itself."""

    against: str
    value: float
    in_fast_memory: float | None = None
    side: str = "Quire"
    adds: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """Phases of (bytes read, FLOP done), one after the other; each is bound by the slower of the
    two. Empty: no bound is known."""

    phases: tuple[tuple[float, float], ...] = ()
    precision: Literal["bfloat16", "float32", "int8"] = "float32"

    def bound_seconds(self, bandwidth: float, peak: float) -> float:
        return sum(max(read / bandwidth, flop / peak) for read, flop in self.phases)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row of the table. `unit`: how the measured number is shown; "tokens" divides `tokens` by
    seconds, "GB/s" `bytes`."""

    name: str = "call"
    unit: Literal["ms", "us", "tokens", "s", "MiB", "GB/s", "forwards", "times"] = "ms"
    tokens: int = 1
    bytes: int = 0
    work: Work = Work()
    goals: tuple[Goal, ...] = ()
    quoted: dict[str, float] = dataclasses.field(default_factory=dict)  # side: seconds


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    group: str
    sides: tuple[Side, ...]  # the first one is Quire
    metrics: tuple[Metric, ...]
    quick: bool = False
    long: bool = False  # takes more than some minutes: only with --long, or by its name
    side_bytes: int = 0  # memory of each side
    model: str = ""
    tokens: int = 0  # KV capacity, most sequences and longest sequence of a whole-model case
    sequences: int = 1
    length: int = 0


# ---- (a), (b): attention


def _layers(layer_bytes: int, cache_bytes: int) -> int:
    """Layers that take turns, so that reads are from memory: a cache that does not replace the
    oldest line first keeps its share of what comes round, here at most an eighth."""
    return 1 + 8 * cache_bytes // layer_bytes


def _token_bytes(shape: dict[str, Any]) -> float:
    element = _ELEMENT[shape["dtype"]]
    if shape.get("latent"):
        return shape["head_dim"] * element
    return 2 * shape["kv_heads"] * shape["head_dim"] * element


def _seen_new_tokens(shape: dict[str, Any]) -> float:
    """Of all new rows of a sequence, by all of them together: in a chain all before a row and
    itself, in the binary tree of attention_bench.cc its ancestors and itself."""
    rows: int = shape["rows"]
    if shape.get("tree"):
        return sum((node + 1).bit_length() for node in range(rows))
    return rows * (rows + 1) / 2


def _attention_work(shape: dict[str, Any]) -> Work:
    tokens = shape["prefix"] + shape["sequences"] * shape["own"]
    length, rows = shape["prefix"] + shape["own"], shape["rows"]
    pairs = shape["sequences"] * (rows * (length - rows) + _seen_new_tokens(shape))
    dims = shape["head_dim"] + shape.get("v_head_dim", shape["head_dim"])
    # Codes are multiplied as bfloat16.
    products = shape["dtype"] if shape["dtype"] == "float32" else "bfloat16"
    flop = 2 * shape["heads"] * dims * pairs
    return Work(((tokens * _token_bytes(shape), flop),), products)


def _attention_case(
    name: str,
    group: str,
    shape: dict[str, Any],
    goals: tuple[Goal, ...],
    *,
    copies: bool = False,
    quick: bool,
    cache_bytes: int,
    threads: int,
) -> Case:
    shape = {"heads": HEADS, "head_dim": HEAD_DIM} | shape
    token_bytes = int(_token_bytes(shape))
    layer_tokens = shape["prefix"] + shape["sequences"] * shape["own"]
    layers = _layers(layer_tokens * token_bytes, cache_bytes)
    request = shape | {"kind": "attention", "threads": threads, "layers": layers}
    sides = [Side("Quire", "quire", request)]
    side_bytes = layers * layer_tokens * token_bytes
    if copies:
        own = request | {"own": shape["own"] + shape["prefix"], "prefix": 0}
        copy_bytes = own["own"] * own["sequences"] * token_bytes
        own["layers"] = _layers(copy_bytes, cache_bytes)
        sides.append(Side("own copies", "quire", own))
        side_bytes = max(side_bytes, own["layers"] * copy_bytes)
    sides.append(Side("vLLM", "vllm-kernel", request))
    work = _attention_work(shape)
    return Case(
        name=name,
        group=group,
        sides=tuple(sides),
        metrics=(Metric(work=work, goals=goals),),
        quick=quick,
        side_bytes=side_bytes,
    )


def _prefill_cases(dtype: str, common: dict[str, Any]) -> list[Case]:
    cases = []
    for new in (512, 2048):
        for cached in (0, 4096):
            shape = {
                "dtype": dtype,
                "kv_heads": HEADS // 4,
                "sequences": 1,
                "prefix": 0,
                "own": new + cached,
                "rows": new,
            }
            cases.append(
                _attention_case(
                    f"prefill/{_SHORT[dtype]}/gqa4/{new}+{cached}",
                    "b",
                    shape,
                    (Goal("vLLM", 2.0), Goal("bound", 0.75)),
                    quick=dtype == "bfloat16" and (new, cached) in ((512, 0), (512, 4096)),
                    **common,
                )
            )
    return cases


def _attention_cases(cache_bytes: int, threads: int) -> list[Case]:
    cases = []
    common: dict[str, Any] = {"cache_bytes": cache_bytes, "threads": threads}
    decode_goals = (Goal("vLLM", 2.0), Goal("bound", 0.75, in_fast_memory=0.60))
    batches = (1, 8, 32)
    for dtype in ("bfloat16", "float32"):
        shapes = [(4, b, n) for b in batches for n in (512, 4096, 32768)]
        shapes += [
            (group, b, n)
            for group in (1, 8)
            for b, n in ((1, 32768), (8, 4096), (32, 512), (32, 4096))
        ]
        for group, sequences, length in shapes:
            shape = {
                "dtype": dtype,
                "kv_heads": HEADS // group,
                "sequences": sequences,
                "prefix": 0,
                "own": length,
                "rows": 1,
            }
            cases.append(
                _attention_case(
                    f"decode/{_SHORT[dtype]}/gqa{group}/{sequences}x{length}",
                    "a",
                    shape,
                    decode_goals,
                    quick=(group, sequences, length) in ((4, 1, 4096), (4, 32, 512), (4, 8, 4096))
                    or (
                        dtype == "bfloat16"
                        and (group, sequences, length) in ((1, 8, 4096), (8, 8, 4096))
                    ),
                    **common,
                )
            )
        for group in (4, 1, 8):
            for sequences in (8, 32):
                shape = {
                    "dtype": dtype,
                    "kv_heads": HEADS // group,
                    "sequences": sequences,
                    "prefix": 4096,
                    "own": 256,
                    "rows": 1,
                }
                gain = {4: 2.2, 1: 2.8}.get(group)
                cases.append(
                    _attention_case(
                        f"shared/{_SHORT[dtype]}/gqa{group}/{sequences}x(4096+256)",
                        "a",
                        shape,
                        () if gain is None else (Goal("own copies", gain),),
                        copies=True,
                        quick=dtype == "bfloat16" and group == 4 and sequences == 8,
                        **common,
                    )
                )
        cases += _prefill_cases(dtype, common)
    return cases


def _narrow_cases(cache_bytes: int, threads: int) -> list[Case]:
    """Decode over int8 and fp8 beside the same over bfloat16."""
    cases = []
    for dtype in ("int8", "float8_e4m3fn"):
        for group, sequences, length in (
            (4, 1, 4096),
            (4, 8, 4096),
            (4, 32, 512),
            (4, 1, 32768),
            (1, 8, 4096),
            (1, 32, 512),
        ):
            shape: dict[str, Any] = {
                "dtype": dtype,
                "kv_heads": HEADS // group,
                "sequences": sequences,
                "prefix": 0,
                "own": length,
                "rows": 1,
            }
            goals = (Goal("bf16 KV", 1.6),) if dtype == "int8" else ()
            case = _attention_case(
                f"decode/{_SHORT[dtype]}/gqa{group}/{sequences}x{length}",
                "a",
                shape,
                (*goals, Goal("bound", 0.75, in_fast_memory=0.60)),
                quick=(group, sequences, length) == (4, 8, 4096),
                cache_bytes=cache_bytes,
                threads=threads,
            )
            beside = _beside(case, "bf16 KV", {"dtype": "bfloat16"})
            cases.append(dataclasses.replace(beside, side_bytes=2 * case.side_bytes))
    return cases


def _beside(case: Case, name: str, changes: dict[str, Any]) -> Case:
    """The case with one other side: our own kernel with another request."""
    ours = case.sides[0]
    sides = (ours, Side(name, "quire", ours.request | changes))
    return dataclasses.replace(case, sides=sides)


# ---- (h): token trees, (i): latent attention


def _tree_case(
    sequences: int, nodes: int, cached: int, goals: tuple[Goal, ...], **common: Any
) -> Case:
    """Verification of a token tree beside a chunk of as many tokens on the same sequences."""
    shape: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_heads": HEADS // 4,
        "sequences": sequences,
        "prefix": 0,
        "own": cached + nodes,
        "rows": nodes,
        "tree": True,
    }
    name = f"tree/bf16/gqa4/{sequences}x({cached}+{nodes})"
    return _beside(_attention_case(name, "h", shape, goals, **common), "chain", {"tree": False})


def _tree_cases(cache_bytes: int, threads: int) -> list[Case]:
    common: dict[str, Any] = {"cache_bytes": cache_bytes, "threads": threads}
    full = (Goal("chain", 1 / 1.15), Goal("bound", 0.65))
    cases = [_tree_case(8, 64, 4096, full, quick=True, **common)]
    for sequences in (1, 8, 32):
        few = (Goal("bound", 1 / 1.5),)
        cases.append(_tree_case(sequences, 4, 4096, few, quick=sequences == 8, **common))
    return cases


def _latent_case(
    heads: int, sequences: int, length: int, *, quick: bool, cache_bytes: int, threads: int
) -> Case:
    """DeepSeek's shape: 512 latent dimensions, which are the values too, and 64 rotated ones."""
    shape: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_heads": 1,
        "heads": heads,
        "head_dim": 576,
        "v_head_dim": 512,
        "latent": True,
        "sequences": sequences,
        "prefix": 0,
        "own": length,
        "rows": 1,
    }
    case = _attention_case(
        f"latent/bf16/{heads}h/{sequences}x{length}",
        "i",
        shape,
        (Goal("bound", 0.75),),
        quick=quick,
        cache_bytes=cache_bytes,
        threads=threads,
    )
    return dataclasses.replace(case, sides=case.sides[:1])


def _latent_cases(cache_bytes: int, threads: int) -> list[Case]:
    return [
        _latent_case(
            heads,
            sequences,
            length,
            quick=(sequences, length) == (8, 4096),
            cache_bytes=cache_bytes,
            threads=threads,
        )
        for heads in (16, 128)
        for sequences in (1, 8, 32)
        for length in (512, 4096, 32768)
    ]


# ---- (j): TVM's own cache

# What the worker of group c and the calls behind TVM's names both have.
_NAMED_CALLS = (
    "begin_step",
    "begin_other_order",
    "begin_forked_end",
    "begin_forked_middle",
    "end",
    "fork_end",
    "fork_middle",
    "pop",
    "remove",
)


def _by_names(request: dict[str, Any]) -> tuple[Side, Side]:
    """Quire's cache behind TVM's names and TVM's own, in one process."""
    return (
        Side("quire.tvm", "tvm-cache", request | {"ours": True}),
        Side("TVM", "tvm-cache", request | {"ours": False}),
    )


def _tvm_plan_case(name: str, sequences: int, length: int, threads: int, **marks: bool) -> Case:
    request = {"kind": "plan", "sequences": sequences, "length": length}
    thirtieth = (Goal("TVM", 30.0), Goal("TVM", 30.0, side="quire.tvm"))
    return Case(
        name=name,
        group="j",
        sides=(Side("Quire", "quire", request | {"threads": threads}), *_by_names(request)),
        metrics=tuple(
            Metric(call, "us", goals=thirtieth if call.startswith("begin") else ())
            for call in _NAMED_CALLS
        ),
        **marks,
    )


def _tvm_attention_case(
    sequences: int, own: int, rows: int, cache_bytes: int, threads: int
) -> Case:
    shape: dict[str, Any] = {
        "dtype": "float32",
        "kv_heads": HEADS // 4,
        "sequences": sequences,
        "prefix": 0,
        "own": own,
        "rows": rows,
    }
    cached = f"{sequences}x{own - 1}" if rows == 1 else f"prefill/{rows}+{own - rows}"
    case = _attention_case(
        f"tvm/attention/f32/gqa4/{cached}",
        "j",
        shape,
        (),
        quick=False,
        cache_bytes=cache_bytes,
        threads=threads,
    )
    names = {"kind": "attention", "heads": HEADS, "kv_heads": HEADS // 4, "head_dim": HEAD_DIM}
    names |= {"sequences": sequences, "own": own, "rows": rows}
    return dataclasses.replace(case, sides=(case.sides[0], *_by_names(names)))


def _tvm_cases(cache_bytes: int, threads: int) -> list[Case]:
    cases = [
        _tvm_plan_case(
            f"tvm/plan/{sequences}x{length}",
            sequences,
            length,
            threads,
            quick=(sequences, length) == (32, 4096),
            long=length == 32768,
        )
        for sequences, length in _TVM
    ]
    for sequences, own, rows in ((1, 513, 1), (1, 4097, 1), (8, 4097, 1), (32, 513, 1)):
        cases.append(_tvm_attention_case(sequences, own, rows, cache_bytes, threads))
    cases.append(_tvm_attention_case(1, 512, 512, cache_bytes, threads))
    return cases


# ---- (c): planning

# Microseconds of TVM 0.27's cache on an EPYC of the Zen 4 generation:
# BeginForward, the same over forked children, fork at the end and in the middle,
# pop, remove, EndForward. Quoted, not measured beside Quire.
_TVM = {
    (32, 4096): (91, 69, 5.3, 2.4, 0.4, 0.4, 0.4),
    (32, 32768): (405, 233, 7.7, 3.3, 0.7, 0.4, 0.6),
    (256, 4096): (569, 211, 5.6, 2.3, 0.6, 0.3, 0.7),
}
_TVM_NAME = "TVM (quoted)"


def _plan_cases(threads: int) -> list[Case]:
    cases = []
    for (sequences, length), figures in _TVM.items():
        begin, forked, fork_end, fork_middle, pop, remove, end = (x * 1e-6 for x in figures)
        is_goal = (sequences, length) == (256, 4096)
        same = (Goal("limit", 20e-6),) if is_goal else ()
        new = (Goal("limit", 60e-6),) if is_goal else ()
        fork = (Goal("limit", 1e-6),)
        rows: list[tuple[str, float | None, tuple[Goal, ...]]] = [
            ("begin_step", begin, same),
            ("begin_repeat", begin, new),
            ("begin_other_order", begin, new),
            ("begin_forked_end", forked, new),
            ("begin_forked_middle", forked, new),
            ("abort", None, ()),
            ("end", end, ()),
            ("fork_end", fork_end, fork),
            ("fork_middle", fork_middle, fork),
            ("pop", pop, ()),
            ("remove", remove, ()),
        ]
        request = {"kind": "plan", "sequences": sequences, "length": length, "threads": threads}
        cases.append(
            Case(
                name=f"plan/{sequences}x{length}",
                group="c",
                sides=(Side("Quire", "quire", request),),
                metrics=tuple(
                    Metric(
                        name=name,
                        unit="us",
                        goals=goals,
                        quoted={} if peer is None else {_TVM_NAME: peer},
                    )
                    for name, peer, goals in rows
                ),
                quick=True,
            )
        )
    return cases


# ---- (d), (e): whole models

# Of the contexts that a case computes before it measures: some minutes on two cores.
_LONG_FLOP = 3e13


def _sides(model: models.Model, request: dict[str, Any], llama: str) -> tuple[Side, ...]:
    if model.is_quantised:
        # llama.cpp packs the weights again while it loads them, unless it is told not to.
        return (
            Side("Quire", "quire-engine", request),
            Side("llama.cpp", llama, request),
            Side("llama.cpp --no-repack", f"{llama}-plain", request),
        )
    return (
        Side("Quire", "quire-engine", request),
        Side("llama.cpp", llama, request),
        Side("vLLM", "vllm-engine", request),
    )


def _precision(model: models.Model) -> Literal["bfloat16", "int8"]:
    return "int8" if model.is_quantised else "bfloat16"


def _prefill_case(model: models.Model, tokens: int) -> Case:
    flop = model.flop(tokens, tokens * (tokens + 1) / 2, 1)
    # Short prompts several times in a round: about a second or two.
    repetitions = max(1, min(5, int(2e11 / flop)))
    return Case(
        name=f"model/{model.name}/prefill/{tokens}",
        group="d",
        sides=_sides(
            model, {"kind": "prefill", "tokens": tokens, "repetitions": repetitions}, "llama-bench"
        ),
        metrics=(
            Metric(
                unit="tokens",
                tokens=tokens,
                work=Work(((model.step_bytes(0), flop),), _precision(model)),
                goals=_quantised_goals(1.4)
                if model.is_quantised
                else (Goal("llama.cpp", 1.35), Goal("vLLM", 1.0)),
            ),
        ),
        quick=tokens == 512 and model.name in ("embedded", "110m"),
        model=model.name,
        tokens=tokens + 2,
        length=tokens + 2,
    )


def _quantised_goals(llama: float) -> tuple[Goal, ...]:
    return (Goal("llama.cpp", llama), Goal("llama.cpp --no-repack", llama))


def _generation_case(model: models.Model, depth: int, batch: int) -> Case:
    tokens = 32
    length = max(depth, 16)
    length = min(length, model.max_positions - tokens - 2)
    middle = length + tokens / 2
    work = Work(
        (
            (
                model.step_bytes(batch * middle),
                model.flop(batch, batch * middle, batch),
            ),
        ),
        _precision(model),
    )
    goals: tuple[Goal, ...] = ()
    if model.is_quantised:
        if batch == 1:
            goals = (*_quantised_goals(1.1), Goal("bound", 0.85))
        elif batch == 16:
            goals = _quantised_goals(1.7)
    elif batch == 1:
        goals = (Goal("llama.cpp", 1.0),)
    elif batch == 16:
        goals = (Goal("llama.cpp", 1.7), Goal("vLLM", 1.3))
    return Case(
        name=f"model/{model.name}/generate/{batch}x{depth}",
        group="d",
        sides=_sides(
            model,
            {"kind": "generate", "depth": length, "batch": batch, "tokens": tokens},
            # llama.cpp's own programs where they can be used: they serve no requests and sample
            # nothing. Behind a long context they would compute it again in every round.
            "llama-server" if depth > 0 else "llama-bench" if batch == 1 else "llama-batched-bench",
        ),
        metrics=(Metric(unit="tokens", tokens=batch, work=work, goals=goals),),
        quick=(model.name, depth, batch)
        in (("110m", 0, 1), ("110m", 0, 16), ("1b", 0, 1), ("1b-q4_k_m", 0, 1)),
        long=2 * batch * depth * model.layer_parameters > _LONG_FLOP,
        model=model.name,
        tokens=batch * (length + tokens + 2),
        sequences=batch,
        length=length + tokens + 2,
    )


def _shared_case(model: models.Model) -> Case:
    prefix, batch, tokens = 2048, 16, 32
    own_rows = batch * OWN_TOKENS
    first = (
        model.step_bytes(prefix),
        model.flop(own_rows, own_rows * (prefix + OWN_TOKENS / 2), batch),
    )
    kv_tokens = prefix + batch * (OWN_TOKENS + tokens / 2)
    step = (
        model.step_bytes(kv_tokens),
        model.flop(batch, batch * (prefix + OWN_TOKENS + tokens / 2), batch),
    )
    length = prefix + OWN_TOKENS + tokens + 2
    return Case(
        name=f"model/{model.name}/shared/{batch}x({prefix}+{OWN_TOKENS})",
        group="d",
        sides=_sides(
            model,
            {"kind": "shared", "prefix": prefix, "batch": batch, "tokens": tokens},
            "llama-server",
        ),
        metrics=(Metric(unit="s", work=Work((first,) + (step,) * (tokens - 1), "bfloat16")),),
        # llama-server computes the prefix in every slot.
        long=2 * batch * prefix * model.layer_parameters > _LONG_FLOP,
        model=model.name,
        tokens=batch * length,
        sequences=batch,
        length=length,
    )


def _first_token_case(model: models.Model) -> Case:
    prefix = 1024
    pairs = OWN_TOKENS * (prefix + OWN_TOKENS / 2)
    length = prefix + OWN_TOKENS + 2
    return Case(
        name=f"model/{model.name}/first_token/{prefix}+{OWN_TOKENS}",
        group="d",
        sides=_sides(
            model, {"kind": "first_token", "prefix": prefix, "repetitions": 3}, "llama-server"
        ),
        metrics=(
            Metric(
                work=Work(
                    ((model.step_bytes(prefix), model.flop(OWN_TOKENS, pairs, 1)),), "bfloat16"
                ),
                goals=(Goal("llama.cpp", 3.0), Goal("vLLM", 1 / 0.6)),
            ),
        ),
        quick=model.name == "110m",
        model=model.name,
        tokens=4 * length,
        length=length,
    )


def _start_case(model: models.Model) -> Case:
    context = 4096
    request = {"context": context}
    return Case(
        name=f"start/{model.name}/{context}",
        group="e",
        sides=(
            Side("Quire", "quire-start", request),
            Side("llama.cpp", "llama-start", request),
        ),
        metrics=(
            Metric("start", "s", goals=(Goal("llama.cpp", 1.0),)),
            Metric("memory at start", "MiB"),
            Metric("memory, context full", "MiB", goals=(Goal("llama.cpp", 1 / 1.1),)),
        ),
        quick=model.name in ("embedded", "110m"),
        model=model.name,
        tokens=context,
        length=context,
    )


# ---- (f): chunks in tiers

# Layers, kv heads, head dimension, chunks of 256 tokens: some hundred MiB of each shape.
_CHUNK_SHAPES = {
    "135m": (30, 3, 64, 64),
    "1.1b": (22, 4, 64, 64),
    "8b": (32, 8, 128, 12),
}
_BLOCK_TOKENS = 256

# Tier, whether a put survives the loss of power: Quire's side, then the others.
_PLACES: tuple[tuple[str, bool, dict[str, str], tuple[Goal, ...]], ...] = (
    ("ram", False, {"copy": "copy"}, (Goal("copy", 1 / 1.15),)),
    (
        "disk",
        False,
        {
            "disk alone": "raw_disk",
            "RocksDB": "rocksdb",
            "LMDB (memory)": "lmdb",
            "files": "files",
        },
        (Goal("disk alone", 0.85), Goal("RocksDB", 2.0)),
    ),
    (
        "disk",
        True,
        {"disk alone": "raw_disk", "RocksDB": "rocksdb", "files": "files"},
        (Goal("disk alone", 0.85), Goal("RocksDB", 2.0)),
    ),
    ("redis", False, {"hiredis": "hiredis"}, (Goal("hiredis", 0.9),)),
)


def _chunk_case(
    shape: str,
    tier: str,
    sync: bool,
    peers: dict[str, str],
    goals: tuple[Goal, ...],
    chunks: int,
) -> Case:
    layers, kv_heads, head_dim, _ = _CHUNK_SHAPES[shape]
    request = {
        "kind": "chunks",
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_tokens": _BLOCK_TOKENS,
        "chunks": chunks,
        "sync": sync,
    }
    size = chunks * _BLOCK_TOKENS * 2 * layers * kv_heads * head_dim * 2
    places = {"Quire": tier} | peers
    return Case(
        name=f"chunks/{shape}/{tier}" + ("-sync" if sync else ""),
        group="f",
        sides=tuple(Side(name, "quire", request | {"place": p}) for name, p in places.items()),
        metrics=tuple(Metric(name, "GB/s", bytes=size, goals=goals) for name in ("put", "get")),
        quick=shape == "1.1b" and not sync,
        side_bytes=3 * size,
    )


def _chunk_cases() -> list[Case]:
    return [
        _chunk_case(shape, *place, chunks=_CHUNK_SHAPES[shape][-1])
        for shape in _CHUNK_SHAPES
        for place in _PLACES
    ]


# ---- (g): first token with KV from a tier


def _tier_case(model: models.Model) -> Case:
    tokens = 4096
    request = {"kind": "again", "tokens": tokens}
    sides = {
        "Quire": "quire-disk",
        "cold": "quire-cold",
        "pages": "quire-pages",
        "Redis": "quire-redis",
    }
    return Case(
        name=f"tier/{model.name}/first_token/{tokens}",
        group="g",
        sides=tuple(Side(name, worker, request) for name, worker in sides.items()),
        metrics=(Metric(goals=(Goal("cold", 10.0),) if model.name == "1b" else ()),),
        quick=model.name == "110m",
        model=model.name,
        tokens=tokens + 256,  # in whole pages, and one for the answer
        length=tokens + 2,
    )


# ---- (k): guesses

_RECORDS = "".join(
    f'{{"id": {i}, "name": "sensor {i}", "unit": "degrees Celsius", "enabled": true}},\n'
    for i in range(1, 9)
)
_PARAGRAPH = (
    "The lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the "
    "hundred and twelve steps, cleaned the glass of the lamp and wrote the weather into his book. "
)
# What is to be continued: where the text repeats itself, and where it does not.
_TEXTS = {
    "records": "[\n" + _RECORDS,
    "copy": 3 * _PARAGRAPH,
    "prose": "Once upon a time there was a merchant who had three daughters. The youngest of them",
}


def _speculation_case(name: str, text: str, model: models.Model, tokens: int, quick: bool) -> Case:
    request = {"kind": "text", "text": text, "tokens": tokens}
    goals = (Goal("plain", 1.0),) if text != _TEXTS["prose"] else ()
    length = len(text) + tokens + 2  # a token has at least one character
    return Case(
        name=name,
        group="k",
        sides=(Side("Quire", "quire-ngram", request), Side("plain", "quire-plain", request)),
        metrics=(
            Metric(unit="tokens", goals=goals),
            Metric("forwards of a token", "forwards"),
        ),
        quick=quick,
        model=model.name,
        tokens=length + 512,  # pages of the prompt and of the answer are not full
        length=length,
    )


def _speculation_cases() -> list[Case]:
    model = models.describe("embedded")
    return [
        _speculation_case(f"speculate/{model.name}/{name}", text, model, 128, name == "records")
        for name, text in _TEXTS.items()
    ]


# ---- (l): growth


def _growth_case(
    work: str, rope: str, page_size: int, steps: int, threads: int, *, quick: bool
) -> Case:
    """A life of `steps` steps: what one costs at its beginning and at its end."""
    request = {
        "kind": "growth",
        "work": work,
        "rope": rope,
        "page_size": page_size,
        "steps": steps,
        "threads": threads,
    }
    return Case(
        name=f"growth/{work}/{rope}/page{page_size}/{steps}",
        group="l",
        sides=(Side("Quire", "quire", request),),
        metrics=(
            Metric("begin", "us"),
            Metric("end", "us"),
            Metric("ratio", "times", goals=(Goal("most", 1.2),)),
            Metric("memory", "MiB"),
        ),
        quick=quick,
        long=not quick,
    )


def _growth_cases(threads: int) -> list[Case]:
    cases = []
    for quick, streams, retained, removals in (
        (True, 20_000, 5_000, 2_000),
        (False, 1_000_000, 100_000, 10_000),
    ):
        cases += [
            _growth_case("stream", rope, page_size, streams, threads, quick=quick)
            for rope in ("inline", "normal")
            for page_size in (1, 16, 256)
        ]
        cases.append(_growth_case("retained", "normal", 16, retained, threads, quick=quick))
        cases.append(_growth_case("removals", "normal", 16, removals, threads, quick=quick))
    return cases


# ---- (m): serving

_SERVERS = (
    ("Quire", "quire-serve"),
    ("EngineLoop", "quire-loop"),
    ("llama-server", "llama-serve"),
    ("vLLM", "vllm-serve"),
)
_PEERS_FASTER = (Goal("llama-server", 1.2), Goal("vLLM", 1.1))
_HTTP_COSTS = Goal("EngineLoop", 3e-3, adds=True)  # of one client
# The memory of `quire serve` by what it may have: all that --dry-run names, and 150 MiB.
_MEMORY = (
    Metric("memory", "MiB"),
    Metric("memory by its bound", "times", goals=(Goal("most", 1.0),)),
)


def _serving_case(
    name: str,
    request: dict[str, Any],
    metrics: tuple[Metric, ...],
    model: models.Model,
    length: int,
    *,
    answers: int,
    quick: bool = False,
) -> Case:
    return Case(
        name=f"serve/{model.name}/{name}",
        group="m",
        sides=tuple(Side(server, worker, request) for server, worker in _SERVERS),
        metrics=metrics,
        quick=quick,
        long=model.name == "1b",
        model=model.name,
        tokens=answers * (length + 256),  # the last page of an answer is not full
        sequences=answers,
        length=length,
    )


def _clients_case(model: models.Model, clients: int, prompt: int, tokens: int) -> Case:
    times = 8 if clients == 1 else 1  # one prompt's time says little on a noisy machine
    request = {
        "kind": "clients",
        "clients": clients,
        "prompt": prompt,
        "tokens": tokens,
        "times": times,
    }
    speed = () if clients == 1 else _PEERS_FASTER
    if clients == 32:
        speed += (Goal("EngineLoop", 0.99 if model.name == "1b" else 0.95),)
    return _serving_case(
        f"clients/{clients}x({prompt}+{tokens})",
        request,
        (
            Metric(unit="tokens", tokens=clients * times * tokens, goals=speed),
            Metric("first token", goals=(_HTTP_COSTS,) if clients == 1 else ()),
            Metric("between tokens", goals=(_HTTP_COSTS,) if clients == 1 else ()),
            Metric("between tokens, p99"),
            *_MEMORY,
        ),
        model,
        prompt + tokens + 2,
        answers=clients,
        quick=model.name == "110m" and clients == 8,
    )


def _chats_case(model: models.Model) -> Case:
    request = {"clients": 8, "common": 1024, "turns": 6, "question": 64, "tokens": 64}
    return _serving_case(
        "chats/8x6",
        {"kind": "chats", **request},
        (
            Metric(unit="s"),
            Metric("first token, turn 1"),
            Metric("first token, later", goals=(Goal("llama-server", 2.0),)),
            *_MEMORY,
        ),
        model,
        1024 + 6 * 128 + 2,
        answers=8,
    )


def _branches_case(model: models.Model) -> Case:
    branches, prompt, own, tokens = 16, 4096, 16, 64
    return _serving_case(
        f"branches/{branches}x{prompt}",
        {"kind": "branches", "branches": branches, "prompt": prompt, "own": own, "tokens": tokens},
        (
            Metric(unit="tokens", tokens=branches * tokens, goals=_PEERS_FASTER),
            Metric("first token, alone"),
            Metric("first token"),
            Metric("between tokens"),
            *_MEMORY,
        ),
        model,
        prompt + own + tokens + 2,
        answers=branches,
    )


def _arrivals_case(model: models.Model) -> Case:
    request = {"clients": 8, "prompts": 3, "prompt": 4096, "tokens": 4096}
    return _serving_case(
        "arrivals/8+3x4096",
        {"kind": "arrivals", **request},
        (
            Metric("first token"),
            Metric("between tokens, quiet p99"),
            Metric("between tokens, p99", goals=(Goal("llama-server", 4.0), Goal("vLLM", 4.0))),
            Metric("p99 by its bound", "times", goals=(Goal("most", 1.0),)),
            *_MEMORY,
        ),
        model,
        4096 + 32 + 2,
        answers=9,
    )


def _server_start_case(model: models.Model, connections: int) -> Case:
    """Connections that idle are asked of Quire alone: llama-server has a thread for each."""
    return Case(
        name=f"serve/{model.name}/start",
        group="m",
        sides=(
            Side("Quire", "quire-serve-start", {"connections": connections}),
            Side("llama-server", "llama-serve-start", {"connections": 0}),
        ),
        metrics=(
            Metric("start", "s", goals=(Goal("llama-server", 0.5, adds=True),)),
            Metric("memory at start", "MiB"),
            Metric("memory of idle connections", "MiB"),
            Metric("idle connection by its bound", "times", goals=(Goal("most", 1.0),)),
        ),
        model=model.name,
        tokens=4096,
        length=4096,
    )


def _serving_cases() -> list[Case]:
    cases = []
    for name in models.NAMES:
        model = models.describe(name)
        cases += [_clients_case(model, clients, 512, 64) for clients in (1, 8, 32)]
        cases += [_chats_case(model), _branches_case(model), _arrivals_case(model)]
        cases += [_server_start_case(model, 500)]
    return cases


# ---- (n): blending: single steps, and prompts about documents


def documents_case(
    model: models.Model, place: str, tokens: int, *, quick: bool = False, long: bool = False
) -> Case:
    """Six documents in ever other orders, and a question about them. "all again": as at ratio 1."""
    request = {"kind": "documents", "documents": 6, "document": tokens, "question": 32}
    length = 8 + 6 * tokens + 32
    sides = {
        "Quire": (0.15, "blend"),
        "full prefill": (None, None),
        "prefix cache": (None, "prefix"),
        "full reuse": (0.0, "blend"),
        "5 %": (0.05, "blend"),
        "30 %": (0.3, "blend"),
        "all again": (1.0, "again"),
    }
    worker = f"quire-blend-{place}"
    goals = {"embedded": 3.0, "1b": 4.0} if place != "disk" else {"embedded": 2.5, "1b": 2.5}
    whole = "full prefill"
    first_token = Metric(
        "first token",
        goals=(Goal(whole, goals[model.name]), Goal(whole, 1 / 1.05, side="all again")),
    )
    return Case(
        name=f"blend/{model.name}/first_token/6x{tokens}+32/{place}",
        group="n",
        sides=(
            *(
                Side(name, worker, request | {"ratio": ratio, "salt": salt})
                for name, (ratio, salt) in sides.items()
            ),
            Side("llama-server", "llama-reuse", request),
        ),
        metrics=(
            first_token,
            Metric("loading"),
            Metric("moving"),
            Metric("selecting"),
            Metric("memory", "MiB"),
        ),
        quick=quick,
        long=long,
        model=model.name,
        # What the prompts of two rounds leave, so that no document has to give way.
        tokens=2 * (len(sides) + 2) * (length + 512),
        length=length + 2,
    )


def _documents_cases() -> list[Case]:
    return [
        documents_case(models.describe(name), place, 512, long=name == "1b")
        for name in ("embedded", "1b")
        for place in ("pages", "ram", "disk")
    ]


def _blend_cases() -> list[Case]:
    """Bytes are those of the keys that move, each read and written once."""
    cases = []
    for dtype in ("bfloat16", "float16", "float32"):
        tokens, size = 2048, 4 if dtype == "float32" else 2
        key_bytes = tokens * 8 * 128 * size
        goal = Goal("limit", key_bytes / 3e9)
        request = {"kind": "blend", "dtype": dtype, "tokens": tokens}
        cases.append(
            Case(
                name=f"blend/{dtype}/{tokens}",
                group="n",
                sides=(Side("Quire", "quire", request),),
                metrics=(
                    Metric("move", "GB/s", bytes=key_bytes, goals=(goal,)),
                    Metric("compare", "GB/s", bytes=key_bytes),
                ),
                quick=True,
            )
        )
    return cases


# ---- (o): beams of transformers


def _beams_case(beams: int, prompt: int, tokens: int, *, quick: bool) -> Case:
    request = {"beams": beams, "prompt": prompt, "tokens": tokens}
    return Case(
        name=f"hf/embedded/beams/{beams}x({prompt}+{tokens})",
        group="o",
        sides=(
            Side("Quire", "quire-hf", request),
            Side("DynamicCache", "transformers", request),
        ),
        metrics=(Metric(unit="s"), Metric("CPU", "s"), Metric("KV", "MiB")),
        quick=quick,
        model="embedded",
    )


# ---- (p): first token under vLLM, with quire.vllm.QuireConnector


def connector_case(model: models.Model, tokens: int, *, quick: bool) -> Case:
    request = {"kind": "again", "tokens": tokens}
    sides = {
        "Quire": "vllm-quire-ram",
        "disk": "vllm-quire-disk",
        "vLLM's hit": "vllm-hit",
    }
    if model.name != "1b":  # six processes of vLLM with 1.1 B parameters want 30 GB
        sides |= {"Redis": "vllm-quire-redis", "LMCache": "vllm-lmcache", "cold": "vllm-cold"}
    own = "vLLM's hit"
    goals = (Goal(own, 1 / 1.2), Goal(own, 1 / 2, side="disk"), Goal("LMCache", 2.0))
    return Case(
        name=f"vllm/{model.name}/first_token/{tokens}",
        group="p",
        sides=tuple(Side(name, worker, request) for name, worker in sides.items()),
        metrics=(Metric(goals=goals),),
        quick=quick,
        model=model.name,
        tokens=tokens + 256,
        length=tokens + 2,
    )


# ---- (q): transfer


def _move_case(shape: str, tokens: int, *, quick: bool) -> Case:
    """Keys and values of a prompt, from the pages of one cache to those of another one."""
    layers, kv_heads, head_dim, _ = _CHUNK_SHAPES[shape]
    request = {
        "kind": "transfer",
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tokens": tokens,
    }
    size = tokens * 2 * layers * kv_heads * head_dim * 2
    ways = {"Quire": "unix", "TCP": "tcp", "UCX": "ucx", "one process": "hand", "copy": "copy"}
    # Messages of memory to memory, without digests and pages: UCX's own benchmark over the same
    # transports (UCX_TLS), and what other engines move keys and values with.
    messages = {"kind": "transfer", "bytes": size, "message_bytes": 1 << 20}
    peers = {"ucx_perftest": "ucx-perftest", "Mooncake": "mooncake", "NIXL": "nixl"}
    return Case(
        name=f"transfer/{shape}/{tokens}",
        group="q",
        sides=(
            *(Side(name, "quire", request | {"way": way}) for name, way in ways.items()),
            *(Side(name, worker, messages) for name, worker in peers.items()),
        ),
        metrics=(Metric(unit="GB/s", bytes=size, goals=(Goal("copy", 0.5),)),),
        quick=quick,
        side_bytes=4 * size,
    )


def _pair_case(model: models.Model, tokens: int, within: float, *, quick: bool) -> Case:
    """A new prompt up to its first token: computed by another process, or by the one that
    answers; or that and what one engine leaves in a Redis and another one finds there."""
    request = {"kind": "prefill", "tokens": tokens, "repetitions": 1}
    return Case(
        name=f"pair/{model.name}/first_token/{tokens}",
        group="q",
        sides=(
            Side("Quire", "quire-pair", request),
            Side("one process", "quire-cold", request),
            Side("Redis", "quire-redis-pair", request),
        ),
        metrics=(Metric(goals=(Goal("one process", 1 / (1 + within)), Goal("Redis", 1.0))),),
        quick=quick,
        model=model.name,
        tokens=tokens + 512,  # in whole pages, and one for the answer
        length=tokens + 2,
    )


def _channel_case(part_kib: int, mib: int, *, quick: bool) -> Case:
    """Messages of one size, from memory to memory: no caches, no pages. Quire's have digests."""
    part = part_kib << 10
    request = {"kind": "channel", "bytes": mib << 20, "message_bytes": part}
    ways = {"Quire": "unix", "TCP": "tcp", "UCX": "ucx", "copy": "copy"}
    messages = request | {"kind": "transfer"}
    size = f"{part_kib}KiB" if part < 1 << 20 else f"{part >> 20}MiB"
    return Case(
        name=f"channel/{size}",
        group="q",
        sides=(
            *(Side(name, "quire", request | {"way": way}) for name, way in ways.items()),
            Side("ucx_perftest tcp", "ucx-perftest", messages | {"tls": "tcp"}),
            Side("ucx_perftest posix", "ucx-perftest", messages | {"tls": "posix"}),
            Side("Mooncake", "mooncake", messages),
            Side("NIXL", "nixl", messages),
        ),
        metrics=(
            Metric(
                unit="GB/s",
                bytes=mib << 20,
                goals=(
                    Goal("copy", 0.5),
                    Goal("ucx_perftest posix", 1.2),
                    Goal("ucx_perftest tcp", 0.9, side="TCP"),
                    Goal("Mooncake", 2.0, side="TCP"),
                ),
            ),
        ),
        quick=quick,
        side_bytes=2 * mib << 20,
    )


def _streams_case(part_kib: int, mib: int, *, quick: bool) -> Case:
    """The same over TCP alone, in several streams."""
    one = _channel_case(part_kib, mib, quick=quick)
    (tcp,) = (side.request for side in one.sides if side.name == "TCP")
    counts = {"Quire": 4, "1 stream": 1, "2 streams": 2, "8 streams": 8}
    return dataclasses.replace(
        one,
        name=f"{one.name}/streams",
        sides=tuple(
            Side(name, "quire", tcp | {"streams": count}) for name, count in counts.items()
        ),
        metrics=(Metric(unit="GB/s", bytes=mib << 20),),
    )


def _apart_case(model: models.Model, prompt: int, tokens: int) -> Case:
    """Answers that one core writes while prompts arrive that a process on another core computes;
    beside it one process that has both cores."""
    clients = 8
    request = {"kind": "arrivals", "clients": clients, "prompts": 3}
    request |= {"prompt": prompt, "tokens": tokens}
    return Case(
        name=f"pair/{model.name}/arrivals/{clients}+3x{prompt}",
        group="q",
        sides=(
            Side("Quire", "quire-apart", request),
            Side("one process", "quire-together", request),
        ),
        metrics=(
            Metric("first token"),
            Metric("between tokens, quiet p99"),
            Metric("between tokens, p99", goals=(Goal("one process", 1.0),)),
            Metric("p99 by its quiet value", "times", goals=(Goal("most", 1.1),)),
        ),
        long=model.name == "1b",
        model=model.name,
        # In whole pages each.
        tokens=clients * (32 + tokens + 256) + prompt + 512,
        sequences=clients + 1,
        length=max(prompt, 32 + tokens) + 2,
    )


def _transfer_cases() -> list[Case]:
    cases = [_channel_case(kib, 256, quick=kib == 1024) for kib in (64, 1024, 16384)]
    cases += [_streams_case(kib, 256, quick=False) for kib in (64, 1024, 16384)]
    cases += [_move_case("1.1b", 2048, quick=True), _move_case("8b", 2048, quick=False)]
    for name in models.NAMES:
        cases.append(_apart_case(models.describe(name), 8000, 4096))
        for tokens in (2048, 8000):  # the embedded model has 8192 positions
            within = 0.03 if name == "1b" else 0.05
            quick = (name, tokens) == ("embedded", 2048)
            cases.append(_pair_case(models.describe(name), tokens, within, quick=quick))
    return cases


def _small_transfer_cases(model: models.Model) -> list[Case]:
    return [
        _channel_case(64, 1, quick=True),
        _streams_case(64, 1, quick=True),
        _move_case("1.1b", 64, quick=True),
        _pair_case(model, 300, 0.05, quick=True),
        _apart_case(model, 64, 500),
    ]


def smoke_cases(threads: int) -> list[Case]:
    """Tiny ones, whose figures mean nothing: do the parts work together?"""
    shape: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_heads": 8,
        "sequences": 2,
        "prefix": 0,
        "own": 256,
        "rows": 1,
    }
    common: dict[str, Any] = {"quick": True, "cache_bytes": 1, "threads": threads}
    goals = (Goal("vLLM", 2.0), Goal("bound", 0.75))
    plan = {"kind": "plan", "sequences": 4, "length": 64, "threads": threads}
    return [
        _attention_case("smoke/decode", "a", shape, goals, **common),
        _attention_case(
            "smoke/shared", "a", shape | {"prefix": 256, "own": 16}, goals, copies=True, **common
        ),
        _attention_case(
            "smoke/prefill", "b", shape | {"sequences": 1, "rows": 64}, goals, **common
        ),
        Case(
            name="smoke/plan",
            group="c",
            sides=(Side("Quire", "quire", plan),),
            metrics=(
                Metric("begin_step", "us", goals=(Goal("limit", 1.0),), quoted={_TVM_NAME: 91e-6}),
                Metric("fork_end", "us"),
            ),
        ),
        *(_chunk_case("1.1b", *place, chunks=2) for place in _PLACES),
        _tree_case(2, 8, 250, goals, **common),
        _latent_case(2, 2, 256, **common),
        _tvm_plan_case("smoke/tvm", 2, 32, threads),
        _speculation_case(
            "smoke/speculate", _TEXTS["records"], models.describe("embedded"), 8, quick=True
        ),
        _clients_case(models.describe("embedded"), 2, 16, 4),
        _serving_case(
            "chats",
            {"kind": "chats", "clients": 2, "common": 16, "turns": 2, "question": 8, "tokens": 4},
            (Metric(unit="s"), Metric("first token, later")),
            models.describe("embedded"),
            64,
            answers=2,
        ),
        _serving_case(
            "branches",
            {"kind": "branches", "branches": 3, "prompt": 32, "own": 4, "tokens": 4},
            (Metric("first token"), Metric("between tokens")),
            models.describe("embedded"),
            48,
            answers=3,
        ),
        _serving_case(
            "arrivals",
            {"kind": "arrivals", "clients": 2, "prompts": 1, "prompt": 32, "tokens": 500},
            (Metric("first token"), Metric("between tokens, p99")),
            models.describe("embedded"),
            600,
            answers=3,
        ),
        _server_start_case(models.describe("embedded"), 500),
        _beams_case(2, 8, 2, quick=True),
        *_small_transfer_cases(models.describe("embedded")),
        documents_case(models.describe("embedded"), "pages", 24),
        documents_case(models.describe("embedded"), "disk", 24),
    ]


def all_cases(cache_bytes: int, threads: int) -> list[Case]:
    cases = _attention_cases(cache_bytes, threads) + _narrow_cases(cache_bytes, threads)
    cases += _plan_cases(threads)
    for name in models.NAMES:
        model = models.describe(name)
        cases += [_prefill_case(model, tokens) for tokens in (128, 512, 2048)]
        cases += [
            _generation_case(model, depth, batch)
            for depth in (0, 2048, 8192)
            for batch in (1, 4, 16)
        ]
        cases += [_shared_case(model), _first_token_case(model)]
    for name in models.QUANTISED_NAMES:
        model = models.describe(name)
        cases += [_prefill_case(model, 512)]
        cases += [_generation_case(model, 0, batch) for batch in (1, 16)]
    started = (*models.NAMES, *models.QUANTISED_NAMES)
    cases += [_start_case(models.describe(name)) for name in started]
    cases += _chunk_cases()
    cases += [_tier_case(models.describe(name)) for name in models.NAMES]
    cases += _tree_cases(cache_bytes, threads) + _latent_cases(cache_bytes, threads)
    cases += _tvm_cases(cache_bytes, threads) + _speculation_cases()
    cases += _growth_cases(threads) + _serving_cases() + _blend_cases() + _documents_cases()
    cases += _transfer_cases()
    cases += [_beams_case(4, 512, 32, quick=True), _beams_case(4, 1536, 32, quick=False)]
    cases += [
        connector_case(models.describe(name), 3000, quick=name == "110m") for name in ("110m", "1b")
    ]
    return sorted(cases, key=lambda case: case.group)
