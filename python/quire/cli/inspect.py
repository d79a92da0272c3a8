"""`quire inspect`: this build, this machine, a model, and how it would be run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

import quire
from quire.cli import arguments, memory, models
from quire.cli.terminal import note, one_line

Facts = dict[str, Any]

# Types of weights that are not quantised, or are widened when they are used.
_NUMBERS = frozenset(("bfloat16", "float16", "float32", "float8_e4m3fn"))


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire inspect",
        description="Prints what this build can do, what a model is, the memory it takes, and the "
        "kernels that run it.",
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of the model (default: the embedded one)",
    )
    command.add_argument("--json", action="store_true", help="print one object")
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="do not load the model: print only the memory needed",
    )
    arguments.add_engine(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    engine_arguments = arguments.given(options, arguments.ENGINE)
    if options.dry_run:
        plan = memory.plan_memory(options.model, engine_arguments)
        return memory.print_plan(plan, {}, options.json)
    facts = {"build": _build_facts(), "kernels": _kernel_facts()}
    try:
        folder = models.model_folder(options.model)
    except models.Failure as error:
        if options.model is not None:
            raise
        # Without a model that was asked for, the build alone is still worth knowing.
        _print(facts, options.json)
        note(f"(no model: {one_line(error)})")
        return 0
    plan = memory.plan_memory(folder, engine_arguments)
    with models.open_engine(folder, engine_arguments) as engine:
        facts["kernels"]["chosen"] = engine.info.kernel_path
        facts["build"]["numa"] = engine.info.numa
        facts["model"] = _model_facts(engine)
        if not _NUMBERS.issuperset(engine.info.weight_types):
            facts["model"]["activations"] = str(engine_arguments.get("activations", "int8"))
        facts["memory"] = {**dataclasses.asdict(plan), "fits": plan.fits}
        facts["pages"] = _page_facts(engine)
    _print(facts, options.json)
    return 0


def _build_facts() -> Facts:
    from quire import _ffi

    return {
        "version": quire.__version__,
        "library": str(_ffi.LIBRARY_PATH),
        "cores": len(os.sched_getaffinity(0)),
    }


def _kernel_facts() -> Facts:
    from quire import _ffi

    refused = str(_ffi.function("refused_kernel_path")())
    return {"available": quire.kernel_paths(), **({"refused": refused} if refused else {})}


def _model_facts(engine: quire.Engine) -> Facts:
    info = engine.info
    return {
        "folder": str(engine.model_dir),
        "architecture": info.architecture,
        "parameters": info.parameter_count,
        "weight_types": dict(info.weight_types),
        "layers": len(info.layers),
        **_attention_facts(info),
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.max_position_embeddings,
        "bos_token_id": info.bos_token_id,
        "eos_token_ids": list(info.eos_token_ids),
        "tokenizer": engine.has_tokenizer,
        "chat_template": models.is_chat_model(models.tokenizer_of(engine)),
    }


def _attention_facts(info: quire.ModelInfo) -> Facts:
    """Those of the first layer with attention; a model of recurrent layers has none."""
    if not info.layers:
        return {}
    layer = info.layers[0]
    return {
        "query_heads": layer.num_qo_heads,
        "kv_heads": layer.num_kv_heads,
        "head_dim": layer.qk_head_dim,
        "rope": f"theta {info.rope['theta']:g}, scaling {info.rope['scaling']}",
    }


def _page_facts(engine: quire.Engine) -> Facts:
    stats = engine.stats()
    names = ("page_size", "pages_total", "pages_free", "pages_in_use")
    facts: Facts = {name: stats[name] for name in names}
    if not engine.info.layers:
        return facts
    layer = engine.info.layers[0]
    kv_dtype = f"{layer.dtype},{layer.v_dtype}" if layer.v_dtype else layer.dtype
    return {"kv_dtype": kv_dtype, **facts}


def _print(facts: dict[str, Facts], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    for title, part in facts.items():
        print(title)
        memory.print_table({f"  {name}": _text(name, value) for name, value in part.items()})


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {memory.bytes_text(size)}" for key, size in value.items())
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value) or "none"
    if value is None:
        return "none"
    if isinstance(value, int) and "bytes" in name:
        return memory.bytes_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
