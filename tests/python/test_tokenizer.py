"""Token ids of imported tokenizers against independent ones: a byte-level BPE of this file, and
SentencePiece."""

from __future__ import annotations

import functools
import io
import json
import tracemalloc
import unicodedata

import gguf
import pytest
import regex
import sentencepiece
import tiny_gguf
from mixed_text import mixed_text
from quire.embedded import embedded_model_dir, _find_gguf
from quire.importer import tokenizer as importer_tokenizer
from quire.importer.gguf_reader import GgufError, GgufFile
from quire.importer.tokenizer import build_tokenizer
from tokenizers import Tokenizer

TEXT_BYTES = 200_000
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = [
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    CJK,
    r"\p{N}",
]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


class PlainBpe:
    """Byte-level BPE as the papers tell it: cut, spell in bytes, join the pair of lowest rank until
    none is left."""

    def __init__(self, tokens, merges, special, cuts, nfc=False, whole_words=False):
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = special
        self.cuts = [regex.compile(cut) for cut in cuts]
        self.nfc = nfc
        self.whole_words = whole_words
        self.symbols = tiny_gguf.byte_symbols()
        self.word_ids = functools.lru_cache(maxsize=None)(self._word_ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        pattern = "|".join(
            regex.escape(token) for token in sorted(self.special, key=len, reverse=True)
        )
        for part in regex.split(f"({pattern})", text):
            if part in self.special:
                ids.append(self.ids[part])
            else:
                ids += self._plain(unicodedata.normalize("NFC", part) if self.nfc else part)
        return ids

    def _plain(self, text: str) -> list[int]:
        pieces = [text]
        for cut in self.cuts:
            pieces = [piece for whole in pieces for piece in split_isolated(cut, whole)]
        return [index for piece in pieces for index in self.word_ids(piece)]

    def _word_ids(self, piece: str) -> list[int]:
        word = [self.symbols[byte] for byte in piece.encode()]
        if self.whole_words and "".join(word) in self.ids:
            return [self.ids["".join(word)]]
        word = [
            symbol for symbol in word if symbol in self.ids
        ]  # some vocabularies lack bytes that text never has
        while len(word) > 1:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in zip(word, word[1:])]
            at = ranks.index(min(ranks))
            if ranks[at] == len(self.ranks):
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        return [self.ids[symbol] for symbol in word]


