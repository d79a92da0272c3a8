"""What the shapes of the tensors of a GGUF file follow from, by its metadata."""

from __future__ import annotations

import dataclasses

from .gguf_reader import GgufFile

# How experts are scored.
SOFTMAX, SIGMOID = 1, 2
# By that: (class, model_type) of transformers.
DEEPSEEK = {
    SOFTMAX: ("DeepseekV2ForCausalLM", "deepseek_v2"),
    SIGMOID: ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
# general.architecture -> the same. Mistral's GGUF files call themselves llama; those with a sliding
# window become MistralForCausalLM.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek2": DEEPSEEK[SOFTMAX],
    "mamba2": ("Mamba2ForCausalLM", "mamba2"),
}
# What files of the llama architecture with experts are.
MIXTRAL = ("MixtralForCausalLM", "mixtral")
_OF_EXPERTS = ("llama", "qwen2moe", "qwen3moe", "deepseek2")
# Bounds for sizes in the metadata. The sizes are compared with the tensors' shapes as well; these
# keep the products small.
_SIZE_MAX = 1 << 24
_LAYERS_MAX = 4096
_EXPERTS_MAX = 1 << 14
_LATENT_MAX = 1 << 13
_TAPS_MAX = 1 << 8
_EXPERT_MATRICES_MAX = 1 << 18  # of all layers; largest known 69 120


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Experts of a layer. `shared_size`: of one for all tokens; 0: there is none. The first
    `dense_layers` have no experts. `has_choice_bias`: a bias takes part in their choice.
    `is_fused`: the file has gate and up as one tensor."""

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int
    dense_layers: int = 0
    has_choice_bias: bool = False
    is_fused: bool = False


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Latent attention. `q_rank` 0: queries are made in one step. `is_split`: what latents are
    multiplied by is stored as one tensor for keys, transposed, and one for values."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    is_split: bool


@dataclasses.dataclass(frozen=True)
class StateSpaceShape:
    head_count: int
    head_dim: int
    state_size: int
    group_count: int
    taps: int  # of the convolution

    @property
    def inner_size(self) -> int:
        return self.head_count * self.head_dim

    @property
    def channels(self) -> int:
        """That are convolved."""
        return self.inner_size + 2 * self.group_count * self.state_size


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What the tensors' shapes follow from. A state space model has neither heads of attention nor
    an MLP: 0."""

    architecture: str  # as GGUF names it
    layer_count: int
    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    experts: ExpertShape | None
    latent: LatentShape | None
    state_space: StateSpaceShape | None = None

    @property
    def is_gemma(self) -> bool:
        return self.architecture in ("gemma2", "gemma3")

    @property
    def is_mixtral(self) -> bool:
        return self.architecture == "llama" and self.experts is not None


