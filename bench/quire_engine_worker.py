"""Quire as its users run it: the Python package. The measured side of the whole-model cases."""

from __future__ import annotations

import sys
from typing import Any

import generation


def load(
    model: str,
    threads: int,
    kv_bytes: int,
    sequences: int,
    length: int,
    listen: str | None = None,
    **options: Any,
) -> generation.Engine:
    """listen: where it computes prompts for other processes; None: nowhere."""
    # tvm-ffi imports torch where it finds it, for seconds and 200 MiB; the program `quire` does
    # not let it either.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import quire

    del length  # the model's own limit holds
    engine = quire.Engine(
        model, threads=threads, kv_bytes=kv_bytes, max_num_sequences=sequences, **options
    )
    engine.wait_for_store()
    if listen is not None:
        engine.serve_prefill(listen)

    def generate(prompts: list[generation.Prompt], count: int) -> None:
        engine.generate(prompts, max_tokens=count, ignore_eos=True, greedy=True)

    version = f"Quire {quire.__version__} ({engine.info.kernel_path})"
    return generation.Engine(
        generate,
        engine.info.vocab_size,
        version,
        settle=engine.flush_store,
        guessing_forwards=lambda: engine.stats()["decode_forwards"],
    )


if __name__ == "__main__":
    generation.serve(load)
