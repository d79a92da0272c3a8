"""A conversation whose second turn takes the KV of the first: chat.py [MODEL_DIR]."""

import sys

import quire

engine = quire.Engine(sys.argv[1] if len(sys.argv) > 1 else None)
messages = [{"role": "user", "content": "What is a quire of paper?"}]
answer = engine.chat(messages, max_tokens=32)
print(answer.text)

messages += [
    {"role": "assistant", "content": answer.text},
    {"role": "user", "content": "And a ream?"},
]
with engine.stream_chat(messages, max_tokens=32) as pieces:
    for piece in pieces:
        print(piece.text, end="", flush=True)
usage = piece.result.usage
print(f"\n{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were not computed again")