def read_shape(file: GgufFile) -> ModelShape:
    metadata = file.metadata
    parts = metadata.integer("split.count", 0, 1 << 16, default=1)
    if parts > 1:
        part = metadata.integer("split.no", 0, 1 << 16, default=0) + 1
        raise metadata.error(
            "split.count",
            f"the file is part {part} of {parts} of a model; join them with: "
            "llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf",
        )
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise metadata.error(
            "general.architecture", f'"{arch}" is not one of {", ".join(ARCHITECTURES)}'
        )
    hidden_size = metadata.integer(f"{arch}.embedding_length", 1, _SIZE_MAX)
    if arch == "mamba2":
        return _state_space_model(file, hidden_size)
    head_count = metadata.integer(f"{arch}.attention.head_count", 1, hidden_size)
    layer_count = metadata.integer(f"{arch}.block_count", 1, _LAYERS_MAX)
    intermediate_size = metadata.integer(f"{arch}.feed_forward_length", 1, _SIZE_MAX)
    latent = _latent(file) if arch == "deepseek2" else None
    if latent is None:
        kv_head_count = _kv_head_count(file, arch, head_count)
        head_dim = _head_dim(file, arch, hidden_size // head_count)
    else:
        kv_head_count = _latent_kv_head_count(file, head_count)
        head_dim = latent.rope_dim  # as transformers has it
    return ModelShape(
        architecture=arch,
        layer_count=layer_count,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(file, arch, head_dim),
        vocab_size=_vocab_size(file),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        experts=_experts(file, arch, layer_count, intermediate_size),
        latent=latent,
    )


def _state_space_model(file: GgufFile, hidden_size: int) -> ModelShape:
    return ModelShape(
        architecture="mamba2",
        layer_count=file.metadata.integer("mamba2.block_count", 1, _LAYERS_MAX),
        hidden_size=hidden_size,
        intermediate_size=0,
        head_count=0,
        kv_head_count=0,
        head_dim=0,
        rotary_dim=0,
        vocab_size=_vocab_size(file),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias=False,
        mlp_bias=False,
        experts=None,
        latent=None,
        state_space=_state_space(file, hidden_size),
    )


def _state_space(file: GgufFile, hidden_size: int) -> StateSpaceShape:
    metadata, prefix = file.metadata, "mamba2.ssm"
    inner_size = metadata.integer(f"{prefix}.inner_size", 1, _SIZE_MAX)
    if inner_size % hidden_size:
        raise metadata.error(
            f"{prefix}.inner_size", f"{inner_size} is no multiple of the embedding's {hidden_size}"
        )
    # Its name is that of another thing in Mamba's first version.
    heads = metadata.integer(f"{prefix}.time_step_rank", 1, inner_size)
    groups = metadata.integer(f"{prefix}.group_count", 1, heads, default=1)
    for key, size, count in (("time_step_rank", inner_size, heads), ("group_count", heads, groups)):
        if size % count:
            raise metadata.error(f"{prefix}.{key}", f"{count} does not divide {size}")
    return StateSpaceShape(
        head_count=heads,
        head_dim=inner_size // heads,
        state_size=metadata.integer(f"{prefix}.state_size", 1, _SIZE_MAX),
        group_count=groups,
        taps=metadata.integer(f"{prefix}.conv_kernel", 2, _TAPS_MAX),
    )


def _latent(file: GgufFile) -> LatentShape:
    metadata, prefix = file.metadata, "deepseek2.attention"
    rope_dim = metadata.integer("deepseek2.rope.dimension_count", 2, _LATENT_MAX)
    if rope_dim % 2:
        raise metadata.error(
            "deepseek2.rope.dimension_count", f"{rope_dim} is odd; rotary positions need pairs"
        )
    # Where it is there, the plain ones are the sizes of what is kept of a token.
    suffix = "_mla" if f"{prefix}.key_length_mla" in metadata else ""
    key_dim = metadata.integer(f"{prefix}.key_length{suffix}", rope_dim + 1, 2 * _LATENT_MAX)
    return LatentShape(
        q_rank=metadata.integer(f"{prefix}.q_lora_rank", 0, _LATENT_MAX, default=0),
        kv_rank=metadata.integer(f"{prefix}.kv_lora_rank", 1, _LATENT_MAX),
        nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim,
        v_dim=metadata.integer(f"{prefix}.value_length{suffix}", 1, _LATENT_MAX),
        is_split="blk.0.attn_kv_b.weight" not in file.tensors,
    )


def _latent_kv_head_count(file: GgufFile, head_count: int) -> int:
    """As many as there are heads; files that keep one latent for all say one."""
    key = "deepseek2.attention.head_count_kv"
    count = file.metadata.integer(key, 1, _SIZE_MAX, default=head_count)
    if count not in (1, head_count):
        raise file.metadata.error(key, f"{count} is neither 1 nor the {head_count} heads")
    return head_count


def _experts(
    file: GgufFile, arch: str, layer_count: int, intermediate_size: int
) -> ExpertShape | None:
    metadata, key = file.metadata, f"{arch}.expert_count"
    if arch not in _OF_EXPERTS:
        if metadata.integer(key, 0, _SIZE_MAX, default=0):
            raise metadata.error(
                key,
                f"mixtures of experts of {arch} are not read; known are those of "
                f"{', '.join(_OF_EXPERTS)}",
            )
        return None
    may_have_none = arch == "llama"
    count = metadata.integer(
        key, 0 if may_have_none else 1, _EXPERTS_MAX, default=0 if may_have_none else None
    )
    if count == 0:
        return None
    if 3 * count * layer_count > _EXPERT_MATRICES_MAX:
        raise metadata.error(
            key,
            f"{count} in each of {layer_count} layers have more than {_EXPERT_MATRICES_MAX} "
            "matrices",
        )
    per_token = metadata.integer(f"{arch}.expert_used_count", 1, count)
    if arch == "deepseek2":
        experts = _deepseek_experts(file, count, per_token, layer_count)
    else:
        experts = _plain_experts(file, arch, count, per_token, intermediate_size)
    fused = f"blk.{experts.dense_layers}.ffn_gate_up_exps.weight"
    return dataclasses.replace(experts, is_fused=fused in file.tensors)


def _plain_experts(
    file: GgufFile, arch: str, count: int, per_token: int, intermediate_size: int
) -> ExpertShape:
    metadata = file.metadata
    _check_experts_are_plain(file, arch)
    # Where the first files do not say it, experts divide the inner size among them; those of
    # Mixtral each have it.
    default = intermediate_size if arch == "llama" else max(intermediate_size // per_token, 1)
    size = metadata.integer(f"{arch}.expert_feed_forward_length", 1, _SIZE_MAX, default=default)
    shared_size = 0
    if arch == "qwen2moe":
        shared_size = metadata.integer(
            f"{arch}.expert_shared_feed_forward_length", 1, _SIZE_MAX, default=intermediate_size
        )
    return ExpertShape(count, per_token, size, shared_size)


def _deepseek_experts(
    file: GgufFile, count: int, per_token: int, layer_count: int
) -> ExpertShape:
    metadata = file.metadata
    key = "deepseek2.nextn_predict_layers"
    if metadata.integer(key, 0, _SIZE_MAX, default=0):
        raise metadata.error(key, "layers that predict several tokens are not read")
    scored_by = scoring(file)
    key = "deepseek2.expert_weights_norm"
    if scored_by == SOFTMAX and metadata.boolean(key, default=False):
        raise metadata.error(key, "is set; what it means with softmax scores is not agreed on")
    size = metadata.integer("deepseek2.expert_feed_forward_length", 1, _SIZE_MAX)
    shared = metadata.integer("deepseek2.expert_shared_count", 0, _EXPERTS_MAX, default=0)
    return ExpertShape(
        count,
        per_token,
        size,
        shared * size,
        dense_layers=metadata.integer(
            "deepseek2.leading_dense_block_count", 0, layer_count, default=0
        ),
        has_choice_bias=scored_by == SIGMOID,
    )


def scoring(file: GgufFile) -> int:
    """SOFTMAX or SIGMOID of a deepseek2 file. Files of V2 do not say it."""
    key = "deepseek2.expert_gating_func"
    value = file.metadata.integer(key, 0, 1 << 16, default=SOFTMAX)
    if value not in DEEPSEEK:
        raise file.metadata.error(key, f"{value} is neither softmax (1) nor sigmoid (2)")
    return value


def _check_experts_are_plain(file: GgufFile, arch: str) -> None:
    """Chosen among all by a softmax, in all layers: what these architectures do elsewhere is not
    known."""
    metadata = file.metadata
    for name, expected in (
        ("expert_gating_func", 1),
        ("expert_group_count", 1),
        ("leading_dense_block_count", 0),
        ("interleave_moe_layer_step", 1),
    ):
        key = f"{arch}.{name}"
        value = metadata.integer(key, 0, _SIZE_MAX, default=expected)
        if value != expected:
            raise metadata.error(key, f"{value} is not known for {arch}; known is {expected}")
    key = f"{arch}.expert_weights_scale"
    scale = metadata.number(key, default=1.0)
    if scale != 1:
        raise metadata.error(key, f"{scale} is not known for {arch}; known is 1")
    key = f"{arch}.expert_weights_norm"
    if arch == "llama" and not metadata.boolean(key, default=True):
        raise metadata.error(key, "is false; weights of experts of llama sum to 1")


def _kv_head_count(file: GgufFile, arch: str, head_count: int) -> int:
    key = f"{arch}.attention.head_count_kv"
    count = file.metadata.integer(key, 1, head_count, default=head_count)
    if head_count % count:
        raise file.metadata.error(key, f"{count} does not divide the {head_count} heads")
    return count


def _head_dim(file: GgufFile, arch: str, default: int) -> int:
    key = f"{arch}.attention.key_length"
    head_dim = file.metadata.integer(key, 2, _SIZE_MAX, default=default)
    if head_dim % 2:
        raise file.metadata.error(key, f"{head_dim} is odd; rotary positions need pairs")
    _require_head_dim(file, f"{arch}.attention.value_length", head_dim)
    return head_dim


def _require_head_dim(file: GgufFile, key: str, head_dim: int) -> None:
    if file.metadata.integer(key, 1, _SIZE_MAX, default=head_dim) != head_dim:
        raise file.metadata.error(
            key, f"differs from the head size {head_dim}; only equal sizes are imported"
        )


def _rotary_dim(file: GgufFile, arch: str, head_dim: int) -> int:
    """The first dimensions of a head, as many as are rotated."""
    key = f"{arch}.rope.dimension_count"
    if arch == "deepseek2":
        return head_dim
    if arch != "phi3":
        _require_head_dim(file, key, head_dim)
        return head_dim
    size = file.metadata.integer(key, 2, head_dim, default=head_dim)
    # config.json has the ratio of the two.
    if size % 2 or int(head_dim * (size / head_dim)) != size:
        raise file.metadata.error(key, f"{size} of {head_dim} cannot be said in config.json")
    return size


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.tensor_error("token_embd.weight", "is missing")
    return embedding.shape[0]
