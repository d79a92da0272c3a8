"""Tokenizer, chat template, detokenising piece by piece, stop strings."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest
import quire
import tokenizers
from quire.chat_template import ChatTemplate
from quire.text import Detokenizer, StopStrings, Tokenizer
from tiny_model import CHAT_TEMPLATE, TinyModel
from tokenizers import decoders, models

USER = {"role": "user", "content": "Hi <b>&\"'"}


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModel) -> Tokenizer:
    return Tokenizer(tiny.directory)


def byte_fallback_tokenizer(directory: Path) -> Tokenizer:
    """As of Llama 2: word pieces with a space mark, bytes for the rest, the first space dropped."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("\u2581Hello", "\u2581world", "lo", "\u2581", "!"):
        vocab[word] = len(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


# ---- Tokenizer


def test_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    for text in ("", "Hello", "  two  spaces\n\ttab", "你好 🙂 naïve", "\x00\x07", "x" * 5000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_text_are_one_id_each_and_do_not_print(
    tokenizer: Tokenizer, tiny: TinyModel
) -> None:
    ids = tokenizer.encode("<|im_end|>")
    assert ids == [tiny.eos]
    assert tokenizer.decode(ids) == ""
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_end|>"


def test_a_lone_surrogate_is_a_bad_argument(tokenizer: Tokenizer) -> None:
    with pytest.raises(quire.BadArgumentError, match="index 2"):
        tokenizer.encode("ab\udc80")


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["x"], [None]], ids=repr)
def test_what_is_no_id_is_no_fault_of_the_file(tokenizer: Tokenizer, ids: list[Any]) -> None:
    """It was told as a tokenizer.json that is damaged."""
    with pytest.raises(quire.BadArgumentError, match="a token id is an integer from 0 to"):
        tokenizer.decode(ids)
    with pytest.raises(quire.BadArgumentError, match="the text must be a text, not "):
        tokenizer.encode(ids[0] if not isinstance(ids[0], str) else ids)  # type: ignore[arg-type]


def test_bytes_of_one_id(tokenizer: Tokenizer, tiny: TinyModel, tmp_path: Path) -> None:
    for each in (tokenizer, byte_fallback_tokenizer(tmp_path)):
        special = set(each.special_tokens)
        for id, data in enumerate(each.token_bytes()):
            assert id in special or each.bytes_of(id) == data
        assert each.bytes_of(each.vocab_size) is None
    assert tokenizer.bytes_of(tiny.eos) == b"<|im_end|>"
    words = byte_fallback_tokenizer(tmp_path)
    assert [words.bytes_of(words._tokenizer.token_to_id(w)) for w in ("\u2581Hello", "<0xE4>")] == [
        b" Hello",
        b"\xe4",
    ]


def test_truncation_and_padding_of_the_file_are_ignored(tiny: TinyModel, tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(tiny.directory / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("one") != [] and len(tokenizer.encode("one")) < 9
    assert len(tokenizer.encode("a long text of many words")) > 3


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(quire.NotFoundError, match="tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(quire.CorruptError, match="tokenizer.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\xff"])
def test_a_broken_tokenizer_config_is_named(tiny: TinyModel, tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(quire.CorruptError, match="tokenizer_config.json"):
        Tokenizer(tmp_path)


# ---- Chat template


def test_a_chat_is_rendered_and_waits_for_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([USER])
    text = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_images_are_refused_by_name(tiny: TinyModel, kind: str) -> None:
    """The template of a model that knows images has a mark for them: the answer was one to that."""
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: "cat.png"}]
    with (
        quire.Engine(tiny.directory, kv_bytes=1 << 20) as engine,
        pytest.raises(quire.BadArgumentError, match=f'message 0, part 1 has the type "{kind}"'),
    ):
        engine.chat([{"role": "user", "content": content}], max_tokens=1)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    model = TinyModel(tmp_path, chat=False)
    with pytest.raises(quire.BadArgumentError, match="no chat template"):
        Tokenizer(model.directory).encode_chat([USER])


@pytest.mark.parametrize("form", ["text", "named", "file"])
def test_the_template_is_found_in_each_place(tiny: TinyModel, tmp_path: Path, form: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.directory / "tokenizer.json").read_bytes())
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        config: dict[str, object] = {"chat_template": "not this one"}
    elif form == "named":
        named = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": CHAT_TEMPLATE},
        ]
        config = {"chat_template": named}
    else:
        config = {"chat_template": CHAT_TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = Tokenizer(tmp_path).chat_template
    assert template is not None and template.source == CHAT_TEMPLATE


def test_special_tokens_are_variables_of_the_template(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.directory / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "old", "unk_token": "U"})
    )
    config = {
        "bos_token": "B",
        "eos_token": {"content": "E", "lstrip": False},
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = Tokenizer(tmp_path).chat_template
    assert template is not None and template.render([]) == "BEUFalse"


def test_tojson_does_not_escape_html_or_unicode() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}|{{ messages | tojson(indent=1) }}")
    message = {"role": "user", "content": "<é>"}
    assert template.render([message]) == json.dumps(message, ensure_ascii=False) + "|" + json.dumps(
        [message], ensure_ascii=False, indent=1
    )


def test_blocks_leave_no_blank_lines() -> None:
    assert ChatTemplate("  {% if true %}\nx\n  {% endif %}\ny").render([]) == "x\ny"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"content": "a"}, {"content": "b"}]) == "a"


