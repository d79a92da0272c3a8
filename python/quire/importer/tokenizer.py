"""From the vocabulary of a GGUF file to a Hugging Face tokenizer: tokenizer.json,
tokenizer_config.json, templates.

GGUF keeps the tokens, their types, and the merges or scores; how text is cut before merging is only
named (tokenizer.ggml.pre). A wrong cut gives other ids for the same text without any error, so an
unknown name is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .gguf_reader import GgufFile

MAX_TOKENS = 2_000_000
MAX_MERGES = 4_000_000
# Characters of all pieces that merges make, where merges are derived from scores. Real vocabularies
# have less than a million merges, of pieces of some ten characters.
MAX_MERGED_CHARACTERS = 32 << 20
# Longest piece that merges are derived for: the work per piece is quadratic in its length.
# SentencePiece's own default limit is 16 characters.
_PIECE_LENGTH_MAX = 512

_SPACE = "\u2581"  # SentencePiece writes a space as this
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_TEMPLATE_KEY = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary cuts text. Without `pattern` it is GPT-2's, which ByteLevel
    itself knows."""

    pattern: str = ""
    more: tuple[str, ...] = ()  # what is left is cut by these, one after the other
    single_digits: bool = False  # cut each digit off before anything else
    nfc: bool = False
    whole_words: bool = False  # a piece that is a token is not merged
    adds_bos: bool = False


# Words of tekken: small letters behind capitals, at least one of either; marks count as letters.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}{many}{_SMALL}{few}|"
    for many, few in (("*", "+"), ("+", "*"))
)

