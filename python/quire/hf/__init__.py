"""quire.hf: Quire's KV cache in Hugging Face transformers::

    import quire.hf
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="quire")
    cache = quire.hf.QuireCache(model.config, token_capacity=8192)
    ids = model.generate(**inputs, past_key_values=cache, num_beams=4, max_new_tokens=64)

Importing it registers the attention implementation "quire". It needs torch and transformers, the
extra ``quire[hf]``.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 (named here so that the error can name it)
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"quire.hf: the package {error.name} is missing: pip install 'quire[hf]'", name=error.name
    ) from error

from quire.hf._cache import QuireCache

__all__ = ["QuireCache"]
