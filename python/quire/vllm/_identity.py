"""What vLLM's KV is of: the passport of its blocks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import errors
from quire.identity import model_identity
from quire.vllm._groups import KvGroup

__all__ = ["Shard", "canonical_passport_of", "check_weights", "is_canonical", "passport_of"]

_CANONICAL = "L2THD"  # of docs/formats/chunk.md
# Fields of a configuration that say nothing of keys and values.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
# Ways to load weights from other files than *.safetensors, which may lie beside these.
_OTHER_FILES = ("pt", "npcache", "tensorizer")


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a worker holds of the model: its share of the heads, as the tensor_rank-th of
    tensor_count workers, and the layers of its pipeline stage, the stage-th of stage_count."""

    tensor_rank: int = 0
    tensor_count: int = 1
    stage: int = 0
    stage_count: int = 1

    @classmethod
    def all_of(cls, tensor_count: int, stage_count: int) -> list[Shard]:
        """By rank, as vLLM counts workers: those of the first stage, then those of the next."""
        return [
            cls(tensor_rank, tensor_count, stage, stage_count)
            for stage in range(stage_count)
            for tensor_rank in range(tensor_count)
        ]

    @property
    def name(self) -> str:
        """The passport's `shard`."""
        if self.tensor_count == self.stage_count == 1:
            return "canonical"
        of_heads = f"tp{self.tensor_rank}of{self.tensor_count}"
        return f"{of_heads}.pp{self.stage}of{self.stage_count}"


def _model_folder(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def weights_identity(model_config: Any) -> dict[str, str]:
    """Digests of the model's files, which are read once and then kept."""
    folder = _model_folder(model_config.model, getattr(model_config, "revision", None))
    if not any(folder.glob("*.safetensors")):
        raise errors.BadArgumentError(
            f"QuireConnector: {folder} has no *.safetensors, so its weights cannot be told from "
            "others; convert the model"
        )
    return model_identity(folder)


def check_weights(vllm_config: Any) -> None:
    """Raises BadArgumentError for weights that cannot be told from others."""
    weights_identity(vllm_config.model_config)
    way = _load_format(vllm_config)
    if way in _OTHER_FILES:
        raise errors.BadArgumentError(
            f"QuireConnector: load_format is {way!r}; the connector knows weights by their "
            "*.safetensors, so load these"
        )


def _load_format(vllm_config: Any) -> str:
    return str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))


def _arguments(vllm_config: Any) -> str:
    """What vLLM's arguments make of the model in its folder, as a part of the numerics: weights of
    no file, another configuration."""
    model = vllm_config.model_config
    found = "/dummy" if _load_format(vllm_config) == "dummy" else ""
    names = ("hf_overrides", "hf_config_path", "quantization_config")
    if any(getattr(model, name, None) for name in names):
        fields = {name: getattr(model, name, None) for name in names[1:]}
        fields["config"] = {
            name: value
            for name, value in model.hf_config.to_dict().items()
            if name not in _VOLATILE
        }
        text = json.dumps(fields, sort_keys=True, default=str)
        found += f"/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return found


def _cpu() -> str:
    import torch

    capability = str(torch.backends.cpu.get_cpu_capability()).lower().replace(" ", "_")
    tiles = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    return f"cpu/{capability}{'+amx' if tiles else ''}"


def _gpu() -> str:
    """By vLLM's platform, which asks the driver: torch would start CUDA in the scheduler, too."""
    import torch
    from vllm.platforms import current_platform

    name = str(current_platform.get_device_name()).strip().lower().replace(" ", "_")
    capability = current_platform.get_device_capability()
    version = "none" if capability is None else f"{capability.major}.{capability.minor}"
    library = torch.version.cuda or torch.version.hip
    return f"gpu/{name}/{version}/torch/{torch.__version__}/{library}"


def _layout(vllm_config: Any, block_size: int) -> tuple[str, str]:
    """The order of the bytes within a block, and what computed them. K and V lie in an order that
    the attention kernel chose, so blocks of another kernel or size are not these."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu")
    kernel = _cpu() if device == "cpu" else _gpu()
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    attention = getattr(backend, "name", "auto")
    numerics = "/".join(
        str(part)
        for part in (
            "vllm", vllm.__version__, kernel, str(model.dtype).removeprefix("torch."),
            cache.cache_dtype, model.quantization or "none", attention,
        )
    ) + _arguments(vllm_config)  # fmt: skip
    layout = f"vllm/{vllm.__version__}/{kernel}/{block_size}"
    return layout if device == "cpu" else f"{layout}/{attention}", numerics


def _rotation(model_config: Any) -> str:
    """A digest of how keys are rotated, which vLLM's arguments may change for the same weights."""
    config = getattr(model_config, "hf_text_config", None)
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    found = {name: getattr(config, name, None) for name in names}
    text = json.dumps(found, sort_keys=True, default=str)
    if "longrope" in text:  # its factors are chosen by the length that vLLM serves
        text += f"/{model_config.max_model_len}"
    return f"sha256={hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _has_all_layers(group: KvGroup, shard: Shard, is_only: bool) -> bool:
    """Whether the group is just the model's layers, which the passport names already."""
    return is_only and group.window is None and shard.stage_count == 1


def passport_of(vllm_config: Any, group: KvGroup, shard: Shard, is_only: bool) -> dict[str, Any]:
    """The passport of a worker's chunks of a group, whose sections are vLLM's pages, one per layer,
    as bytes. is_only: the model has no other group."""
    identity = weights_identity(vllm_config.model_config)
    layout, numerics = _layout(vllm_config, group.block_size)
    if not _has_all_layers(group, shard, is_only):
        layout = f"{layout}/{group.identity}"
    return {
        "model": identity["model"],
        "revision": identity["revision"],
        "layout": layout,
        "numerics": numerics,
        "rope": _rotation(vllm_config.model_config),
        "shard": shard.name,
        "block": group.chunk_tokens,
        "layers": [0, len(group.layer_names)],
        "kind": "latent",
        "dtype": "u8",
        "kv_heads": 1,
        "head_dim": group.page_bytes // group.block_size,
    }


def canonical_passport_of(
    vllm_config: Any, group: KvGroup, shard: Shard, is_only: bool
) -> dict[str, Any] | None:
    """The same of chunks whose sections are keys and values, whatever kernel has computed them and
    whatever size its blocks have. None: the group's pages have something else."""
    rows = group.rows
    if rows is None:
        return None
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    identity = weights_identity(model)
    dtype = str(model.dtype).removeprefix("torch.")
    quantization = model.quantization or "none"
    passport = {
        "model": identity["model"],
        "revision": identity["revision"],
        "layout": _CANONICAL,
        "numerics": f"vllm/{vllm.__version__}/{dtype}/{cache.cache_dtype}/{quantization}"
        + _arguments(vllm_config),
        "rope": _rotation(model),
        "shard": shard.name,
        "block": group.chunk_tokens,
        "layers": [0, len(group.layer_names)],
        "dtype": rows.dtype,
        "kv_heads": rows.heads,
        "head_dim": rows.key_dim,
    }
    if rows.value_dim != rows.key_dim:
        passport["v_head_dim"] = rows.value_dim
    if not _has_all_layers(group, shard, is_only):
        passport["layout"] = f"{_CANONICAL}/{group.canonical_identity}"
    return passport


def is_canonical(passport: Mapping[str, Any]) -> bool:
    """Whether chunks of this passport are keys and values, and not pages."""
    return str(passport["layout"]).startswith(_CANONICAL)
