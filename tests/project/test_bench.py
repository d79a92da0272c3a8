"""bench/bench: the driver runs, and its arithmetic is right. No figure is judged here."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import source_tree

BENCH = source_tree.ROOT / "bench"
WORKER_DIR = os.environ.get("QUIRE_BENCH_WORKER_DIR") or str(source_tree.RELEASE / "bench")
sys.path.insert(0, str(BENCH))

import cases as bench_cases  # noqa: E402
import driver  # noqa: E402
import generation  # noqa: E402
import measure  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
import serving  # noqa: E402
import workers  # noqa: E402


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a run wrote that finds no peers."""
    assert (Path(WORKER_DIR) / "bench_worker").exists(), "not built: ./test release"
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [BENCH / "bench", "--smoke", "--rounds", "3", "--json", folder / "smoke.json"],
        env=os.environ | {"QUIRE_BENCH_WORKER_DIR": WORKER_DIR, "QUIRE_PEERS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("bench/setup vllm builds it; measured without it") == 2, done.stderr
    return json.loads((folder / "smoke.json").read_text())


def test_every_case_gives_its_rows(smoke):
    names = [case["name"] for case in smoke["cases"]]
    assert names[:4] == ["smoke/decode", "smoke/shared", "smoke/prefill", "smoke/plan"]
    tiers = ("ram", "disk", "disk-sync", "redis")
    assert names[4:8] == [f"chunks/1.1b/{tier}" for tier in tiers]
    assert names[8:] == [
        "tree/bf16/gqa4/2x(250+8)",
        "latent/bf16/2h/2x256",
        "smoke/tvm",
        "smoke/speculate",
        "serve/embedded/clients/2x(16+4)",
        "serve/embedded/chats",
        "serve/embedded/branches",
        "serve/embedded/arrivals",
        "serve/embedded/start",
        "hf/embedded/beams/2x(8+2)",
        "channel/64KiB",
        "channel/64KiB/streams",
        "transfer/1.1b/64",
        "pair/embedded/first_token/300",
        "pair/embedded/arrivals/8+3x64",
        "blend/embedded/first_token/6x24+32/pages",
        "blend/embedded/first_token/6x24+32/disk",
    ]
    sides = [list(case["samples"]) for case in smoke["cases"][8:]]
    # Sides that not every machine has; bench/setup installs them.
    absent = {"UCX", "Mooncake", "NIXL"}
    absent |= {"ucx_perftest", "ucx_perftest tcp", "ucx_perftest posix"}
    sides = [[name for name in names if name not in absent] for names in sides]
    assert sides == [
        ["Quire", "chain"],
        ["Quire"],
        ["Quire", "quire.tvm", "TVM"],
        ["Quire", "plain"],
        *[["Quire", "EngineLoop"]] * 4,
        ["Quire"],
        ["Quire", "DynamicCache"],
        ["Quire", "TCP", "copy"],
        ["Quire", "1 stream", "2 streams", "8 streams"],
        ["Quire", "TCP", "one process", "copy"],
        ["Quire", "one process", "Redis"],
        ["Quire", "one process"],
        *[["Quire", "full prefill", "prefix cache", "full reuse", "5 %", "30 %", "all again"]] * 2,
    ]
    for case in smoke["cases"]:
        assert case["rows"], case["name"]
        for rounds in case["samples"].values():
            assert len(rounds) == 3
            assert all(_is_measured(name, x) for each in rounds for name in each for x in each[name])
        # Before each side, and behind the last one.
        assert [len(probes) for probes in case["probes"]] == [len(case["samples"]) + 1] * 3
    assert smoke["machine"]["cpu"] and smoke["versions"]["worker"]["kernel_path"]


def _is_measured(metric: str, value: float) -> bool:
    """A client that the machine kept waiting gets all tokens of so short an answer at once."""
    return value >= 0 if metric.startswith("between tokens") else value > 0


def test_ratio_is_the_median_of_the_rounds_ratios(smoke):
    shared = smoke["cases"][1]
    row = shared["rows"][0]
    quire, copies = (
        [statistics.median(samples["call"]) for samples in shared["samples"][side]]
        for side in ("Quire", "own copies")
    )
    ratios = [theirs / ours for theirs, ours in zip(copies, quire, strict=True)]
    comparison = row["comparisons"][0]
    assert comparison["peer"] == "own copies"
    assert comparison["ratio"] == pytest.approx(statistics.median(ratios))
    assert (comparison["lowest"], comparison["highest"]) == (min(ratios), max(ratios))
    assert row["value"] == pytest.approx(1e3 * statistics.median(quire))


# ---- Arithmetic, on numbers made for it


def case_of(metric: bench_cases.Metric) -> bench_cases.Case:
    sides = (bench_cases.Side("Quire", "quire", {}), bench_cases.Side("vLLM", "vllm-kernel", {}))
    return bench_cases.Case(name="made/up", group="a", sides=sides, metrics=(metric,))


def probe(bandwidth: float, peak: float, dot: float | None = None) -> measure.Probe:
    read = {"read_n": [bandwidth], "f32_n": [peak]}
    return read if dot is None else read | {"bf16_n": [dot]}


def measured(
    quire: list[float], peer: list[float], probes: list[measure.Probe]
) -> measure.Measured:
    samples = {"Quire": [{"call": [x]} for x in quire], "vLLM": [{"call": [x]} for x in peer]}
    return measure.Measured(samples, [[each] * 3 for each in probes])


def test_bound_is_the_slower_of_memory_and_arithmetic():
    for work, seconds in (
        (bench_cases.Work(((20e9, 1e9),)), 2.0),  # 20 GB at 10 GB/s
        (bench_cases.Work(((1e9, 300e9),)), 3.0),  # 300 GFLOP at 100 GFLOP/s
        (bench_cases.Work(((1e9, 300e9),), "bfloat16"), 1.5),  # at 200
        (bench_cases.Work(((20e9, 0), (0, 300e9))), 5.0),  # one after the other
    ):
        metric = bench_cases.Metric(work=work)
        data = measured([2 * seconds], [1.0], [probe(10e9, 100e9, 200e9)])
        assert measure.rows(case_of(metric), data)[0].fraction == pytest.approx(0.5)


def test_without_bf16_dot_products_float32_bounds():
    metric = bench_cases.Metric(work=bench_cases.Work(((0, 100e9),), "bfloat16"))
    row = measure.rows(case_of(metric), measured([4.0], [1.0], [probe(10e9, 100e9)]))[0]
    assert row.fraction == pytest.approx(0.25)


def test_a_side_is_bound_by_what_was_read_before_and_behind_it():
    metric = bench_cases.Metric(work=bench_cases.Work(((20e9, 0),)))
    data = measured([2.0], [1.0], [])
    data.probes.append([probe(10e9, 1e12), probe(30e9, 1e12), probe(90e9, 1e12)])
    row = measure.rows(case_of(metric), data)[0]
    assert (row.bandwidth, row.fraction) == (20e9, 0.5)


def test_goals_are_judged_by_medians_over_rounds():
    goals = (
        bench_cases.Goal("vLLM", 2.0),
        bench_cases.Goal("llama.cpp", 1.0),  # not measured: no outcome
        bench_cases.Goal("bound", 0.75, in_fast_memory=0.60),
    )
    metric = bench_cases.Metric(work=bench_cases.Work(((30e9, 0),)), goals=goals)
    slow, fast = probe(30e9, 1e12), probe(60e9, 1e12)
    # Ratios 2, 1, 3; of the bound 0.8 and 0.5 in slow memory, 0.65 in fast memory.
    data = measured(
        [1 / 0.8, 1 / 0.5, 0.5 / 0.65], [2 / 0.8, 1 / 0.5, 1.5 / 0.65], [slow, slow, fast]
    )
    row = measure.rows(case_of(metric), data)[0]
    assert [outcome.reached for outcome in row.outcomes] == [True, True]
    assert row.comparisons[0].ratio == pytest.approx(2)
    data = measured(
        [1 / 0.8, 1 / 0.5, 0.5 / 0.55], [1.9 / 0.8, 1.9 / 0.5, 1 / 0.55], [slow, slow, fast]
    )
    row = measure.rows(case_of(metric), data)[0]
    assert [outcome.reached for outcome in row.outcomes] == [False, False]


def test_limits_and_quoted_figures():
    metric = bench_cases.Metric(
        unit="us", goals=(bench_cases.Goal("limit", 20e-6),), quoted={"TVM": 569e-6}
    )
    case = case_of(metric)
    data = measure.Measured({"Quire": [{"call": [10e-6, 30e-6, 19e-6]}]}, [[probe(1e9, 1e9)] * 2])
    row = measure.rows(case, data)[0]
    assert row.value == pytest.approx(19)
    assert row.comparisons[0].ratio == pytest.approx(569 / 19)
    assert row.outcomes[0].reached


def test_tokens_per_second_compare_as_times_do():
    metric = bench_cases.Metric(unit="tokens", tokens=16)
    row = measure.rows(case_of(metric), measured([0.5], [1.0], [probe(1e9, 1e9)]))[0]
    assert (row.value, row.comparisons[0].value, row.comparisons[0].ratio) == (32, 16, 2)


def test_nothing_between_tokens_that_come_at_once_has_a_ratio():
    metric = bench_cases.Metric(goals=(bench_cases.Goal("vLLM", 2.0),))
    row = measure.rows(case_of(metric), measured([0.0], [1.0], [probe(1e9, 1e9)]))[0]
    assert (row.value, row.outcomes[0].reached) == (0, True)
    row = measure.rows(case_of(metric), measured([1.0], [0.0], [probe(1e9, 1e9)]))[0]
    assert (row.comparisons[0].value, row.outcomes[0].reached) == (0, False)
    row = measure.rows(case_of(metric), measured([0.0], [0.0], [probe(1e9, 1e9)]))[0]
    assert row.comparisons[0].ratio == 1


def test_a_prompt_arrives_in_a_gap_where_no_token_comes_meanwhile():
    async def ask(prompt: list[int], tokens: int, seen: serving.Seen) -> None:
        for _ in range(tokens - 1):
            seen.note([1])
            await asyncio.sleep(0)
        seen.note([1])

    work = serving.Work(ask, vocab_size=1000, seed=1)
    samples = asyncio.run(work.arrivals(clients=2, prompts=1, prompt=4, tokens=10**9))
    assert samples["between tokens, p99"][0] > 0


def test_a_goal_may_be_about_another_side():
    goals = (bench_cases.Goal("TVM", 30.0), bench_cases.Goal("TVM", 30.0, side="quire.tvm"))
    sides = tuple(
        bench_cases.Side(name, worker, {})
        for name, worker in (("Quire", "quire"), ("quire.tvm", "tvm-cache"), ("TVM", "tvm-cache"))
    )
    metric = bench_cases.Metric(unit="us", goals=goals)
    case = bench_cases.Case(name="made/up", group="j", sides=sides, metrics=(metric,))
    figures = {"Quire": 2.0, "quire.tvm": 4.0, "TVM": 90.0}
    samples = {name: [{"call": [x]}] for name, x in figures.items()}
    data = measure.Measured(samples, [[probe(1e9, 1e9)] * 4])
    row = measure.rows(case, data)[0]
    assert [(o.goal, o.reached) for o in row.outcomes] == [
        ("30 × TVM", True),
        ("quire.tvm: 30 × TVM", False),
    ]
    del samples["TVM"]
    assert measure.rows(case, data)[0].outcomes == []


def test_a_goal_may_be_so_many_seconds_more():
    metric = bench_cases.Metric(goals=(bench_cases.Goal("vLLM", 3e-3, adds=True),))
    data = measured([0.012, 0.030, 0.013], [0.010, 0.010, 0.010], [probe(1e9, 1e9)] * 3)
    row = measure.rows(case_of(metric), data)[0]
    assert [(o.goal, o.reached) for o in row.outcomes] == [("≤ vLLM + 3 ms", True)]
    data = measured([0.014, 0.010, 0.014], [0.010, 0.010, 0.010], [probe(1e9, 1e9)] * 3)
    assert not measure.rows(case_of(metric), data)[0].outcomes[0].reached


def test_work_of_trees_and_latent_layers():
    by_name = {case.name: case for case in bench_cases.all_cases(32 << 20, 2)}

    def work(name: str) -> tuple[float, float]:
        return by_name[name].metrics[0].work.phases[0]

    # Nodes 0, 1, 2, 3: one, two, two and three ancestors and selves; a pair is 4 FLOP of 32 x 128.
    pairs = 8 * (4 * 4096 + 1 + 2 + 2 + 3)
    assert work("tree/bf16/gqa4/8x(4096+4)") == (8 * 4100 * 2 * 8 * 128 * 2, 4 * 32 * 128 * pairs)
    assert work("latent/bf16/16h/8x512") == (8 * 512 * 576 * 2, 2 * 16 * (576 + 512) * 8 * 512)


def test_names_of_cases_are_distinct_and_every_group_has_quick_ones():
    every = bench_cases.all_cases(32 << 20, 2)
    assert len({case.name for case in every}) == len(every)
    assert {case.group for case in every if case.quick} == set(bench_cases.GROUPS)
    assert not [case.name for case in every if case.quick and case.long]
    assert all(case.sides[0].name == "Quire" for case in every)


def test_attention_rotates_more_than_the_last_cache():
    cache = 32 << 20
    for case in bench_cases.all_cases(cache, 2):
        for side in case.sides:
            if side.request.get("kind") == "attention":
                request = side.request
                if "layers" not in request:  # TVM's, and ours beside it: one layer
                    continue
                codes = 1 + 4 / request["head_dim"]  # and a scale per token and head
                element = {"bfloat16": 2, "float32": 4}.get(request["dtype"], codes)
                tokens = request["prefix"] + request["sequences"] * request["own"]
                vectors = 1 if request.get("latent") else 2 * request["kv_heads"]
                layer = tokens * vectors * request["head_dim"] * element
                assert request["layers"] * layer > 8 * cache, case.name
                assert request["layers"] * layer <= case.side_bytes, case.name


# ---- Children


def line_worker(tmp_path: Path, program: str, patience: float = 60.0) -> workers.LineWorker:
    return workers.LineWorker(
        [sys.executable, "-c", program], tmp_path / "log", lambda: patience, start=None
    )


def test_a_child_that_ends_is_named_with_its_last_words(tmp_path):
    worker = line_worker(tmp_path, "import sys; input(); sys.exit('out of luck')")
    with pytest.raises(workers.WorkerError, match="has ended: out of luck"):
        worker.ask({"do": "run"})
    worker.close()


def test_a_child_that_hangs_is_ended(tmp_path):
    worker = line_worker(tmp_path, "import sys; sys.stdin.read()", patience=0.01)
    with pytest.raises(workers.WorkerError, match="took too long"):
        worker.ask({"do": "run"})
    assert worker.process.poll() is not None


def test_what_a_peer_prints_and_raises_does_not_end_its_worker(tmp_path):
    program = f"""
import sys; sys.path.insert(0, {str(BENCH)!r})
import line_protocol
def run(x):
    print("noise")
    return {{"samples": {{"call": [1 / x]}}}}
line_protocol.serve({{"run": run}})
"""
    worker = line_worker(tmp_path, program)
    with pytest.raises(workers.WorkerError, match="ZeroDivisionError"):
        worker.ask({"do": "run", "x": 0})
    assert worker.ask({"do": "run", "x": 4}) == {"samples": {"call": [0.25]}}
    worker.close()
    assert "noise" in worker.log_tail()


# ---- Requests of the whole-model cases


def test_every_engine_is_asked_for_the_same_work():
    asked: list[tuple[list[int], int]] = []

    def generate(prompts: list[list[int]], tokens: int) -> None:
        asked.append(([len(prompt) for prompt in prompts], tokens))

    cases = generation.Cases(generation.Engine(generate, 1000, "test"))
    request = {"kind": "generate", "depth": 64, "batch": 3, "tokens": 32}
    cases.prepare("key", **request)
    assert asked == [([64], 1)] * 3 + [([64] * 3, 1), ([64] * 3, 33)]
    asked.clear()
    cases.run("key", **request)
    assert asked == [([64] * 3, 1), ([64] * 3, 33)]
    asked.clear()
    cases.run("key", kind="shared", prefix=128, batch=2, tokens=5)
    assert asked == [([128], 1), ([128 + 16] * 2, 5)]
    asked.clear()
    cases.run("key", kind="first_token", prefix=128, repetitions=2)
    assert asked == [([128], 1), ([144], 1), ([144], 1)]
    asked.clear()
    cases.prepare("again", kind="again", tokens=128)
    assert asked == [([128], 1)] * 2


def test_guesses_are_counted_where_there_are_any():
    forwards = [0]

    def generate(prompts: list[generation.Prompt], tokens: int) -> None:
        assert prompts == ["again and again"]
        forwards[0] += 1 + tokens // 4

    engine = generation.Engine(generate, 1000, "", guessing_forwards=lambda: forwards[0])
    for one, expected in ((engine, (1 + 4) / 14), (generation.Engine(generate, 1000, ""), 1.0)):
        cases = generation.Cases(one)
        request = {"kind": "text", "text": "again and again", "tokens": 12}
        cases.prepare("key", **request)
        samples = cases.run("key", **request)["samples"]
        assert samples["forwards of a token"] == [pytest.approx(expected)]
        assert len(samples["call"]) == 1


# ---- Recorded results, and the page


def recorded(case: str, value: float, date: str, group: str = "a") -> report.Recorded:
    peers = [measure.Comparison("vLLM", 2 * value, 2.0, 1.5, 2.5)]
    goals = [measure.Outcome("2 × vLLM", True), measure.Outcome("0.9 of the bound", False)]
    row = measure.Row(case, "call", "ms", value, peers, 0.5, 30e9, goals)
    return report.Recorded(row, group, date, None)


def test_results_are_kept_and_the_newest_are_shown(tmp_path):
    first, second = report.HEADLINES[:2]
    page, folder = tmp_path / "page.md", tmp_path
    page.write_text(f"head\n{report.BEGIN}\nold\n{report.END}\ntail\n")
    report.record(folder, "CPU one; 2 threads", [recorded(first, 1, "2026-01-01")])
    report.record(folder, "CPU two", [recorded(first, 3, "2026-01-02")])
    newer = [recorded(first, 5, "2026-01-03"), recorded(second, 7, "2026-01-03")]
    report.record(folder, "CPU one; 2 threads", [*newer, recorded("decode/x", 2, "2026-01-03")])
    assert len(json.loads((folder / "cpu-one-2-threads.json").read_text())["rows"]) == 4
    machines = report.newest(folder)
    assert list(machines) == ["CPU one; 2 threads", "CPU two"]
    assert machines["CPU one; 2 threads"][first] == newer[0]
    report.update(page, folder)
    text = page.read_text()
    assert text.startswith("head\n") and text.endswith("\ntail\n") and "old" not in text
    assert [text.count(f"| {value} ms |") for value in (5, 7, 3, 1, 2)] == [1, 1, 1, 0, 0]
    assert "0.50 at 30 GB/s | 2 × vLLM: reached; 0.9 of the bound: **not reached**" in text
    lines = report.all_lines(folder)
    assert lines[:2] == ["# CPU one; 2 threads", "## Decode attention"]
    assert any(line.startswith("decode/x: 2 ms | vLLM 4 ms: 2 × (1.5 to 2.5)") for line in lines)


def test_a_run_records_its_rows(tmp_path, monkeypatch):
    """What --update-docs does at the end of a run."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    monkeypatch.setattr(driver, "RESULTS", tmp_path)
    monkeypatch.setattr(driver, "_commit", lambda: "0123abc")
    run = driver.Run.__new__(driver.Run)
    run._date = datetime.datetime(2026, 1, 4, tzinfo=datetime.UTC)
    run._machine = driver.Machine(3)
    run._rows = {"a": [recorded(report.HEADLINES[0], 11, "").row]}
    run._record()
    (shown,) = report.newest(tmp_path)[run._machine.title()].values()
    assert (shown.group, shown.date, shown.commit) == ("a", "2026-01-04", "0123abc")
    assert "| 11 ms |" in page.read_text()


def test_the_page_shows_what_is_recorded(tmp_path):
    page = tmp_path / "page.md"
    text = source_tree.read(Path("docs/benchmarks.md"))
    page.write_text(text)
    report.update(page, BENCH / "results")
    assert page.read_text() == text, "stale: bench/bench --update-docs writes it"
    assert text.count("\n") <= 120


# ---- Models


@pytest.mark.parametrize("name", ["110m", "1b"])
def test_a_models_numbers_agree_with_its_tensors(name):
    model = models.describe(name)
    tensors = {hf: shape for hf, _, shape, _ in models._tensors(model)}
    matrices = sum(s[0] * s[1] for hf, s in tensors.items() if len(s) == 2 and "layers" in hf)
    assert matrices == model.layer_parameters
    head = tensors["lm_head.weight"]
    assert head[0] * head[1] == model.logit_parameters


def test_a_quantised_models_file_has_the_bytes_that_bound_a_step(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setitem(models._SHAPES, "tiny", (256, 8, 4, 2, 512, 600))
    for kind in ("q8_0", "q4_0", "q4_k_m"):
        model = models.describe(f"tiny-{kind}")
        file = models.quantised_file(model.name, tmp_path)
        assert models.source(model.name, tmp_path) == file
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
        read = sum(int(t.n_bytes) for name, t in tensors.items() if "norm" not in name)
        embedding = int(tensors["token_embd.weight"].n_bytes)
        assert model.step_bytes(0) == read - embedding
        for tensor in tensors.values():
            assert np.isfinite(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).all()
    # Of 8 layers in Q4_K_M the first, the last, and every third between have wider matrices.
    wide = [
        layer
        for layer in range(8)
        if tensors[f"blk.{layer}.attn_v.weight"].tensor_type.name == "Q6_K"
    ]
    assert wide == [0, 3, 6, 7]
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    assert tensors["blk.3.attn_q.weight"].tensor_type.name == "Q4_K"


def test_quantised_weights_are_bound_by_products_of_bytes():
    metric = bench_cases.Metric(work=bench_cases.Work(((0, 400e9),), "int8"))
    fast = probe(10e9, 100e9, 200e9) | {"int8_n": [400e9]}
    (row,) = measure.rows(case_of(metric), measured([2.0], [1.0], [fast]))
    assert row.fraction == pytest.approx(0.5)


def test_the_embedded_models_numbers_are_those_of_its_configuration():
    import quire

    config = json.loads((Path(quire.embedded_model_dir()) / "config.json").read_text())
    model = models.describe("embedded")
    assert model == models.Model(
        name="embedded",
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
    )
