"""A model that says one script, whatever it is asked: each token is followed by a fixed one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tiny_model import CHAT_TEMPLATE, EOS, Shape, TinyModel
from tokenizers import AddedToken

TOOLS = "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"


class ScriptedModel(TinyModel):
    """pieces: of the script, all different; each is a token. special: those that a text is decoded
    without. tools: begins its template."""

    def __init__(
        self,
        directory: Path,
        pieces: list[str],
        special: tuple[str, ...] = (),
        tools: str = TOOLS,
    ) -> None:
        super().__init__(directory, Shape(positions=4096))
        begin = self.tokenizer.encode("<|im_start|>assistant\n").ids[-1]
        self.tokenizer.add_tokens([AddedToken(p, normalized=False, special=p in special) for p in pieces])
        self.vocab_size = self.tokenizer.get_vocab_size()
        script = [begin, *map(self.tokenizer.token_to_id, [*pieces, EOS])]
        rng = np.random.default_rng(7)
        embedding = rng.standard_normal((self.vocab_size, self.shape.hidden)).astype(np.float32)
        head = np.zeros_like(embedding)
        for token, following in zip(script, script[1:]):
            head[following] = 10 * embedding[token] / np.linalg.norm(embedding[token])
        for name, weight in self.weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # a layer adds nothing
                weight[:] = 0
            elif name.endswith("norm.weight"):
                weight[:] = 1
        self.weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        self._write(chat=True)
        path = directory / "tokenizer_config.json"
        config = {**json.loads(path.read_text()), "chat_template": tools + CHAT_TEMPLATE}
        path.write_text(json.dumps(config))
