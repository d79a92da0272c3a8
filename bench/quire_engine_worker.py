"""Quire as its users run it: the Python package. The measured side of the whole-model cases."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import generation


def prompts_of_peers(engine: Any) -> int:
    """How many prompts other processes have computed for it. All of them are connected then."""
    while not all(peer.connected for peer in engine.prefill_peers()):
        time.sleep(0.01)
    return sum(peer.prompts for peer in engine.prefill_peers())


def load(
    model: str,
    threads: int,
    kv_bytes: int,
    sequences: int,
    length: int,
    listen: str | None = None,
    cores: list[int] | None = None,
    **options: Any,
) -> generation.Engine:
    """listen: where it computes prompts for other processes; None: nowhere. cores: where it runs;
    None: anywhere."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
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
        before = prompts_of_peers(engine)
        engine.generate(prompts, max_tokens=count, ignore_eos=True, greedy=True)
        if "prefill_from" in options and prompts_of_peers(engine) - before != len(prompts):
            raise RuntimeError(f"a prompt was computed here: {engine.prefill_peers()}")

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
