"""vLLM's engine on CPU, offline and eager, the peer of quire_engine_worker.py. Runs in vLLM's own
environment."""

from __future__ import annotations

import os
from typing import Any

import generation


def scan_without_cffi() -> None:
    """At its start vLLM looks for Triton kernels in all modules by vars(); LMCache 0.5.6 brings
    libraries of cffi, whose `__dict__` is no dict, and the start fails."""
    from vllm.triton_utils import dispatcher

    def fields(value: object) -> Any:
        found = vars(value)
        return found if hasattr(found, "get") else {}

    dispatcher.vars = fields


def load(
    model: str,
    threads: int,
    kv_bytes: int,
    sequences: int,
    length: int,
    dtype: str,
    prefix_cache: bool = True,
    connector: dict[str, Any] | None = None,
) -> generation.Engine:
    """connector: fields of vLLM's KVTransferConfig; vLLM's own prefix cache, if it has one, is then
    emptied before each call, so that only the connector's store has earlier prompts."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        # Whole gibibytes; one more, since blocks of 128 tokens are not filled to the end.
        "VLLM_CPU_KVCACHE_SPACE": str(1 - (-kv_bytes * (2 if dtype == "float32" else 1) >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm
    from vllm.config import KVTransferConfig

    if connector is not None and connector["kv_connector"].startswith("LMCache"):
        scan_without_cffi()
    options: dict[str, Any] = {}
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **connector)
    engine = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=length,
        enforce_eager=True,
        enable_prefix_caching=prefix_cache,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        skip_tokenizer_init=True,
        **options,
    )

    def generate(prompts: list[generation.Prompt], count: int) -> None:
        if connector is not None and prefix_cache and not engine.reset_prefix_cache():
            raise RuntimeError("vLLM's own prefix cache is in use")
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=count,
            min_tokens=count,
            ignore_eos=True,
            detokenize=False,
        )
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )

    vocab_size = engine.llm_engine.model_config.get_vocab_size()
    return generation.Engine(
        generate,
        vocab_size,
        f"vLLM {vllm.__version__} (eager, {dtype})",
        end=engine.llm_engine.engine_core.shutdown,
    )


if __name__ == "__main__":
    generation.serve(load)
