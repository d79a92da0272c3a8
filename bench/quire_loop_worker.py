"""Quire's engine without HTTP: the same clients as those of a server, in the engine's process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import line_protocol
import serving


def main() -> None:
    handlers: dict[str, line_protocol.Handler] = {}

    def load(model: str, threads: int, kv_bytes: int, sequences: int) -> dict[str, Any]:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        import quire

        engine = quire.Engine(
            model, threads=threads, kv_bytes=kv_bytes, max_num_sequences=sequences
        )
        runs = 0

        async def measure(request: dict[str, Any]) -> serving.Samples:
            ask = serving.EngineAsk(engine)
            return await serving.measure(ask, engine.info.vocab_size, runs, **request)

        def run(key: str, **request: Any) -> dict[str, Any]:
            nonlocal runs
            runs += 1
            return {"samples": asyncio.run(measure(request))}

        handlers.update(prepare=run, run=run, drop=lambda key: {})
        return {"version": f"Quire {quire.__version__} ({engine.info.kernel_path})"}

    handlers["load"] = load
    line_protocol.serve(handlers)


if __name__ == "__main__":
    main()
