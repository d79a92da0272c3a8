"""Quire asked about documents in ever other orders: blended, and not, with KV of the documents in
one place."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import generation
import line_protocol

_RAM_BYTES = 2 << 30
_WARM_TOKENS = 8


class Blends:
    """One engine whose pages have the documents; or a new one for each prompt, over a store that
    has them. `directory`: of chunks; None: they are in memory. `place`: "pages", "ram" or "disk".
    """

    def __init__(self, place: str, directory: str | None, **options: Any) -> None:
        import quire

        self._quire, self._options = quire, options
        self._store: quire.ChunkStore | None = None
        if place != "pages":
            ram_bytes = _RAM_BYTES if place == "ram" else 0
            self._store = quire.ChunkStore(directory, ram_bytes=ram_bytes)
        self._engine = self._make(write=True)
        self._documents: dict[str, generation.Documents] = {}
        self._count = 0
        self.version = f"Quire {quire.__version__} ({self._engine.info.kernel_path})"

    def _make(self, *, write: bool) -> Any:
        use = {}
        if self._store is not None:
            use = {"kv_store": self._store, "kv_write": write, "kv_load_always": True}
        engine = self._quire.Engine(blend_piece=2048, blend_unverified=True, **self._options, **use)
        engine.wait_for_store()
        return engine

    def _replace(self, *, write: bool) -> None:
        self._engine.close()
        self._engine = self._make(write=write)

    def prepare(
        self, key: str, kind: str, ratio: float | None, salt: str | None, **shape: int
    ) -> dict[str, Any]:
        """The documents are known to prompts with this salt; without one nothing is kept."""
        del kind
        self._documents[key] = generation.Documents(self._engine.info.vocab_size, **shape)
        if self._store is not None:
            self._replace(write=True)
        self._ask(key, 1.0 if ratio is None else ratio, salt or "none")
        self._engine.flush_store()
        self.run(key, ratio=ratio, salt=salt)
        return {}

    def run(
        self, key: str, *, ratio: float | None, salt: str | None, **shape: Any
    ) -> dict[str, Any]:
        del shape
        if self._store is not None:
            self._replace(write=False)
            warm = list(range(100, 100 + _WARM_TOKENS))
            self._engine.generate(warm, max_tokens=1, greedy=True, cache_salt="warm")
        self._count += 1
        return {"samples": self._ask(key, ratio, salt or f"new {self._count}")}

    def drop(self, key: str) -> dict[str, Any]:
        self._documents.pop(key, None)
        return {}

    def _ask(self, key: str, ratio: float | None, salt: str) -> dict[str, list[float]]:
        prompt, ranges = self._documents[key].next()
        options: dict[str, Any] = {"max_tokens": 1, "greedy": True, "cache_salt": salt}
        if ratio is not None:
            options |= {"documents": ranges, "blend": ratio}
        loading = self._engine.stats()["load_ns"]
        begin = time.perf_counter()
        usage = self._engine.generate(prompt, **options).usage
        samples = {"first token": time.perf_counter() - begin, "memory": _memory()}
        samples["loading"] = (self._engine.stats()["load_ns"] - loading) * 1e-9
        if usage.blend is not None:
            samples["moving"] = usage.blend.move_seconds
            samples["selecting"] = usage.blend.select_seconds
        return {name: [value] for name, value in samples.items() if value > 0}


def _memory() -> float:
    """Bytes of this process that no file has."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("RssAnon:"))
    return float(int(line.split()[1]) << 10)


def main() -> None:
    handlers: dict[str, line_protocol.Handler] = {}

    def load(
        model: str,
        threads: int,
        kv_bytes: int,
        sequences: int,
        length: int,
        place: str,
        directory: str | None,
    ) -> dict[str, Any]:
        # As in quire_engine_worker.py: torch is not imported.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        del sequences, length
        blends = Blends(place, directory, model_dir=model, threads=threads, kv_bytes=kv_bytes)
        handlers.update(prepare=blends.prepare, run=blends.run, drop=blends.drop)
        return {"version": blends.version}

    handlers["load"] = load
    line_protocol.serve(handlers)


if __name__ == "__main__":
    main()
