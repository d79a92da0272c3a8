"""quire.Engine over a small random llama: logits against NumPy, exactness, answers, errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
import torch
from tiny_model import TinyModel

PROMPTS = ["The quick brown fox", "A quire is a stack of folded pages; " * 3, "你好 🙂", "x"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def some_ids(tiny: TinyModel, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.vocab_size, n).tolist()


# ---- Logits


@pytest.mark.parametrize("length", [1, 2, 16, 17, 60])
def test_logits_are_those_of_numpy(engine: quire.Engine, tiny: TinyModel, length: int) -> None:
    ids = some_ids(tiny, length)
    logits = engine.logits(ids)
    assert logits.dtype == np.float32 and logits.shape == (length, tiny.vocab_size)
    expected = tiny.logits(ids)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_logits_in_bfloat16_are_near(tiny: TinyModel) -> None:
    ids = some_ids(tiny, 40)
    with quire.Engine(tiny.directory, dtype="bfloat16", threads=1) as engine:
        logits = engine.logits(ids)
    expected = tiny.logits(ids)
    assert np.abs(logits - expected).mean() < 0.05 * np.abs(expected).mean()


def test_logits_of_several_prompts_are_those_of_each_alone(
    engine: quire.Engine, tiny: TinyModel
) -> None:
    prompts = [some_ids(tiny, n, seed=n) for n in (5, 1, 33, 16)]
    together = engine.logits(prompts)
    assert isinstance(together, list) and len(together) == 4
    for prompt, logits in zip(prompts, together):
        assert np.array_equal(logits, engine.logits(prompt))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_setting_changes_a_bit(tiny: TinyModel, dtype: str) -> None:
    ids = some_ids(tiny, 70)
    found = []
    for settings in (
        dict(threads=1),
        dict(threads=2, page_size=1, prefill_chunk=7),
        dict(threads=1, page_size=3, prefill_chunk=64),
        dict(threads=2, page_size=64, prefill_chunk=1),
    ):
        with quire.Engine(tiny.directory, dtype=dtype, **settings) as engine:
            found.append(engine.logits(ids))
    for logits in found[1:]:
        assert np.array_equal(logits, found[0])


def test_all_kinds_of_prompts_mean_the_same(engine: quire.Engine, tiny: TinyModel) -> None:
    ids = engine.tokenizer.encode("The lazy dog")
    expected = engine.logits(ids)
    for prompt in (
        "The lazy dog",
        tuple(ids),
        np.array(ids),
        np.array(ids, np.int32),
        torch.tensor(ids),
    ):
        assert np.array_equal(engine.logits(prompt), expected)
    two = engine.logits(np.array([ids, ids]))
    assert len(two) == 2 and np.array_equal(two[1], expected)
    assert engine.logits([]) == []


# ---- Answers


def test_greedy_takes_the_most_likely_token_of_the_same_logits(
    engine: quire.Engine, tiny: TinyModel
) -> None:
    prompt = some_ids(tiny, 19)
    result = engine.generate(prompt, max_tokens=30, ignore_eos=True)
    assert len(result.ids) == 30 and result.finish_reason == "length"
    logits = engine.logits(prompt + result.ids[:-1])[len(prompt) - 1 :]
    assert result.ids == logits.argmax(-1).tolist()
    expected = log_softmax(logits)[np.arange(30), result.ids]
    assert np.abs(np.array(result.logprobs) - expected).max() < 1e-5
    assert result.prompt_ids == prompt
    assert result.usage == quire.Usage(
        prompt_tokens=19,
        cached_tokens=0,
        completion_tokens=30,
        prefix_miss=quire.PrefixMiss("new", 0),
    )


def test_answers_to_many_prompts_are_those_to_each_alone(engine: quire.Engine) -> None:
    together = engine.generate(PROMPTS, max_tokens=20)
    assert [type(result) for result in together] == [quire.Result] * len(PROMPTS)
    for prompt, result in zip(PROMPTS, together):
        alone = engine.generate(prompt, max_tokens=20)
        assert (alone.ids, alone.logprobs, alone.text) == (result.ids, result.logprobs, result.text)
        assert result.text == engine.tokenizer.decode(result.ids)


def test_more_prompts_than_sequences_wait_their_turn(tiny: TinyModel) -> None:
    with quire.Engine(
        tiny.directory, dtype="float32", max_num_sequences=2, threads=1, prefix_cache=False
    ) as engine:
        results = engine.generate(PROMPTS * 2, max_tokens=5, ignore_eos=True)
        assert [len(result.ids) for result in results] == [5] * 8
        assert results[0].ids == results[4].ids
        assert engine.stats()["pages_in_use"] == 0


def test_a_chat_goes_through_the_template(engine: quire.Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    by_chat = engine.generate(messages, max_tokens=8)
    assert by_chat.prompt_ids == engine.tokenizer.encode(text)
    assert by_chat.ids == engine.generate(text, max_tokens=8).ids
    assert [result.ids for result in engine.generate([messages, "Hi"], max_tokens=8)][
        0
    ] == by_chat.ids


def test_the_end_of_answer_token_ends_it(engine: quire.Engine, tiny: TinyModel) -> None:
    prompt = some_ids(tiny, 5)
    result = engine.generate(prompt, max_tokens=50, logit_bias={tiny.eos: 1e9})
    assert result.finish_reason == "stop" and result.text == ""
    assert engine.generate(prompt, max_tokens=9, ignore_eos=True).finish_reason == "length"


def test_sampling_depends_on_the_seed_alone(engine: quire.Engine) -> None:
    options: dict[str, Any] = dict(max_tokens=20, temperature=2.0, ignore_eos=True)
    first = engine.generate("The", seed=7, **options)
    assert engine.generate(["x", "The", "A"], seed=7, **options)[1].ids == first.ids
    assert engine.generate("The", seed=8, **options).ids != first.ids
    assert engine.generate("The", seed=2**64 - 1, **options).ids != first.ids


def test_samples_are_streams_of_one_seed(engine: quire.Engine) -> None:
    options: dict[str, Any] = dict(max_tokens=12, temperature=2.0, ignore_eos=True, seed=3)
    result = engine.generate("The", n=3, **options)
    assert len(result.samples) == 3 and result.usage.completion_tokens == 36
    assert len({tuple(sample.ids) for sample in result.samples}) == 3
    assert result.ids == engine.generate("The", **options).ids
    for sample in result.samples:
        assert sample.text == engine.tokenizer.decode(sample.ids)


def test_options_of_sampling_reach_the_engine(engine: quire.Engine, tiny: TinyModel) -> None:
    prompt = some_ids(tiny, 6)
    greedy = engine.generate(prompt, max_tokens=10, ignore_eos=True)
    hot: dict[str, Any] = dict(max_tokens=10, ignore_eos=True, temperature=50.0, seed=1)
    assert engine.generate(prompt, top_k=1, **hot).ids == greedy.ids
    assert engine.generate(prompt, top_p=1e-6, **hot).ids == greedy.ids
    assert engine.generate(prompt, min_p=1.0, **hot).ids == greedy.ids
    assert engine.generate(prompt, **hot).ids != greedy.ids
    banned = engine.generate(prompt, max_tokens=1, logit_bias={greedy.ids[0]: -1e9})
    assert banned.ids[0] != greedy.ids[0]
    # A penalty large enough lets no token come twice.
    unlike = engine.generate(prompt, max_tokens=20, ignore_eos=True, presence_penalty=1e6)
    assert len(set(unlike.ids)) == 20
    unlike = engine.generate(prompt, max_tokens=20, ignore_eos=True, frequency_penalty=1e6)
    assert len(set(unlike.ids)) == 20
    unlike = engine.generate(prompt, max_tokens=3, ignore_eos=True, repetition_penalty=1.3)
    assert len(unlike.ids) == 3


def test_logprobs_of_the_best_tokens(engine: quire.Engine, tiny: TinyModel) -> None:
    prompt = some_ids(tiny, 6)
    result = engine.generate(prompt, max_tokens=4, logprobs=3, ignore_eos=True)
    logits = engine.logits(prompt + result.ids[:-1])[len(prompt) - 1 :]
    for best, row in zip(result.top_logprobs, log_softmax(logits)):
        assert [id for id, _ in best] == np.argsort(-row)[:3].tolist()
        assert (
            np.abs(np.array([logprob for _, logprob in best]) - np.sort(row)[::-1][:3]).max() < 1e-5
        )
    without = engine.generate(prompt, max_tokens=4, logprobs=None, ignore_eos=True)
    assert without.logprobs is None and without.top_logprobs is None and without.ids == result.ids
    assert engine.generate(prompt, max_tokens=4).top_logprobs is None


def test_a_prefix_that_was_computed_before_is_counted_and_changes_nothing(
    engine: quire.Engine, tiny: TinyModel
) -> None:
    prompt = some_ids(tiny, 40)
    expected = engine.generate(prompt, max_tokens=6, ignore_eos=True)
    assert expected.usage.cached_tokens == 0
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, prefix_cache=True
    ) as caching:
        caching.generate(prompt[:30] + [5, 5], max_tokens=3)
        result = caching.generate(prompt, max_tokens=6, ignore_eos=True)
        assert 0 < result.usage.cached_tokens <= 30
        assert (result.ids, result.logprobs) == (expected.ids, expected.logprobs)
        stats = caching.stats()
        assert (
            stats["cached_tokens"] == result.usage.cached_tokens and stats["retained_sequences"] > 0
        )


def test_pages_that_run_out_preempt_and_change_nothing(
    engine: quire.Engine, tiny: TinyModel
) -> None:
    prompts = [some_ids(tiny, 30, seed=seed) for seed in range(4)]
    expected = [engine.generate(prompt, max_tokens=60, ignore_eos=True) for prompt in prompts]
    page_bytes = 16 * engine.stats()["kv_bytes_per_token"]
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, kv_bytes=14 * page_bytes
    ) as crowded:
        # A busy machine may give the engine's thread no prompt before another's answer has ended.
        for _ in range(20):
            results = crowded.generate(prompts, max_tokens=60, ignore_eos=True)
            for result, alone in zip(results, expected):
                assert (result.ids, result.logprobs) == (alone.ids, alone.logprobs)
            if crowded.stats()["preemptions"] > 0:
                break
        assert crowded.stats()["preemptions"] > 0


# ---- Stops


def test_a_stop_text_is_cut_and_ends_the_answer(engine: quire.Engine) -> None:
    whole = engine.generate("The quick", max_tokens=40, ignore_eos=True)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    result = engine.generate("The quick", max_tokens=40, ignore_eos=True, stop=["never seen", stop])
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.ids == whole.ids[: len(result.ids)] and len(result.ids) < 40
    assert len(result.logprobs) == len(result.ids) == result.usage.completion_tokens
    assert engine.stats()["running"] == 0 and engine.stats()["pages_in_use"] == 0


def test_a_stop_text_ends_its_prompt_while_others_go_on(engine: quire.Engine) -> None:
    prompts = PROMPTS[:2]
    options: dict[str, Any] = dict(max_tokens=150, ignore_eos=True)
    whole = [result.text for result in engine.generate(prompts, **options)]
    stop = first_piece_of_one_alone(whole[1], whole[0])
    before = engine.stats()["computed_tokens"]
    results = engine.generate(prompts, stop=stop, **options)
    assert [result.finish_reason for result in results] == ["length", "stop"]
    assert results[1].text == whole[1][: whole[1].index(stop)]
    # The engine computes on until it hears of the stop.
    computed = engine.stats()["computed_tokens"] - before
    assert computed < 290 + sum(len(result.prompt_ids) for result in results)


def first_piece_of_one_alone(text: str, others: str) -> str:
    """The shortest piece near the start of a text that is not in the others."""
    return next(
        piece
        for length in range(1, 20)
        for i in range(len(text) - length)
        if (piece := text[i : i + length]) not in others
    )


def test_a_stop_text_ends_one_sample_and_not_the_others(engine: quire.Engine) -> None:
    options: dict[str, Any] = dict(max_tokens=30, temperature=2.0, ignore_eos=True, seed=3, n=3)
    whole = [sample.text for sample in engine.generate("The", **options).samples]
    stop = first_piece_of_one_alone(whole[1], whole[0] + whole[2])
    result = engine.generate("The", stop=stop, **options)
    assert [sample.text for sample in result.samples] == [
        whole[0],
        whole[1][: whole[1].index(stop)],
        whole[2],
    ]
    assert [sample.finish_reason for sample in result.samples] == ["length", "stop", "length"]
    assert result.usage.completion_tokens == sum(len(sample.ids) for sample in result.samples)


def test_stop_tokens_are_cut(engine: quire.Engine, tiny: TinyModel) -> None:
    prompt = some_ids(tiny, 6)
    whole = engine.generate(prompt, max_tokens=20, ignore_eos=True)
    stop = whole.ids[8:10]
    cut = next(i for i in range(19) if whole.ids[i : i + 2] == stop)
    result = engine.generate(prompt, max_tokens=20, ignore_eos=True, stop=[stop])
    assert result.ids == whole.ids[:cut] and result.finish_reason == "stop"


# ---- Streams


def test_a_stream_is_the_answer_in_pieces(engine: quire.Engine) -> None:
    whole = engine.generate("The quick", max_tokens=25)
    pieces = list(engine.stream("The quick", max_tokens=25))
    assert "".join(pieces) == whole.text
    assert [id for piece in pieces for id in piece.ids] == whole.ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason and pieces[-1].result == whole
    assert len(pieces) > 5 and type(pieces[0].text) is str


def test_streams_side_by_side(engine: quire.Engine) -> None:
    expected = [engine.generate(prompt, max_tokens=15, ignore_eos=True).text for prompt in PROMPTS]
    streams = [engine.stream(prompt, max_tokens=15, ignore_eos=True) for prompt in PROMPTS]
    texts = [""] * len(streams)
    open_streams = dict(enumerate(streams))
    while open_streams:
        for i, stream in list(open_streams.items()):
            piece = next(stream, None)
            if piece is None:
                del open_streams[i]
            else:
                texts[i] += piece
    assert texts == expected


def test_closing_a_stream_frees_its_pages(engine: quire.Engine) -> None:
    # With a window an answer goes on for as long as it is asked for: none ends before it is closed.
    endless: Any = {"max_tokens": 10**6, "ignore_eos": True, "window": 16, "sinks": 2}
    stream = engine.stream("The quick", **endless)
    next(stream)
    assert engine.stats()["pages_in_use"] > 0
    stream.close()
    assert engine.stats()["pages_in_use"] == 0 and engine.stats()["running"] == 0
    stream = engine.stream("The quick", **endless)
    next(stream)
    del stream
    assert engine.stats()["pages_in_use"] == 0


def test_a_stream_that_never_starts_is_dropped_too(engine: quire.Engine) -> None:
    stream = engine.stream("The quick", max_tokens=100)
    del stream
    assert engine.stats()["waiting"] == 0 and engine.stats()["running"] == 0


# ---- Many requests with options of their own


def test_each_request_gets_the_answer_that_it_gets_alone(
    engine: quire.Engine, tiny: TinyModel
) -> None:
    requests: list[tuple[Any, Any]] = [
        (PROMPTS[0], {"max_tokens": 9}),
        (some_ids(tiny, 30), {"max_tokens": 3, "temperature": 1.0, "seed": 5, "n": 2}),
        ([{"role": "user", "content": "Hi"}], {"max_tokens": 12, "logprobs": 2}),
        (PROMPTS[1], {"max_tokens": 1, "ignore_eos": True}),
    ]
    alone = [engine.generate(prompt, **options) for prompt, options in requests]
    for in_flight in (1, 2, 256):
        found = dict(engine.generate_each(requests, in_flight=in_flight))
        assert sorted(found) == [0, 1, 2, 3]
        for index, result in enumerate(alone):
            outcome = found[index]
            assert isinstance(outcome, quire.Result) and outcome == result


def test_requests_come_back_as_they_end(engine: quire.Engine, tiny: TinyModel) -> None:
    steps = [0]

    def count() -> None:
        steps[0] += 1

    # The engine computes while requests are submitted: the long ones take longer than that.
    lengths = (2000, 2, 700)
    requests: list[tuple[Any, Any]] = [
        ([7], {"max_tokens": n, "ignore_eos": True, "window": 16, "sinks": 2}) for n in lengths
    ]
    order = [index for index, _ in engine.generate_each(requests, on_step=count)]
    assert order == [1, 2, 0] and steps[0] >= 20


def test_a_stop_text_ends_one_of_many(engine: quire.Engine) -> None:
    text = engine.generate("Hi", max_tokens=20, ignore_eos=True).text
    assert text is not None
    stop = text[len(text) // 2 :][:2]
    options: Any = {"max_tokens": 20, "ignore_eos": True}
    found = dict(engine.generate_each([("Hi", options), ("Hi", {**options, "stop": stop})]))
    whole, cut = found[0], found[1]
    assert isinstance(whole, quire.Result) and isinstance(cut, quire.Result)
    assert whole.text == text and cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop" and engine.stats()["pages_in_use"] == 0


def test_one_that_fails_leaves_the_others_alone(engine: quire.Engine) -> None:
    good: Any = ([7], {"max_tokens": 3})
    requests: list[Any] = [([], {}), good, ([7], {"max_tokens": 5000}), good, ([10**6], {})]
    for in_flight in (1, 256):
        found = dict(engine.generate_each(requests, in_flight=in_flight))
        assert isinstance(found[0], quire.BadArgumentError)
        assert isinstance(found[2], quire.TooLargeError)
        assert isinstance(found[4], quire.BadArgumentError)
        assert found[1] == found[3] == engine.generate([7], max_tokens=3)


def test_closing_the_iterator_cancels_the_rest(engine: quire.Engine) -> None:
    taken = []

    def requests() -> Any:
        for n in range(1000):
            taken.append(n)
            yield [7], {"max_tokens": 1 if n == 0 else 100, "ignore_eos": True}

    outcomes = engine.generate_each(requests(), in_flight=3)
    assert next(outcomes)[0] == 0 and len(taken) == 3
    outcomes.close()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_in_use"]) == (0, 0, 0)


@pytest.mark.parametrize("in_flight", [0, -1])
def test_no_request_at_a_time_is_refused(engine: quire.Engine, in_flight: int) -> None:
    """It once answered nothing, without a word."""
    with pytest.raises(quire.BadArgumentError, match=f"in_flight is {in_flight}; it must be at"):
        engine.generate_each([("Hi", {})], in_flight=in_flight)


def test_times_do_not_make_usages_different() -> None:
    usage = quire.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=3)
    times = {
        field.name: 1.0 for field in dataclasses.fields(usage) if field.name.endswith("_seconds")
    }
    assert len(times) > 5 and dataclasses.replace(usage, **times) == usage


def test_a_check_computes_nothing(engine: quire.Engine, tiny: TinyModel) -> None:
    before = engine.stats()["prompt_tokens"]
    assert engine.check(some_ids(tiny, 30), max_tokens=5) == 30
    with pytest.raises(quire.TooLargeError):
        engine.check([7], max_tokens=5000)
    with pytest.raises(quire.BadArgumentError):
        engine.check([7], temperature=-1.0)
    after = engine.stats()
    assert after["prompt_tokens"] == before and after["running"] == after["waiting"] == 0


def test_threads_share_an_engine(engine: quire.Engine) -> None:
    expected = [engine.generate(prompt, max_tokens=15, ignore_eos=True).ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = engine.generate(PROMPTS[i], max_tokens=15, ignore_eos=True).ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == expected


# ---- What it tells of itself


def test_stats_count(tiny: TinyModel) -> None:
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, prefix_cache=False
    ) as engine:
        before = engine.stats()
        assert before["steps"] == 0 and before["pages_in_use"] == 0
        assert before["pages_total"] == before["pages_free"] > 0
        # 3 layers of 2 heads of 16 floats, keys and values
        assert before["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4 and before["page_size"] == 16
        engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
        assert engine.stats()["running"] == 0
        after = engine.stats()
        assert (
            after["prompt_tokens"] == 3
            and after["completion_tokens"] == 4
            and after["cached_tokens"] == 0
        )
        assert (
            after["steps"] >= 4
            and after["preemptions"] == 0
            and after["pages_free"] == after["pages_total"]
        )


def test_info(engine: quire.Engine, tiny: TinyModel) -> None:
    info = engine.info
    assert info.architecture == "LlamaForCausalLM" and info.vocab_size == tiny.vocab_size
    assert info.eos_token_ids == (tiny.eos,) and info.bos_token_id == 0
    assert info.parameter_count == sum(array.size for array in tiny.weights.values())
    assert info.layers == (quire.LayerSpec(6, 2, 16, 16, "float32"),) * 3
    assert info.rope["theta"] == 10000.0 and info.rope["scaling"] == "none"
    assert info.kernel_path == quire.kernel_paths()[0] and info.numa == "off"


def test_nodes_change_no_answer_and_no_plan(engine: quire.Engine, tiny: TinyModel) -> None:
    options: Any = dict(dtype="float32", threads=2, page_size=16)
    with quire.Engine(tiny.directory, numa="auto", **options) as placed:
        # One node says why; several are named.
        assert placed.info.numa.startswith(("off: ", "2 nodes: node "))
        assert placed.generate("The", max_tokens=9).ids == engine.generate("The", max_tokens=9).ids
    plans = [
        quire.Engine.plan_memory(tiny.directory, numa=numa, **options) for numa in ("off", "auto")
    ]
    assert plans[0].weight_bytes == plans[1].weight_bytes
    assert plans[0].total_bytes == plans[1].total_bytes


def test_kv_bytes_bound_the_pages(tiny: TinyModel) -> None:
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, kv_bytes=1 << 20
    ) as engine:
        stats = engine.stats()
        assert stats["pages_total"] <= (1 << 20) // (768 * 16) + 1
        assert stats["kv_bytes"] <= (1 << 20) + 768 * 16


# ---- Errors


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([-1], {}),
        ([10**6], {}),
        ([2**40], {}),
        ([5], {"max_tokens": -1}),
        ([5], {"temperature": -1.0}),
        ([5], {"temperature": float("nan")}),
        ([5], {"top_p": 0.0}),
        ([5], {"top_p": 1.5}),
        ([5], {"top_k": -1}),
        ([5], {"min_p": 2.0}),
        ([5], {"seed": -1}),
        ([5], {"seed": 2**64}),
        ([5], {"logit_bias": {-1: 1.0}}),
        ([5], {"logit_bias": {10**6: 1.0}}),
        ([5], {"repetition_penalty": 0.0}),
        ([5], {"stop": ""}),
        ([5], {"temperature": "hot"}),
    ],
    ids=str,
)
def test_prompts_and_options_out_of_range(
    engine: quire.Engine, prompt: list[int], options: dict[str, Any]
) -> None:
    before = engine.stats()
    with pytest.raises(quire.BadArgumentError):
        engine.generate([prompt], **options)
    with pytest.raises(quire.BadArgumentError):
        engine.generate(["fine", np.array(prompt, np.int64)], **options)
    assert engine.stats() | {"steps": 0} == before | {"steps": 0}


def test_an_unknown_option_is_a_type_error(engine: quire.Engine) -> None:
    with pytest.raises(TypeError, match="'temprature'.*temperature"):
        engine.generate("x", temprature=1.0)  # type: ignore[call-arg]


def test_what_can_never_fit_is_too_large(engine: quire.Engine, tiny: TinyModel) -> None:
    with pytest.raises(quire.TooLargeError):
        engine.generate([5] * 200, max_tokens=100)
    result = engine.generate(
        [5] * 200, ignore_eos=True
    )  # without a number: what is left of 256 positions
    assert len(result.ids) == 56 and result.finish_reason == "length"


def test_a_missing_folder_and_missing_files_are_named(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(quire.NotFoundError, match="no_such"):
        quire.Engine(tmp_path / "no_such")
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name
        shutil.copytree(tiny.directory, folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=name.split(".")[0]):
            quire.Engine(folder)


def test_damaged_files_are_named(tiny: TinyModel, tmp_path: Path) -> None:
    for name, damage in [
        ("config.json", lambda data: data[:50]),
        ("model.safetensors", lambda data: data[:5]),
        ("model.safetensors", lambda data: data[:-100]),
        ("model.safetensors", lambda data: b"\xff" * 8 + data[8:]),
    ]:
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny.directory, folder)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        with pytest.raises(quire.QuireError, match=name) as caught:
            quire.Engine(folder)
        assert caught.value.code in ("Corrupt", "BadArgument", "TooLarge")


def test_an_architecture_that_is_not_there_is_named(tiny: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.directory, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["AbacusForCausalLM"]
    config["model_type"] = "abacus"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(quire.QuireError, match="AbacusForCausalLM"):
        quire.Engine(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"threads": -1},
        {"page_size": -1},
        {"prefill_chunk": 0},
        {"kernel_path": "abacus"},
        {"numa": "both"},
        {"kv_ram_bytes": -1},
        {"kv_ram_bytes": "1G"},
    ],
    ids=str,
)
def test_engine_options_out_of_range(tiny: TinyModel, options: dict[str, Any]) -> None:
    with pytest.raises(quire.BadArgumentError):
        quire.Engine(tiny.directory, **options)


def test_a_model_without_tokenizer_takes_and_gives_ids(
    tiny: TinyModel, engine: quire.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.directory, folder)
    (folder / "tokenizer.json").unlink()
    with quire.Engine(folder, dtype="float32", threads=1) as bare:
        result = bare.generate([5, 6], max_tokens=7, ignore_eos=True)
        assert (
            result.text is None
            and result.ids == engine.generate([5, 6], max_tokens=7, ignore_eos=True).ids
        )
        with pytest.raises(quire.NotFoundError, match="tokenizer.json"):
            bare.generate("text")
        with pytest.raises(quire.BadArgumentError, match="tokenizer"):
            bare.generate([5], stop="x")


def test_a_closed_engine_says_so(tiny: TinyModel) -> None:
    engine = quire.Engine(tiny.directory, dtype="float32", threads=1, page_size=16)
    # Longer than any machine needs until the engine is closed.
    stream = engine.stream("The", max_tokens=1_000_000, window=64, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(quire.ClosedError):
        engine.generate("x")
    with pytest.raises(quire.QuireError):
        list(stream)


# ---- The embedded model


@pytest.fixture(scope="module")
def smollm(embedded_model: str) -> quire.Engine:
    return quire.Engine(embedded_model, dtype="float32")


def test_the_embedded_model_knows_the_capital_of_france(smollm: quire.Engine) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    result = smollm.generate(question, max_tokens=30)
    assert "Paris" in result.text and result.finish_reason == "stop"


def test_the_embedded_model_is_exact(smollm: quire.Engine) -> None:
    prompts = ["Once upon a time", "The three primary colours are"]
    together = smollm.generate(prompts, max_tokens=8, ignore_eos=True)
    for prompt, result in zip(prompts, together):
        ids = smollm.tokenizer.encode(prompt)
        logits = smollm.logits(ids + result.ids[:-1])[len(ids) - 1 :]
        assert result.ids == logits.argmax(-1).tolist()
        assert (
            np.abs(np.array(result.logprobs) - log_softmax(logits)[np.arange(8), result.ids]).max()
            < 1e-4
        )


def test_times_of_a_request_are_parts_of_its_time(engine: quire.Engine) -> None:
    begin = time.monotonic()
    usage = engine.generate(range(3, 60), max_tokens=5, ignore_eos=True).usage
    total = usage.queue_seconds + usage.prompt_seconds + usage.decode_seconds
    assert 0 < total <= time.monotonic() - begin
    assert min(usage.queue_seconds, usage.prompt_seconds, usage.decode_seconds) > 0
    assert usage.steps == 3 + 4  # 57 tokens by 24


def test_a_stream_that_keeps_nothing_has_the_same_pieces(engine: quire.Engine) -> None:
    options: Any = {"n": 2, "max_tokens": 20, "logprobs": 2, "temperature": 1.0, "seed": 3}
    found = []
    for keep in (True, False):
        stream = engine.stream("A quire", keep=keep, **options)
        samples = [quire.Sample(text="", logprobs=[], top_logprobs=[]) for _ in range(2)]
        for piece in stream:
            sample = samples[piece.sample]
            sample.ids += piece.ids
            sample.text += piece
            sample.logprobs += piece.logprobs
            sample.top_logprobs += piece.top_logprobs
            sample.finish_reason = piece.finish_reason or sample.finish_reason
        result = stream.result
        found.append((samples, result.usage.completion_tokens))
        if keep:
            assert result.samples == samples
        else:
            kept = [(s.ids, s.text, s.logprobs, s.top_logprobs) for s in result.samples]
            assert kept == [([], "", [], [])] * 2
            assert [s.finish_reason for s in result.samples] == ["length", "length"]
    assert found[0] == found[1] and found[0][1] == 40