def test_strftime_now_gives_the_date() -> None:
    before = datetime.date.today().isoformat()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert before <= text <= datetime.date.today().isoformat()


def test_raise_exception_becomes_a_bad_argument_with_its_message() -> None:
    with pytest.raises(quire.BadArgumentError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(quire.BadArgumentError):
        text = ChatTemplate(source).render([USER])
        assert text == "not reached"


def test_a_template_that_is_none_is_corrupt() -> None:
    with pytest.raises(quire.CorruptError):
        ChatTemplate("{% for %}")


# ---- Detokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.put([id]) for id in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte."""
    alphabet = _byte_alphabet()
    return [tokenizer._tokenizer.token_to_id(alphabet[byte]) for byte in data]


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }


def test_no_piece_has_part_of_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve 你好 🙂👩‍👩‍👧 x"
    found = pieces(tokenizer, byte_ids(tokenizer, text.encode()))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)
    assert found[-1] == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_never_comes_is_a_replacement_at_the_end_only(
    tokenizer: Tokenizer, cut: int
) -> None:
    found = pieces(tokenizer, byte_ids(tokenizer, b"ok " + "🙂".encode()[:cut]))
    assert "".join(found[:-1]) == "ok "
    assert found[-1] == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(tokenizer: Tokenizer) -> None:
    found = pieces(tokenizer, byte_ids(tokenizer, b"a\xff\xffb"))
    assert "".join(found) == "a\ufffd\ufffdb"
    assert found[-1] == ""


def test_a_real_replacement_character_is_kept(tokenizer: Tokenizer) -> None:
    assert (
        "".join(pieces(tokenizer, byte_ids(tokenizer, "a\ufffdb\ufffd".encode())))
        == "a\ufffdb\ufffd"
    )


def test_endless_garbage_flows_and_then_text_is_whole_again(tokenizer: Tokenizer) -> None:
    data = b"\xff" * 1000 + "你好".encode() + b"\x80" * 200 + "🙂.".encode()
    found = pieces(tokenizer, byte_ids(tokenizer, data))
    assert "".join(found) == data.decode("utf-8", "replace")
    assert len("".join(found[:500])) > 490


@pytest.mark.parametrize("seed", range(20))
def test_pieces_joined_are_the_text_of_all_ids(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    if seed % 2:  # any ids: special ones, halves of characters
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(300)]
    else:  # any bytes, more of them the parts of characters
        ids = byte_ids(
            tokenizer,
            bytes(rng.choice(b"a \xe4\xbd\xa0\xf0\x9f\x99\x82\xff\xc3\xa9") for _ in range(300)),
        )
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("data", [b"plain text. " * 100, b"\xff" * 1000], ids=["text", "garbage"])
def test_the_work_for_a_token_does_not_grow_with_the_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    lengths: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: lengths.append(len(ids)) or decode(ids))
    pieces(tokenizer, byte_ids(tokenizer, data))
    assert len(lengths) > len(data) and max(lengths) <= 64


def test_the_space_between_words_is_kept(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer(tmp_path)
    hello, world, mark = (
        tokenizer._tokenizer.token_to_id(token) for token in ("\u2581Hello", "\u2581world", "!")
    )
    assert pieces(tokenizer, [hello, world, mark]) == ["Hello", " world", "!", ""]
    after_prompt = Detokenizer(tokenizer, [hello])
    assert after_prompt.put([world]) == " world"


def test_byte_fallback_waits_for_whole_characters(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer(tmp_path)
    ids = [byte + 1 for byte in "你🙂é".encode()]
    found = pieces(tokenizer, ids)
    assert [piece for piece in found if piece] == ["你", "🙂", "é"]


# ---- Stop strings


def run_stop(stops: list[str], text_pieces: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    text = "".join(finder.put(piece) for piece in text_pieces)
    return (text if finder.stopped else text + finder.finish()), finder.stopped


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN two", "one EN two"),
        (["END"], "one EN", "one EN"),
        (["aab"], "aaab", "a"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["bc", "abc"], "xabcd", "x"),
        (["\n\n"], "a\nb\n\n\nc", "a\nb"),
        (["好"], "你好", "你"),
        ([], "all of it", "all of it"),
    ],
)
def test_text_is_cut_before_the_match_however_it_comes(
    stops: list[str], text: str, expected: str
) -> None:
    for step in range(1, len(text) + 1):
        found, stopped = run_stop(stops, [text[i : i + step] for i in range(0, len(text), step)])
        assert found == expected, f"pieces of {step}"
        assert stopped == (expected != text)


def test_nothing_that_could_be_a_match_is_shown_early() -> None:
    finder = StopStrings(["<end>"])
    assert finder.put("a <e") == "a "
    assert finder.put("n") == ""
    assert finder.put("x") == "<enx"
    assert finder.put("<end>b") == ""
    assert finder.put("more") == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(quire.BadArgumentError):
        StopStrings(["", "x"])


def test_the_variables_of_a_template_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chat parsed its template again for them, which took 14 ms for one of 3 400
    characters."""
    template = ChatTemplate("{{ messages }}{{ tools }}")
    parsed: list[str] = []
    parse = template._environment.parse
    monkeypatch.setattr(
        template._environment, "parse", lambda source: parsed.append(source) or parse(source)
    )
    template.check_variables(())
    assert parsed == []
    for _ in range(3):
        template.check_variables(("tools",))
    assert len(parsed) == 1
    with pytest.raises(quire.BadArgumentError, match="has no variable 'messages'; it has tools"):
        template.check_variables(("messages",))
