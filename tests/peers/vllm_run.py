"""One process of vLLM with QuireConnector, or without: runs prompts and prints what came out.

usage: vllm_run.py, a JSON object on standard input:
    model: folder. prompts: run one after the other; lists of ids, or objects of ids, salt, kv (the
    request's kv_transfer_params) and reset ("own": vLLM's prefix cache is emptied before, "both":
    the connector is reset, too, "sleep": vLLM sleeps at level 2 before) and lora (name, number and
    folder). count: new tokens of each.
    connector: kv_connector_extra_config, or null. transfer: fields of the KVTransferConfig of
    another connector than Quire's, or null. executor: "mp" = the worker is a process.
    options: further arguments of vllm.LLM. events: whether KV events are published.
The last line of standard output is a JSON object: answers (ids), cached (for each prompt the tokens
that vLLM has not computed), metrics, events (of each: name, medium, hashes, parent).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _engine(load: dict[str, Any]) -> Any:
    import vllm
    from vllm.config import KVEventsConfig, KVTransferConfig

    options: dict[str, Any] = dict(load.get("options") or {})
    if load.get("transfer"):
        options["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **load["transfer"])
        if load["transfer"]["kv_connector"].startswith("LMCache"):
            sys.path.append(str(Path(__file__).parents[2] / "bench"))
            from vllm_engine_worker import scan_without_cffi

            scan_without_cffi()
    elif load["connector"] is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=load["connector"],
        )
    if load.get("events"):
        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if load.get("executor"):
        options["distributed_executor_backend"] = load["executor"]
    return vllm.LLM(
        model=load["model"],
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        disable_log_stats=False,
        **options,
    )


def _make_stage_buffers(worker: Any) -> None:
    """What comes from the stage before. vLLM makes it when it compiles, and without compiling its
    CPU build stops at the first step."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _answer(engine: Any, asked: dict[str, Any], count: int) -> Any:
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=count,
        min_tokens=count,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": asked["kv"]} if "kv" in asked else None,
    )
    prompt = {"prompt_token_ids": asked["ids"]}
    if "salt" in asked:
        prompt["cache_salt"] = asked["salt"]
    lora = None
    if "lora" in asked:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(*asked["lora"])
    (output,) = engine.generate([prompt], sampling, use_tqdm=False, lora_request=lora)
    return output


def _publish_to(engine: Any, published: list[dict[str, Any]]) -> None:
    """What vLLM's scheduler would send to routers goes into the list."""

    def publish(batch: Any) -> None:
        for event in batch.events:
            parent = getattr(event, "parent_block_hash", None)
            published.append(
                {
                    "name": type(event).__name__,
                    "medium": event.medium,
                    "hashes": [str(each) for each in event.block_hashes],
                    "parent": None if parent is None else str(parent),
                }
            )

    engine.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher.publish = publish


def main() -> None:
    load = json.load(sys.stdin)
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    engine = _engine(load)
    if load.get("options", {}).get("pipeline_parallel_size", 1) > 1:
        engine.collective_rpc(_make_stage_buffers)
    published: list[dict[str, Any]] = []
    if load.get("events"):
        _publish_to(engine, published)
    answers, cached = [], []
    for prompt in load["prompts"]:
        asked = {"ids": prompt} if isinstance(prompt, list) else prompt
        if asked.get("reset") == "sleep":
            engine.sleep(level=2)
            engine.wake_up()
        elif "reset" in asked:
            assert engine.reset_prefix_cache(reset_connector=asked["reset"] == "both")
        output = _answer(engine, asked, load["count"])
        answers.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    metrics = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:quire") and hasattr(metric, "value")
    }
    engine.llm_engine.engine_core.shutdown()
    found = {"answers": answers, "cached": cached, "metrics": metrics, "events": published}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
