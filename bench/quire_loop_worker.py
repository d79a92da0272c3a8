"""Quire's engine without HTTP: the same clients as those of a server, in the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import line_protocol
import serving
from quire_engine_worker import prompts_of_peers


def main() -> None:
    handlers: dict[str, line_protocol.Handler] = {}

    def load(
        model: str,
        threads: int,
        kv_bytes: int,
        sequences: int,
        cores: list[int] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """cores: where it runs, with its clients; None: anywhere."""
        if cores is not None:
            os.sched_setaffinity(0, cores)
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        import quire

        engine = quire.Engine(
            model, threads=threads, kv_bytes=kv_bytes, max_num_sequences=sequences, **options
        )
        runs = 0

        async def measure(request: dict[str, Any]) -> serving.Samples:
            with contextlib.closing(serving.EngineAsk(engine)) as ask:
                return await serving.measure(ask, engine.info.vocab_size, runs, **request)

        def run(key: str, **request: Any) -> dict[str, Any]:
            nonlocal runs
            runs += 1
            before = prompts_of_peers(engine)
            samples = asyncio.run(measure(request))
            asked = request["clients"] + request["prompts"] if "prefill_from" in options else 0
            if prompts_of_peers(engine) - before != asked:
                raise RuntimeError(f"a prompt was computed here: {engine.prefill_peers()}")
            return {"samples": samples}

        handlers.update(prepare=run, run=run, drop=lambda key: {})
        return {"version": f"Quire {quire.__version__} ({engine.info.kernel_path})"}

    handlers["load"] = load
    line_protocol.serve(handlers)


if __name__ == "__main__":
    main()
