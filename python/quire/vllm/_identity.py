"""What vLLM's KV is of: the passport of its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire import errors
from quire.identity import model_identity
from quire.vllm._groups import KvGroup

__all__ = ["passport_of"]


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
    )  # fmt: skip
    layout = f"vllm/{vllm.__version__}/{kernel}/{block_size}"
    return layout if device == "cpu" else f"{layout}/{attention}", numerics


def passport_of(
    vllm_config: Any, group: KvGroup, *, rank: int, rank_count: int, is_only: bool
) -> dict[str, Any]:
    """The passport of a worker's chunks of a group, whose sections are vLLM's pages, one per layer,
    as bytes. is_only: the model has no other group."""
    identity = weights_identity(vllm_config.model_config)
    layout, numerics = _layout(vllm_config, group.block_size)
    if group.window is not None or not is_only:
        layout = f"{layout}/{group.identity}"
    return {
        "model": identity["model"],
        "revision": identity["revision"],
        "layout": layout,
        "numerics": numerics,
        "shard": "canonical" if rank_count == 1 else f"tp{rank}of{rank_count}.pp0of1",
        "block": group.chunk_tokens,
        "layers": [0, len(group.layer_names)],
        "kind": "latent",
        "dtype": "u8",
        "kv_heads": 1,
        "head_dim": group.page_bytes // group.block_size,
    }
