"""A model with random weights whose template asks for calls in one of the formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tiny_model import CHAT_TEMPLATE, Shape, TinyModel
from tokenizers import AddedToken

_MARKS = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS] [ARGS]",
    "deepseek": "<｜tool▁call▁begin｜>",
}
_SPECIAL = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "deepseek": [
        f"<｜tool▁{name}｜>"
        for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    ],
}


class ToolModel(TinyModel):
    """kind: of the calls. Their tags are special tokens, where they are in such models."""

    def __init__(self, directory: Path, kind: str) -> None:
        super().__init__(directory, Shape(positions=2048))
        special = [AddedToken(text, normalized=False) for text in _SPECIAL.get(kind, [])]
        self.tokenizer.add_special_tokens(special)
        self.vocab_size = self.tokenizer.get_vocab_size()
        rng = np.random.default_rng(3)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            more = rng.standard_normal((len(special), self.shape.hidden)).astype(np.float32)
            self.weights[name] = np.concatenate([self.weights[name], more])
        self._write(chat=True)
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text())
        mark = "{% if tools %}{{ tools | tojson }} " + _MARKS[kind] + "{% endif %}"
        path.write_text(json.dumps({**config, "chat_template": mark + CHAT_TEMPLATE}))
