"""KV that outlives its engine, in a folder: store.py FOLDER [MODEL_DIR]. Run it twice."""

import sys

import quire

folder, model = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
prompt = "A quire is a stack of folded pages. " * 12
with quire.Engine(model, kv_dir=folder, kv_load_always=True) as engine:
    engine.wait_for_store()  # until the digest of the model's files is known
    usage = engine.generate(prompt, max_tokens=8).usage
    print(f"{usage.disk_tokens} of {usage.prompt_tokens} prompt tokens came from disk")
