"""Prefill in one cache, decode in another: KV goes over layer by layer while it is computed."""

import numpy as np

import quire

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2


def make_cache(page_size: int) -> quire.KVCache:
    cache = quire.KVCache(
        num_layers=LAYERS,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qk_head_dim=DIM,
        max_num_sequences=1,
        token_capacity=256,
        page_size=page_size,
    )
    cache.add_sequence(0)
    return cache


def extend(cache: quire.KVCache, start: int, count: int) -> np.ndarray:
    """A forward of tokens whose q, k and v are a function of position and layer."""
    with cache.forward([0], [count]):
        for layer in range(LAYERS):
            random = np.random.default_rng(layer)
            qkv = random.random((start + count, HEADS + 2 * KV_HEADS, DIM), np.float32)
            output = cache.attention_with_fused_qkv(layer, qkv[start:])
    return output


sender, receiver, alone = make_cache(16), make_cache(32), make_cache(16)
channel = quire.LocalChannel()
receiver.connect_channel(channel, peer=1)
sender.send_through(channel)

receive = receiver.disagg_prepare_recv(0, 40)  # reserves 40 tokens; a map of numbers
sender.disagg_mark_send(0, 0, receive, peer=1)
extend(sender, 0, 40)  # each layer goes as soon as it is stored
receiver.wait_received(receive.epoch, 40, timeout=5)
receiver.disagg_commit_recv(receive.epoch, 40)

extend(alone, 0, 40)
same = np.array_equal(extend(receiver, 40, 1), extend(alone, 40, 1))
print("tokens received:", receiver.get_sequence_length(0) - 1)
print("the next token's output:", "the same bits" if same else "different")
