"""The model's own sampling, seeds, answers that run to the room left, chats."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
from quire import _sampling
from tiny_model import Shape, TinyModel

OWN = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
CHAT = [{"role": "user", "content": "Hi"}]


def folder_with(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quire.Engine]:
    """An engine of a model that is to be sampled."""
    model = TinyModel(tmp_path_factory.mktemp("sampled"))
    folder_with(model.directory, OWN)
    with quire.Engine(model.directory, dtype="float32", threads=1) as engine:
        yield engine


# ---- generation_config.json


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({}, {}),
        ({"eos_token_id": 2}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {}),
        ({"do_sample": False, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": 0, "top_k": -1}, {"temperature": 0, "top_k": 0}),
        ({"do_sample": True, "top_p": None, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "top_k": 50.0}, {"temperature": 1.0, "top_k": 50}),
        # Not used, so of no matter.
        ({"do_sample": False, "temperature": "hot"}, {}),
    ],
)
def test_the_models_own_sampling(tmp_path: Path, config: Any, own: dict[str, Any]) -> None:
    assert _sampling.read_model_sampling(folder_with(tmp_path, config)) == own


@pytest.mark.parametrize(
    "config",
    [
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": "hot"},
        {"temperature": -1},
        {"temperature": 10**400},
        {"temperature": True},
        {"top_k": 2.5},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"do_sample": True, "temperature": float("nan")},
        {"do_sample": True, "temperature": float("inf")},
        [],
    ],
)
def test_a_value_out_of_range_names_file_and_key(tmp_path: Path, config: Any) -> None:
    with pytest.raises(quire.CorruptError, match="generation_config.json"):
        _sampling.read_model_sampling(folder_with(tmp_path, config))


def test_bytes_that_are_no_json_are_named(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"{", b"[" * 100_000):
        (tmp_path / "generation_config.json").write_bytes(content)
        with pytest.raises(quire.CorruptError, match="generation_config.json"):
            _sampling.read_model_sampling(tmp_path)


# ---- Answers


def test_the_models_own_is_the_default(sampled: quire.Engine) -> None:
    assert sampled.model_sampling == {k: v for k, v in OWN.items() if k != "do_sample"}
    found = sampled.generate("Hello", max_tokens=20, ignore_eos=True, seed=7)
    told = {k: v for k, v in OWN.items() if k != "do_sample"}
    with quire.Engine(sampled.model_dir, dtype="float32", threads=1) as other:
        expected = other.generate(
            "Hello", max_tokens=20, ignore_eos=True, seed=7, **{**told, "greedy": False}
        )
    assert found.ids == expected.ids
    assert found.ids != sampled.generate("Hello", max_tokens=20, ignore_eos=True, greedy=True).ids


def test_greedy_takes_nothing_of_the_models_own(
    sampled: quire.Engine, engine: quire.Engine
) -> None:
    """The same weights without a generation_config.json are greedy."""
    expected = engine.generate("Hello", max_tokens=20, ignore_eos=True)
    found = sampled.generate("Hello", max_tokens=20, ignore_eos=True, greedy=True)
    assert found.ids == expected.ids and found.seed is None and expected.seed is None
    # temperature=0 alone leaves the model's repetition_penalty.
    alone = sampled.generate("Hello", max_tokens=20, ignore_eos=True, temperature=0)
    same = engine.generate("Hello", max_tokens=20, ignore_eos=True, repetition_penalty=1.1)
    assert alone.ids == same.ids and alone.seed is None
    with pytest.raises(quire.BadArgumentError, match="greedy"):
        sampled.generate("Hello", greedy=True, temperature=0.5)


def test_options_that_are_none_are_not_resolved(sampled: quire.Engine) -> None:
    with pytest.raises(TypeError, match="'temprature'.*temperature"):
        sampled.resolve_sampling(temprature=1.0)  # type: ignore[call-arg]


def test_options_override_one_by_one(sampled: quire.Engine) -> None:
    found = sampled.resolve_sampling(top_p=0.5, seed=3)
    assert found == {**sampled.model_sampling, "min_p": 0.0, "top_p": 0.5, "seed": 3}
    greedy = sampled.resolve_sampling(greedy=True)
    assert greedy["temperature"] == 0 and greedy["repetition_penalty"] == 1 and greedy["seed"] == 0
    again = sampled.generate("Hello", max_tokens=20, **greedy)
    assert again == sampled.generate("Hello", max_tokens=20, greedy=True)


def test_a_seed_is_drawn_and_gives_the_answer_again(sampled: quire.Engine) -> None:
    first, second = (
        sampled.generate("Hello", max_tokens=30, ignore_eos=True) for _ in range(2)
    )
    assert first.seed is not None and first.seed != second.seed and first.ids != second.ids
    again = sampled.generate("Hello", max_tokens=30, ignore_eos=True, seed=first.seed)
    assert again.ids == first.ids and again.seed == first.seed
    assert sampled.generate("Hello", max_tokens=3, seed=2**64 - 1).seed == 2**64 - 1


def test_options_over_options() -> None:
    assert _sampling.merged({"greedy": True, "n": 2}, {"temperature": 1}) == {
        "n": 2,
        "temperature": 1,
    }
    assert _sampling.merged({"temperature": 1, "top_k": 3, "n": 2}, {"greedy": True}) == {
        "n": 2,
        "greedy": True,
    }


# ---- The room that is left


def test_an_answer_runs_to_the_end_of_the_positions(engine: quire.Engine) -> None:
    result = engine.generate([5] * 20, ignore_eos=True, max_tokens=None)
    assert len(result.ids) == 256 - 20 and result.finish_reason == "length"
    # Without any room the library says what is missing.
    with pytest.raises(quire.TooLargeError, match="positions"):
        engine.generate([5] * 256)


def test_an_answer_runs_to_the_end_of_the_pages(tiny: TinyModel) -> None:
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, kv_bytes=9216 * 16
    ) as engine:
        pages = engine.stats()["pages_total"]
        assert 3 <= pages < 16
        result = engine.generate([5] * 20, ignore_eos=True)
        assert len(result.ids) == pages * 16 - 20
        # Two samples share the one whole page of the prompt.
        two = engine.generate([5] * 20, ignore_eos=True, n=2, temperature=1.0)
        assert [len(sample.ids) for sample in two.samples] == [(pages + 1) // 2 * 16 - 20] * 2


def test_requests_without_a_limit_run_side_by_side(tiny: TinyModel) -> None:
    """No request reserves the room that it may take."""
    with quire.Engine(
        tiny.directory, dtype="float32", threads=1, page_size=16, prefix_cache=False
    ) as engine:
        results = engine.generate([[5 + i, 6, 7] for i in range(8)], ignore_eos=True)
        assert [len(result.ids) for result in results] == [253] * 8
        # Had each waited for its room, none would have been sent back to make some.
        assert engine.stats()["preemptions"] > 0


def test_a_window_ends_at_as_many_tokens_as_positions(engine: quire.Engine) -> None:
    result = engine.generate([5] * 20, ignore_eos=True, window=32, sinks=2)
    assert len(result.ids) == 256 and result.finish_reason == "length"


def test_steps_that_end_before_a_stream_is_there_are_told(
    engine: quire.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, ended = engine._submit, threading.Event()

    def submit_and_wait(*arguments: Any) -> Any:
        request = submit(*arguments)
        assert ended.wait(60)
        return request

    monkeypatch.setattr(engine, "_submit", submit_and_wait)
    monkeypatch.setattr(engine, "on_step", ended.set)
    done: list[bool] = []
    stream = engine.stream([5] * 10, max_tokens=1, on_step=lambda: done.append(True))
    list(stream)
    assert done


def test_a_long_prompt_tells_how_far_it_is(engine: quire.Engine) -> None:
    """The engine computes at most 24 tokens in a step."""
    before = engine.stats()["computed_tokens"]
    done: list[int] = []
    stream = engine.stream(
        [5] * 100,
        max_tokens=3,
        ignore_eos=True,
        on_step=lambda: done.append(engine.stats()["computed_tokens"] - before),
    )
    assert stream.prompt_tokens == 100
    next(stream)
    # Once for each step; the engine goes on meanwhile, so a call may see more than its own step.
    assert len(done) >= 5 and done == sorted(done) and done[-1] >= 100
    assert set(done) <= {24, 48, 72, 96, 100, 101, 102}
    assert len([piece for piece in stream if piece.ids]) == 2
    assert engine.stats()["computed_tokens"] - before == 102  # the last one is not fed


# ---- Chats


def test_chat_is_generate_of_messages(engine: quire.Engine) -> None:
    expected = engine.generate(CHAT, max_tokens=8)
    assert engine.chat(CHAT, max_tokens=8) == expected
    assert engine.chat(iter(CHAT), max_tokens=8) == expected  # type: ignore[arg-type]
    pieces = list(engine.stream_chat(CHAT, max_tokens=8))
    assert "".join(pieces) == expected.text and pieces[-1].result == expected


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("Hi", TypeError),
        (b"Hi", TypeError),
        (CHAT[0], TypeError),
        (None, TypeError),
        (["Hi"], ValueError),
        ([{"content": "Hi"}], ValueError),
        ([{"role": 3, "content": "Hi"}], ValueError),
        ([{"role": "user", "content": 3}], ValueError),
        ([*CHAT, "Hi"], ValueError),
        ([], ValueError),
        ([{"role": "user", "content": "\udcff"}], ValueError),
    ],
)
def test_what_is_no_chat(engine: quire.Engine, messages: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine.chat(messages)
    with pytest.raises(error):
        engine.stream_chat(messages)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"role": "user", "content": "Hi"}, TypeError),
        (b"Hi", TypeError),
        (bytearray(b"Hi"), TypeError),
        (memoryview(b"Hi"), TypeError),
        ([b"Hi"], TypeError),
        (["Hi", {"role": "user"}], TypeError),
        (5, TypeError),
        (None, TypeError),
        ([1.5], TypeError),
        ([[1.5]], TypeError),
        ("", ValueError),
        ([], ValueError),
        ([[]], ValueError),
        ([""], ValueError),
        ("\ud800", ValueError),
        ([2**31], ValueError),
        ([2**63], ValueError),
        ([-(2**70)], ValueError),
    ],
)
def test_what_is_no_prompt(engine: quire.Engine, prompt: Any, error: type[Exception]) -> None:
    before = engine.stats()["prompt_tokens"]
    with pytest.raises(error):
        engine.generate(prompt)
    assert engine.stats()["prompt_tokens"] == before


# ---- Numbers that nothing holds, texts that are none


@pytest.mark.parametrize("value", [2**63, -(2**70), 10**4000, "x", 1.5, None])
@pytest.mark.parametrize("name", ["top_k", "n", "window", "sinks", "draft_tokens"])
def test_integers_that_do_not_fit(engine: quire.Engine, name: str, value: Any) -> None:
    with pytest.raises(quire.BadArgumentError, match=name):
        engine.generate([5], **{name: value})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1.0, 10**400, "x", None]
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numbers_out_of_range(engine: quire.Engine, name: str, value: Any) -> None:
    with pytest.raises(quire.BadArgumentError, match=name):
        engine.generate([5], **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 2**63},
        {"max_tokens": -(2**65)},
        {"max_tokens": -1},
        {"logprobs": 2**64},
        {"seed": 2**64},
        {"seed": -1},
        {"seed": 10**4000},
        {"logit_bias": {2**64: 1.0}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 10**400}},
        {"logit_bias": {"x": 1.0}},
        {"stop": "\udcff"},
        {"stop": [[2**64]]},
        {"cache_salt": "\udcff"},
        {"speculate": "\udcff"},
        {"template_args": {"enable_thinking": False}},
    ],
)
def test_options_that_cannot_be_taken(engine: quire.Engine, options: dict[str, Any]) -> None:
    with pytest.raises(quire.BadArgumentError):
        engine.generate([5], **options)


@pytest.mark.parametrize("stop", [5, b"x", {"x": 1}, [None], [5], [b"x"], [["x"]]])
def test_stops_that_are_none(engine: quire.Engine, stop: Any) -> None:
    with pytest.raises(TypeError, match="stop"):
        engine.generate([5], stop=stop)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_bytes": 2**63},
        {"threads": 2**64},
        {"page_size": -(2**80)},
        {"kernel_path": "\udcff"},
        {"kv_dtype": "\udcff"},
        {"draft_model": "/\udcff"},
        {"kv_load_timeout": float("nan")},
        {"kv_load_timeout": -1.0},
    ],
)
def test_engine_options_that_cannot_be_taken(tiny: TinyModel, options: dict[str, Any]) -> None:
    with pytest.raises(quire.BadArgumentError):
        quire.Engine(tiny.directory, **options)


@pytest.mark.parametrize(
    "timeout", [float("nan"), -1.0, "x", 10**400], ids=["nan", "negative", "text", "huge"]
)
def test_timeouts_that_cannot_be_waited(tmp_path: Path, timeout: Any) -> None:
    with quire.ChunkStore(tmp_path / "kv") as store:
        with pytest.raises(quire.BadArgumentError, match="timeout"):
            store.flush(timeout)
        store.flush(float("inf"))
    with pytest.raises(quire.BadArgumentError, match="redis_ttl"):
        quire.ChunkStore(redis="127.0.0.1:1", redis_ttl=timeout)


# ---- Arguments of the template


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quire.Engine]:
    """An engine of a model whose template has a variable."""
    model = TinyModel(tmp_path_factory.mktemp("thinking"), Shape(positions=64))
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    (model.directory / "chat_template.jinja").write_text(template)
    with quire.Engine(model.directory, dtype="float32", threads=1) as engine:
        yield engine


def test_template_arguments_reach_the_template(thinking: quire.Engine) -> None:
    def prompt(**arguments: Any) -> str:
        result = thinking.chat(CHAT, max_tokens=1, template_args=arguments)
        return thinking.tokenizer.decode(result.prompt_ids)

    assert prompt() == "Hi:" and prompt(enable_thinking=True) == "Hi:"
    assert prompt(enable_thinking=False) == "Hi<none>:"
    assert prompt(add_generation_prompt=False) == "Hi"


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_thinkng": False},
        {"messages": []},
        {"self": 1},
        {"enable_thinking": object()},
        {"enable_thinking": b"x"},
    ],
)
def test_template_arguments_that_say_nothing(thinking: quire.Engine, arguments: Any) -> None:
    with pytest.raises(quire.BadArgumentError):
        thinking.chat(CHAT, max_tokens=1, template_args=arguments)
    with pytest.raises(TypeError):
        thinking.chat(CHAT, max_tokens=1, template_args=[1])  # type: ignore[arg-type]
