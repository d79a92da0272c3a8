"""Quire as its users run it: the Python package. The measured side of the whole-model cases."""

from __future__ import annotations

import sys
from typing import Any

import generation
import line_protocol


class Worker:
    def __init__(self) -> None:
        self._cases: generation.Cases | None = None

    def load(
        self, model: str, threads: int, kv_bytes: int, sequences: int, length: int
    ) -> dict[str, Any]:
        # tvm-ffi imports torch where it finds it, for seconds and 200 MiB; the program `quire` does
        # not let it either.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        import quire

        del length  # the model's own limit holds
        engine = quire.Engine(
            model, threads=threads, kv_bytes=kv_bytes, max_num_sequences=sequences
        )

        def generate(prompts: list[generation.Prompt], count: int) -> None:
            engine.generate(prompts, max_tokens=count, ignore_eos=True)

        self._cases = generation.Cases(generate, engine.info.vocab_size)
        generate([self._cases.prompt(8)], 1)
        return {"version": f"Quire {quire.__version__} ({engine.info.kernel_path})"}

    def prepare(self, **request: Any) -> dict[str, Any]:
        assert self._cases is not None
        return self._cases.prepare(**request)

    def run(self, **request: Any) -> dict[str, Any]:
        assert self._cases is not None
        return self._cases.run(**request)

    def drop(self, key: str) -> dict[str, Any]:
        assert self._cases is not None
        return self._cases.drop(key)


if __name__ == "__main__":
    worker = Worker()
    line_protocol.serve(
        {"load": worker.load, "prepare": worker.prepare, "run": worker.run, "drop": worker.drop}
    )