def split_isolated(pattern, text: str) -> list[str]:
    """All matches and all that lies between them, in order."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def assert_same_ids(tokenizer: Tokenizer, text: str, expected: list[int]) -> None:
    actual = tokenizer.encode(text, add_special_tokens=False)
    if actual.ids == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(actual.ids + [-1], expected + [-1])) if a != b)
    begin = actual.offsets[max(at - 2, 0)][0]
    pytest.fail(
        f"ids differ at token {at}, near {text[begin : begin + 40]!r}: {actual.ids[at : at + 8]} instead of "
        f"{expected[at : at + 8]}"
    )


@pytest.fixture(scope="module")
def smollm2() -> dict:
    """The embedded vocabulary, read by the gguf package instead of our reader."""
    path, _ = _find_gguf()
    fields = gguf.GGUFReader(path).fields
    return {
        key: fields[f"tokenizer.ggml.{key}"].contents()
        for key in ("tokens", "merges", "token_type", "pre")
    }


@pytest.fixture(scope="module")
def wider(smollm2) -> dict:
    """With what tells the cuts apart: tokens of several digits, and a word that no merges lead
    to."""
    more = ["12", "123", "1234", "qqxz", "Ġqqxz"]
    assert not set(more) & set(smollm2["tokens"])
    return {
        "tokens": smollm2["tokens"] + more,
        "token_type": smollm2["token_type"] + [1] * len(more),
        "merges": smollm2["merges"] + ["1 2", "12 3", "123 4"],
    }


def special_tokens(vocabulary: dict) -> list[str]:
    return [
        token for token, kind in zip(vocabulary["tokens"], vocabulary["token_type"]) if kind == 3
    ]


def test_embedded_model_has_the_ids_of_an_independent_tokenizer(smollm2):
    assert smollm2["pre"] == "smollm"
    special = special_tokens(smollm2)
    plain = PlainBpe(smollm2["tokens"], smollm2["merges"], special, [r"\p{N}", GPT2])
    text = mixed_text(1, TEXT_BYTES, special)
    assert_same_ids(
        Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json")), text, plain.encode(text)
    )


def test_embedded_model_splits_digits_singly():
    tokenizer = Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json"))
    assert tokenizer.encode("In 2026, 1234567").tokens == ["In", "Ġ", *"2026", ",", "Ġ", *"1234567"]


def test_embedded_model_gives_text_back():
    tokenizer = Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json"))
    text = "def f(x):\n\treturn x + 12345  # naïve 日本語 😀\r\n\n   <|im_start|>it's"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "pre,cuts,options",
    [
        ("gpt-2", [GPT2], {}),
        ("mpt", [GPT2], {"nfc": True}),
        ("starcoder", [r"\p{N}", GPT2], {}),
        ("llama-bpe", [LLAMA3], {"whole_words": True}),
        ("qwen2", [QWEN2], {"nfc": True}),
        ("deepseek-r1-qwen", [QWEN2], {}),
        ("tekken", [TEKKEN], {"whole_words": True}),
        ("dbrx", [LLAMA3], {}),
        ("gpt-4o", [O200K], {}),
        ("deepseek-coder", [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"], {}),
        ("deepseek-llm", DEEPSEEK_LLM, {}),
        ("deepseek-v3", DEEPSEEK_V3, {}),
    ],
)
def test_each_way_to_cut_text(tmp_path, wider, pre, cuts, options):
    """A real vocabulary under the other cuts: the merges need not fit to find a wrong cut."""
    special = special_tokens(wider)
    plain = PlainBpe(wider["tokens"], wider["merges"], special, cuts, **options)
    text = mixed_text(2, TEXT_BYTES, special)
    write_vocabulary(
        tmp_path / "v.gguf",
        "gpt2",
        wider["tokens"],
        wider["token_type"],
        lambda writer: (writer.add_tokenizer_pre(pre), writer.add_token_merges(wider["merges"])),
    )
    imported = build_tokenizer(GgufFile(tmp_path / "v.gguf"), len(wider["tokens"]))
    assert_same_ids(imported.tokenizer, text, plain.encode(text))
    assert imported.config["add_bos_token"] is (pre in ("llama-bpe", "tekken"))


def test_cuts_are_told_apart_by_the_text(wider):
    """Guards the tests above: on this text each cut gives ids of its own."""
    text = mixed_text(2, TEXT_BYTES)
    ways = [
        ([GPT2], {}),
        ([r"\p{N}", GPT2], {}),
        ([LLAMA3], {}),
        ([LLAMA3], {"whole_words": True}),
        ([QWEN2], {}),
        ([QWEN2], {"nfc": True}),
        ([TEKKEN], {"whole_words": True}),
        ([O200K], {}),
        ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"], {}),
        (DEEPSEEK_LLM, {}),
        (DEEPSEEK_V3, {}),
    ]
    results = [
        tuple(
            PlainBpe(wider["tokens"], wider["merges"], ["<|im_end|>"], cuts, **options).encode(text)
        )
        for cuts, options in ways
    ]
    assert len(set(results)) == len(ways)


def write_vocabulary(path, model, tokens, types, change) -> None:
    """A GGUF file with a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def spm() -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE model with byte fallback, as Llama 2's, trained on text of another
    seed."""
    model = io.BytesIO()
    # Without the scripts of thousands of characters: they are what falls back to bytes later.
    text = regex.sub(r"[\0\u0900-\U0010ffff]", "", mixed_text(3, TEXT_BYTES))
    lines = [line for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=3000,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        max_sentence_length=1 << 20,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def import_spm(tmp_path, spm, change=lambda writer: None):
    count = spm.get_piece_size()
    kinds = [
        2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1
        for i in range(count)
    ]
    pieces = [spm.id_to_piece(i) for i in range(count)]
    write_vocabulary(
        tmp_path / "s.gguf",
        "llama",
        pieces,
        kinds,
        lambda writer: (
            writer.add_token_scores([spm.get_score(i) for i in range(count)]),
            writer.add_unk_token_id(0),
            change(writer),
        ),
    )
    return build_tokenizer(GgufFile(tmp_path / "s.gguf"), count)


def test_sentencepiece_vocabulary_has_the_ids_of_sentencepiece(tmp_path, spm):
    imported = import_spm(tmp_path, spm)
    # Line by line: SentencePiece takes a NUL for the end of the text.
    lines = [line.replace("\0", "") for line in mixed_text(4, TEXT_BYTES).split("\n")]
    assert any(spm.is_byte(index) for line in lines for index in spm.encode(line))
    for line in lines:
        assert_same_ids(imported.tokenizer, line, spm.encode(line))
        assert imported.tokenizer.decode(spm.encode(line)) == spm.decode(spm.encode(line))
    assert imported.tokenizer.encode("a").ids[0] == 1  # bos is added by default
    assert imported.config["add_bos_token"] is True


def test_sentencepiece_without_space_prefix(tmp_path, spm):
    """Such a tokenizer sees "▁the" where the text begins with a space: SentencePiece's "the" with
    its prefix."""
    imported = import_spm(tmp_path, spm, lambda writer: writer.add_add_space_prefix(False))
    for line in filter(None, mixed_text(5, 20_000).replace("\0", "").split("\n")):
        assert_same_ids(imported.tokenizer, " " + line, spm.encode(line))
        assert imported.tokenizer.decode(spm.encode(line)) == " " + spm.decode(spm.encode(line))


def merges_of(tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def test_merges_beside_the_scores_change_nothing(tmp_path, spm):
    """Files that were converted from a Hugging Face vocabulary have both; they were refused."""
    plain = import_spm(tmp_path, spm)
    merges = merges_of(plain.tokenizer)
    both = import_spm(tmp_path, spm, lambda writer: writer.add_token_merges(merges))
    assert merges_of(both.tokenizer) == merges
    part = import_spm(tmp_path, spm, lambda writer: writer.add_token_merges(merges[:9]))
    assert merges_of(part.tokenizer) == merges


def test_merges_beside_scores_that_are_all_the_same_are_taken(tmp_path, spm):
    merges = merges_of(import_spm(tmp_path, spm).tokenizer)

    def change(writer):
        scores = writer.kv_data[0]["tokenizer.ggml.scores"]
        scores.value = [-1000.0] * len(scores.value)
        writer.add_token_merges(merges)

    imported = import_spm(tmp_path, spm, change)
    assert merges_of(imported.tokenizer) == merges
    for line in filter(None, mixed_text(6, 5_000).replace("\0", "").split("\n")):
        assert_same_ids(imported.tokenizer, line, spm.encode(line))


def test_pieces_of_gemma_are_in_the_order_of_their_merges(tmp_path, spm):
    merges = merges_of(import_spm(tmp_path, spm).tokenizer)

    def change(writer):
        writer.kv_data[0]["general.architecture"].value = "gemma3"
        writer.add_uint32("gemma3.context_length", 1024)
        writer.kv_data[0]["tokenizer.ggml.scores"].value.reverse()

    assert merges_of(import_spm(tmp_path, spm, change).tokenizer) == merges


def import_runs(tmp_path, letters: str, longest: int):
    """A vocabulary of each letter once, twice and so on: each way to cut a piece is a merge."""
    pieces = [letter * length for letter in letters for length in range(1, longest + 1)]
    scores = [-float(index) for index in range(len(pieces))]
    write_vocabulary(
        tmp_path / "runs.gguf",
        "llama",
        pieces,
        [1] * len(pieces),
        lambda writer: (writer.add_token_scores(scores), writer.add_add_bos_token(False)),
    )
    return build_tokenizer(GgufFile(tmp_path / "runs.gguf"), len(pieces))


def test_merges_of_scores_are_bounded(tmp_path, monkeypatch):
    """A file of 3 MB took 1.1 GB."""
    assert len(merges_of(import_runs(tmp_path, "a", 64).tokenizer)) == 63 * 64 / 2
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match="runs.gguf: .*tokens.*: its pieces join in too many"):
            import_runs(tmp_path, "abcdefgh", 512)
        assert tracemalloc.get_traced_memory()[1] < 96 << 20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(importer_tokenizer, "MAX_MERGES", 63 * 32)
    assert len(merges_of(import_runs(tmp_path, "a", 64).tokenizer)) == 63 * 32
    monkeypatch.setattr(importer_tokenizer, "MAX_MERGES", 63 * 32 - 1)
    with pytest.raises(GgufError, match="its pieces join in too many ways"):
        import_runs(tmp_path, "a", 64)


def test_user_defined_pieces_are_found_in_raw_text(tmp_path, spm):
    count = spm.get_piece_size()

    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[count - 1] = 4
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[count - 1] = "\u2581\u2581::"

    imported = import_spm(tmp_path, spm, change)
    ids = imported.tokenizer.encode("the  ::the", add_special_tokens=False).ids
    assert count - 1 in ids
    assert imported.tokenizer.decode([count - 1], skip_special_tokens=False).endswith("::")


@pytest.mark.parametrize(
    "bos,eos,expected",
    [(True, True, [1, 7, 2]), (True, False, [1, 7]), (False, True, [7, 2]), (False, False, [7])],
)
def test_bos_and_eos_are_put_where_the_file_says(tmp_path, bos, eos, expected):
    tokens, merges = tiny_gguf.byte_level_vocabulary()
    write_vocabulary(
        tmp_path / "v.gguf",
        "gpt2",
        tokens,
        [3] * 3 + [1] * (len(tokens) - 3),
        lambda writer: (
            writer.add_tokenizer_pre("gpt-2"),
            writer.add_token_merges(merges),
            writer.add_add_bos_token(bos),
            writer.add_add_eos_token(eos),
        ),
    )
    imported = build_tokenizer(GgufFile(tmp_path / "v.gguf"), len(tokens))
    assert imported.tokenizer.encode(chr(4)).ids == expected
    again = Tokenizer.from_str(imported.tokenizer.to_str())
    assert again.encode(chr(4)).ids == expected
    pair = again.encode(chr(4), chr(4)).ids
    assert pair == expected + expected


def test_unused_ids_stand_for_no_text(tmp_path):
    tokens, merges = tiny_gguf.byte_level_vocabulary()
    tokens = [*tokens, "[PAD0]", "<tool>", "[PAD1]"]
    kinds = [3] * 3 + [1] * (len(tokens) - 6) + [5, 4, 5]
    write_vocabulary(
        tmp_path / "v.gguf",
        "gpt2",
        tokens,
        kinds,
        lambda writer: (
            writer.add_tokenizer_pre("llama-bpe"),
            writer.add_token_merges(merges),
            writer.add_add_bos_token(False),
        ),
    )
    tokenizer = build_tokenizer(GgufFile(tmp_path / "v.gguf"), len(tokens)).tokenizer
    assert tokenizer.encode("a<tool>").ids == [tokens.index("a"), tokens.index("<tool>")]
    assert tokenizer.token_to_id("[PAD0]") is None
    assert (
        tokenizer.decode([tokens.index("<tool>")], skip_special_tokens=True) == "<tool>"
    )  # not a special one


def test_tokenizer_json_is_complete():
    """What other readers of the folder need beside the ids."""
    saved = json.loads((embedded_model_dir() / "tokenizer.json").read_text())
    assert [step["type"] for step in saved["pre_tokenizer"]["pretokenizers"]] == [
        "Digits",
        "ByteLevel",
    ]
    assert saved["decoder"]["type"] == "ByteLevel"
    assert sum(token["special"] for token in saved["added_tokens"]) == 17
