"""The KV cache alone, under a model of your own: prefill, fork, decode of both in one forward."""

import numpy as np

import quire

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
random = np.random.default_rng(1)
cache = quire.KVCache(
    num_layers=LAYERS,
    num_qo_heads=HEADS,
    num_kv_heads=KV_HEADS,
    qk_head_dim=DIM,
    dtype="bfloat16",
    rope="normal",
    max_num_sequences=4,
    token_capacity=1024,
)


def forward(sequences: list[int], lengths: list[int]) -> np.ndarray:
    """Runs the layers over new tokens; the last layer's output, [tokens, HEADS, DIM]."""
    with cache.forward(sequences, lengths):  # ends the forward, or aborts it on an exception
        for layer in range(LAYERS):
            # Your model computes q, k and v here: [tokens, HEADS + 2 * KV_HEADS, DIM].
            qkv = random.random((sum(lengths), HEADS + 2 * KV_HEADS, DIM), np.float32)
            output = cache.attention_with_fused_qkv(layer, qkv)
    return output


cache.add_sequence(0)
forward([0], [100])  # prefill
pages = cache.pages_in_use()
cache.fork_sequence(0, 1, 90)  # sequence 1 has the first 90 tokens; no page is taken
print("pages of the fork:", cache.pages_in_use() - pages)
output = forward([0, 1], [1, 1])  # one decode step of both
lengths = [cache.get_sequence_length(sequence) for sequence in (0, 1)]
print("lengths:", *lengths, "output:", *output.shape)
cache.pop_n(0, 50)  # roll back
print("after the rollback:", cache.get_sequence_length(0))
