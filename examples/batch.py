"""Several prompts in a batch, several answers each, reproducible by seed: batch.py [MODEL_DIR]."""

import sys

import quire

prompts = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]
with quire.Engine(sys.argv[1] if len(sys.argv) > 1 else None) as engine:
    together = engine.generate(prompts, n=2, max_tokens=16, temperature=0.8, seed=7)
    alone = engine.generate(prompts[1], n=2, max_tokens=16, temperature=0.8, seed=7)
for prompt, result in zip(prompts, together):
    for sample in result.samples:
        print(f"{prompt!r} -> {sample.text!r} ({sample.finish_reason})")
same = [s.ids for s in together[1].samples] == [s.ids for s in alone.samples]
print("alone and in the batch:", "the same tokens" if same else "different tokens")
