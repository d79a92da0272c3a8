"""vLLM's engine on CPU, offline and eager, the peer of quire_engine_worker.py. Runs in vLLM's own
environment."""

from __future__ import annotations

import os

import generation


def load(
    model: str, threads: int, kv_bytes: int, sequences: int, length: int, dtype: str
) -> generation.Engine:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        # Whole gibibytes; one more, since blocks of 128 tokens are not filled to the end.
        "VLLM_CPU_KVCACHE_SPACE": str(1 - (-kv_bytes * (2 if dtype == "float32" else 1) >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    engine = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=length,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[generation.Prompt], count: int) -> None:
        options = vllm.SamplingParams(
            temperature=0,
            max_tokens=count,
            min_tokens=count,
            ignore_eos=True,
            detokenize=False,
        )
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False
        )

    vocab_size = engine.llm_engine.model_config.get_vocab_size()
    return generation.Engine(
        generate, vocab_size, f"vLLM {vllm.__version__} (eager, {dtype})"
    )


if __name__ == "__main__":
    generation.serve(load)