# Words of o200k: those, with what English hangs on them.
_O200K_WORDS = _TEKKEN_WORDS.replace("|", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")

# DeepSeek's first vocabulary: letters of two cases, as far as it knows them, and what stands beside
# them, by their code points.
_DEEPSEEK_LETTERS = """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386
    388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd
    1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d
    1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3
    1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128
    212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee
    2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17
    ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
    118a0-118df 1e900-1e943
""".split()
_DEEPSEEK_SIGNS = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002".split()
_DEEPSEEK_CJK = "4e00-9fa5 800-4e00 ac00-d7ff".split()


def _code_points(ranges: list[str]) -> str:
    """A class of characters by their numbers: [A-Z] of 41-5a."""

    def one(item: str) -> str:
        return "-".join(rf"\x{{{end}}}" for end in item.split("-"))

    return f"[{''.join(map(one, ranges))}]"


_LLAMA3 = _Split(pattern=_LETTERS + r"\p{N}{1,3}" + _REST, whole_words=True, adds_bos=True)
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "starcoder": _Split(single_digits=True),
    "mpt": _Split(nfc=True),  # of GPT-NeoX
    "olmo": _Split(nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _Split(pattern=_LETTERS + r"\p{N}{1,3}" + _REST),
    "gpt-4o": _Split(
        pattern=_O200K_WORDS + r"\p{N}{1,3}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    ),
    "qwen2": _Split(pattern=_LETTERS + r"\p{N}" + _REST, nfc=True),
    "deepseek-r1-qwen": _Split(pattern=_LETTERS + r"\p{N}" + _REST),
    "deepseek-llm": _Split(
        pattern=r"[\r\n]",
        more=(
            rf"\s?{_code_points(_DEEPSEEK_LETTERS)}+",
            rf"\s?{_code_points(_DEEPSEEK_SIGNS)}+",
            r"\s+$",
            rf"{_code_points(_DEEPSEEK_CJK)}+",
            r"\p{N}",
        ),
    ),
    "deepseek-coder": _Split(
        pattern=r"[\r\n]",
        more=(r"\s?\p{L}+", r"\s?\p{P}+", rf"{_code_points(_DEEPSEEK_CJK)}+", r"\p{N}"),
    ),
    "deepseek-v3": _Split(
        pattern=r"\p{N}{1,3}",
        more=(
            rf"{_code_points(['4e00-9fa5', '3040-30ff'])}+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    "tekken": _Split(
        pattern=_TEKKEN_WORDS + r"\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
        whole_words=True,
        adds_bos=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class ImportedTokenizer:
    tokenizer: Tokenizer
    config: dict[str, Any]
    templates: dict[str, str]  # named chat templates beside the default one


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[TokenType]

    def ids(self) -> dict[str, int]:
        """What the merge model knows. Unused ids only fill the embedding matrix; they stand for no
        text."""
        return {
            t: i
            for i, (t, kind) in enumerate(zip(self.tokens, self.types))
            if kind != TokenType.UNUSED
        }

    def added(self, drops_spaces: bool) -> list[AddedToken]:
        """Tokens that are found in the text before anything else. `drops_spaces`: as Phi-3's, which
        take the spaces behind them with them."""
        return [
            AddedToken(
                text,
                special=kind == TokenType.CONTROL,
                normalized=False,
                rstrip=drops_spaces and text not in _PHI3_KEEPS_SPACES,
            )
            for text, kind in zip(self.tokens, self.types)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]


def build_tokenizer(file: GgufFile, vocab_size: int) -> ImportedTokenizer:
    metadata = file.metadata
    model = metadata.text("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(file, vocab_size, sentencepiece=model == "llama")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocabulary), True
    else:
        raise metadata.error(
            "tokenizer.ggml.model",
            f'"{model}" is not one of gpt2 (byte-level BPE), llama (SentencePiece)',
        )
    is_phi3 = metadata.text("general.architecture") == "phi3"
    added = vocabulary.added(drops_spaces=is_phi3 and model == "llama")
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    config = _config(file, vocabulary, adds_bos)
    _wrap(file, tokenizer, config)
    return ImportedTokenizer(tokenizer, config, _named_templates(file))


def _read_vocabulary(file: GgufFile, vocab_size: int, sentencepiece: bool) -> _Vocabulary:
    metadata, key = file.metadata, "tokenizer.ggml.tokens"
    tokens = metadata.texts(key)
    if not 0 < len(tokens) <= min(vocab_size, MAX_TOKENS):
        raise metadata.error(
            key,
            f"has {len(tokens)} tokens for an embedding of {vocab_size} rows "
            f"(and at most {MAX_TOKENS})",
        )
    types = _read_types(file, len(tokens))
    if sentencepiece:
        # User-defined pieces are found in the raw text, where a space is a space.
        tokens = [
            text.replace(_SPACE, " ") if kind == TokenType.USER_DEFINED else text
            for text, kind in zip(tokens, types)
        ]
    if len(set(tokens)) != len(tokens):
        raise metadata.error(key, "holds the same token twice")
    return _Vocabulary(tokens, types)


def _read_types(file: GgufFile, token_count: int) -> list[TokenType]:
    metadata, key = file.metadata, "tokenizer.ggml.token_type"
    if key not in metadata:
        types = [TokenType.NORMAL] * token_count
        for name in ("bos", "eos", "eot", "eom", "padding"):
            index = _special_id(file, name, token_count)
            if index is not None:
                types[index] = TokenType.CONTROL
        return types
    numbers = metadata.numbers(key).tolist()
    if len(numbers) != token_count:
        raise metadata.error(key, f"has {len(numbers)} entries for {token_count} tokens")
    try:
        return [TokenType(number) for number in numbers]
    except ValueError as error:
        raise metadata.error(key, str(error)) from None


def _special_id(file: GgufFile, name: str, token_count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.metadata.integer(key, 0, token_count - 1) if key in file.metadata else None


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    metadata, key = file.metadata, "tokenizer.ggml.pre"
    name = metadata.text(key)
    split = _SPLITS.get(name)
    if split is None:
        raise metadata.error(
            key,
            f'"{name}" is not one of {", ".join(_SPLITS)}; with another way to cut text the ids '
            "would be wrong",
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_read_merges(file, vocabulary),
            ignore_merges=split.whole_words,
        )
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for pattern in (split.pattern, *split.more):
        if pattern:
            steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _read_merges(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    metadata, key = file.metadata, "tokenizer.ggml.merges"
    lines = metadata.texts(key)
    if len(lines) > MAX_MERGES:
        raise metadata.error(key, f"has {len(lines)} entries; the limit is {MAX_MERGES}")
    known = vocabulary.ids()
    merges = []
    for index, line in enumerate(lines):
        left, space, right = line.partition(" ")
        if not space or left not in known or right not in known or left + right not in known:
            raise metadata.error(
                key, f"entry {index}, {line!r}, does not join two tokens into a third"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    metadata = file.metadata
    key = "tokenizer.ggml.precompiled_charsmap"
    if key in metadata:
        raise metadata.error(
            key, "is not expected in a SentencePiece BPE vocabulary of the llama kind"
        )
    if metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", default=False):
        raise metadata.error(
            "tokenizer.ggml.remove_extra_whitespaces", "is set; such a vocabulary is not imported"
        )
    scores = metadata.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(vocabulary.tokens):
        raise metadata.error(
            "tokenizer.ggml.scores",
            f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens",
        )
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", default=True)
    # Converters of Hugging Face vocabularies write the merges beside the scores, or beside numbers
    # that are all the same and say nothing.
    has_scores = "tokenizer.ggml.merges" not in metadata or len(set(scores)) > 1
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_merges_from_scores(file, vocabulary, scores)
            if has_scores
            else _read_merges(file, vocabulary),
            unk_token=_unknown_token(file, vocabulary),
            fuse_unk=True,
            byte_fallback=_has_byte_fallback(file, vocabulary),
        )
    )
    replace = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*replace, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _has_byte_fallback(file: GgufFile, vocabulary: _Vocabulary) -> bool:
    """All 256 byte tokens or none: with a part of them some text would have no ids."""
    values = set()
    for text, kind in zip(vocabulary.tokens, vocabulary.types):
        if kind != TokenType.BYTE:
            continue
        match = _BYTE_TOKEN.fullmatch(text)
        if match is None:
            raise file.metadata.error(
                "tokenizer.ggml.tokens", f"the byte token {text!r} is not of the form <0x00>"
            )
        values.add(match[1])
    if len(values) not in (0, 256):
        raise file.metadata.error(
            "tokenizer.ggml.tokens", f"holds {len(values)} byte tokens, expected 0 or 256"
        )
    return bool(values)


def _unknown_token(file: GgufFile, vocabulary: _Vocabulary) -> str | None:
    index = _special_id(file, "unknown", len(vocabulary.tokens))
    if index is None:
        index = next(
            (i for i, kind in enumerate(vocabulary.types) if kind == TokenType.UNKNOWN), None
        )
    return None if index is None else vocabulary.tokens[index]


def _merges_from_scores(
    file: GgufFile, vocabulary: _Vocabulary, scores: list[float]
) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the highest score. As a list of
    merges: every way to cut a piece into two pieces, the best pieces first. Only normal pieces take
    part, as control tokens stand for no text. Pieces of Gemma are in the order of their merges,
    whatever scores its files give them; tokenizer.json of Gemma knows no other order."""
    if file.metadata.text("general.architecture").startswith("gemma"):
        scores = [-float(index) for index in range(len(scores))]
    score_of = {
        text: scores[index]
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types))
        if kind == TokenType.NORMAL
    }
    ids = {text: index for index, text in enumerate(vocabulary.tokens)}
    merges: list[tuple[float, int, int]] = []  # ids, as the strings of all cuts take gigabytes
    characters = 0
    for piece, score in score_of.items():
        if len(piece) > _PIECE_LENGTH_MAX:
            raise file.metadata.error(
                "tokenizer.ggml.tokens",
                f"a piece has {len(piece)} characters; the limit is {_PIECE_LENGTH_MAX}",
            )
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        before = len(merges)
        merges += [
            (-score, ids[left], ids[right])
            for left, right in cuts
            if left in score_of and right in score_of
        ]
        characters += len(piece) * (len(merges) - before)
        if len(merges) > MAX_MERGES or characters > MAX_MERGED_CHARACTERS:
            raise file.metadata.error(
                "tokenizer.ggml.tokens",
                f"its pieces join in too many ways; the limits are {MAX_MERGES} merges and "
                f"{MAX_MERGED_CHARACTERS} characters of what they make",
            )
    merges.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def _config(file: GgufFile, vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any]:
    metadata = file.metadata
    arch = metadata.text("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.integer(f"{arch}.context_length", 1, 1 << 31),
        "clean_up_tokenization_spaces": False,
    }
    for name, field in (
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
    ):
        index = _special_id(file, name, len(vocabulary.tokens))
        if index is not None:
            config[field] = vocabulary.tokens[index]
    for name, default in (("bos", adds_bos and "bos_token" in config), ("eos", False)):
        adds = metadata.boolean(f"tokenizer.ggml.add_{name}_token", default=default)
        if adds and f"{name}_token" not in config:
            raise metadata.error(
                f"tokenizer.ggml.add_{name}_token", f"is set, but there is no {name}_token_id"
            )
        config[f"add_{name}_token"] = adds
    if _TEMPLATE_KEY in metadata:
        config["chat_template"] = metadata.text(_TEMPLATE_KEY)
    return config


def _wrap(file: GgufFile, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Puts bos in front and eos behind, where the model expects them."""
    names = ["", ""]
    ids: dict[str, int] = {}
    for place, end in enumerate(("bos", "eos")):
        if not config[f"add_{end}_token"]:
            continue
        name = names[place] = config[f"{end}_token"]
        index = tokenizer.token_to_id(name)
        # In the template "$A" is the text, and what follows a colon is a number.
        if not name or ":" in name or name.startswith("$") or index is None:
            raise file.metadata.error(
                f"tokenizer.ggml.{end}_token_id",
                f"the token {name[:200]!r} cannot stand around a text: it is empty or unused, or "
                'its name holds ":" or begins with "$"',
            )
        ids[name] = index
    if not ids:
        return
    single, second = ([names[0], f"${part}", names[1]] for part in "AB")
    in_pair = [
        [f"{item}:{number}" for item in part if item]
        for number, part in enumerate((single, second))
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[item for item in single if item],
        pair=in_pair[0] + in_pair[1],
        special_tokens=list(ids.items()),
    )


def _named_templates(file: GgufFile) -> dict[str, str]:
    """Templates for special uses. Their names become file names, so they are plain words."""
    named = {}
    for key in file.metadata.keys():
        if not key.startswith(f"{_TEMPLATE_KEY}."):
            continue
        name = key.removeprefix(f"{_TEMPLATE_KEY}.")
        if not _TEMPLATE_NAME.fullmatch(name):
            raise file.metadata.error(key, f"{name!r} cannot be a file name")
        named[name] = file.metadata.text(key)
    return named
