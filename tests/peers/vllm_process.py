"""Runs vllm_run.py, and makes what it needs."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

__all__ = ["VOCABULARY", "Run", "random_prompt", "run", "save_llama", "save_lora"]

VOCABULARY = 2000
_RUN = Path(__file__).with_name("vllm_run.py")
_PATIENCE = 400.0
_COUNT = 16


def random_prompt(length: int) -> list[int]:
    """The same ids each time."""
    drawn = random.Random(3)
    return [drawn.randrange(10, VOCABULARY) for _ in range(length)]


@dataclasses.dataclass
class Run:
    """answers: ids. cached: tokens of each prompt that were not computed."""

    answers: list[list[int]]
    cached: list[int]
    metrics: dict[str, float]
    events: list[dict[str, Any]]
    log: str


def save_model(folder: Path, model: Any, config: Any, **sizes: Any) -> str:
    """A small model with random weights. model, config: the classes of transformers."""
    torch.manual_seed(0)
    whole = config(
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    model(whole).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def save_llama(folder: Path) -> str:
    """Three layers."""
    return save_model(
        folder,
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def save_lora(folder: Path, seed: int) -> str:
    """An adapter of that model, with random weights, as PEFT saves it."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "small",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, 256) * 0.1
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, 8) * 0.1
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def run(
    model: str,
    prompts: list[Any],
    connector: dict[str, Any] | None,
    executor: str = "",
    *,
    transfer: dict[str, Any] | None = None,
    events: bool = False,
    **options: Any,
) -> Run:
    """transfer: another connector than Quire's. options: further arguments of vllm.LLM."""
    load = {
        "model": model,
        "prompts": prompts,
        "count": _COUNT,
        "connector": connector,
        "transfer": transfer,
        "executor": executor,
        "events": events,
        "options": options,
    }
    done = subprocess.run(
        [sys.executable, str(_RUN)],
        input=json.dumps(load),
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Run(**json.loads(done.stdout.splitlines()[-1]), log=done.stdout + done.stderr)
