"""generate() of transformers with beams, over quire.hf.QuireCache or over its own DynamicCache."""

from __future__ import annotations

import time
from typing import Any

import line_protocol

_PAGE_SIZE = 64  # tokens

_side: dict[str, Any] = {}
_prompts: dict[str, Any] = {}


def load(model: str, threads: int, ours: bool) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(threads)
    if ours:
        import quire.hf  # noqa: F401 (makes the attention "quire" known)
    _side["model"] = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="quire" if ours else "sdpa"
    ).eval()
    _side["ours"] = ours
    return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}


def prepare(key: str, beams: int, prompt: int, tokens: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary = _side["model"].config.vocab_size
    _prompts[key] = torch.randint(vocabulary // 2, (1, prompt), generator=generator)
    _generate(_prompts[key][:, :8], beams, 2)  # the weights are in memory
    return {}


def run(key: str, beams: int, prompt: int, tokens: int) -> dict[str, Any]:
    begin, cpu = time.perf_counter(), time.process_time()
    cache = _generate(_prompts[key], beams, tokens)
    samples = {"call": time.perf_counter() - begin, "CPU": time.process_time() - cpu}
    samples["KV"] = float(_bytes(cache))
    return {"samples": {name: [value] for name, value in samples.items()}}


def drop(key: str) -> dict[str, Any]:
    _prompts.pop(key, None)
    return {}


def _generate(ids: Any, beams: int, tokens: int) -> Any:
    import torch
    import transformers

    model = _side["model"]
    if _side["ours"]:
        import quire.hf

        # Room for a page that is not full of each beam, of before a step and after it.
        room = ids.shape[1] + 2 * beams * (tokens + _PAGE_SIZE)
        cache: Any = quire.hf.QuireCache(model.config, token_capacity=room, dtype="float32")
    else:
        cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.generate(
            ids,
            past_key_values=cache,
            num_beams=beams,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    return cache


def _bytes(cache: Any) -> int:
    """Keys and values that are held at the end."""
    if not _side["ours"]:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    kv = cache.kv_cache  # layers alike are one group, and a page has all of them
    numbers = sum(2 * layer.num_kv_heads * layer.qk_head_dim for layer in kv.layers)
    return kv.pages_in_use() * _PAGE_SIZE * numbers * 4


if __name__ == "__main__":
    line_protocol.serve({"load": load, "prepare": prepare, "run": run, "drop": drop})
