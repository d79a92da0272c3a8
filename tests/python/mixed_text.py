"""Text that finds the places where tokenizers differ: code, digits of many kinds, scripts, emoji,
runs of white space."""

from __future__ import annotations

import random
import unicodedata

_WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or had by hot but some "
    "what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could "
    "go come did my sound no most number who over know water than call first people may down side been now find "
    "Internationalisation antidisestablishmentarianism Straße naïve café Zürich x y i n ABC McDonald iPhone qqxz"
).split()
_CODE = [
    "def f{n}(self, x: int = {n}) -> None:",
    "    return x[{n}] << {n} if x != {n} else None",
    "\tfor (size_t i = 0; i < n_{n}; ++i) {{ sum += a[i]*b[i]; }}",
    "#include <vector>  // {n}",
    "}}\r\n\r\n",
    'const auto& [key, value] = *map.find("k{n}");',
    "<div class='c{n}'>&nbsp;</div>",
    "SELECT * FROM t{n} WHERE a>={n};",
    "0x{n:x} 0b{n:b} 1e-{n} {n}.{n}f {n}_000 v{n}.{n}.{n}-rc{n}",
    "https://example.org/a?b={n}&c=%20#d",
    "/* {n} */ #!$%^&*",
]
_CONTRACTIONS = [
    "it's",
    "IT'S",
    "we'll",
    "WE'LL",
    "I'd",
    "you're",
    "they've",
    "I'm",
    "'tis",
    "don't",
    "rock 'n' roll",
    "o'clock",
]
_SCRIPTS = [
    (0xC0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x52F),
    (0x531, 0x586),
    (0x5D0, 0x5EA),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE5B),
    (0x10A0, 0x10FF),
    (0x1100, 0x11FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1E00, 0x1EFF),
    (0x2000, 0x206F),
    (0x2070, 0x20BF),
    (0x2100, 0x2BFF),
    (0xFB00, 0xFB4F),
    (0xFF01, 0xFFEE),
    (0x10300, 0x1034A),
    (0x12000, 0x12399),
    (0x1D400, 0x1D7FF),
    (0x20000, 0x2A6DF),
    (0xE0100, 0xE01EF),
]
_EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵", "❤️", "1️⃣", "🧑🏿‍🚀", "☃", "🫠"]
_SPACES = [
    " ",
    "  ",
    "   ",
    " " * 7,
    " " * 40,
    "\t",
    "\t\t ",
    "\n",
    "\n\n",
    "\n\n\n  ",
    "\r\n",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2003\u2009",
    "\u200b",
    "\u2028",
    "\x0b\x0c",
    "\x85",
    "\ufeff",
]
_DIGITS = [
    "0",
    "7",
    "12",
    "1234",
    "3.14159",
    "1,000,000",
    "2026-11-21",
    "+49 (0)30 1234567",
    "٠١٢٣",
    "१२३",
    "１２３",
    "Ⅷ",
    "x²",
    "½",
    "①②",
    "12a34b",
    "00:59:60",
    "1" * 30,
    "9 8 7",
    "-1e-308",
]
_CONTROLS = [
    "\x00",
    "\x01",
    "\x04",
    "\x1b[31m",
    "\x1d",
    "\x1f",
    "\x7f",
    "e\u0301",
    "a\u0308\u0323",
    "\u1e9b\u0323",
    "\ufffd",
    "\ud7ff",
    "\uffff",
    "\U0010ffff",
]


def mixed_text(seed: int, byte_count: int, special_tokens=()) -> str:
    """At least `byte_count` bytes of UTF-8, the same for the same seed."""
    source = random.Random(seed)
    kinds = [
        lambda: (
            " ".join(source.choices(_WORDS, k=source.randint(1, 12))) + source.choice(".,;!?… ")
        ),
        lambda: source.choice(_CODE).format(n=source.choice([0, 3, 17, 404, 65536])),
        lambda: source.choice(_CONTRACTIONS) + " ",
        lambda: source.choice(_EMOJI) * source.randint(1, 3),
        lambda: source.choice(_SPACES),
        lambda: source.choice(_SPACES),
        lambda: source.choice(_DIGITS),
        lambda: _random_script(source),
        lambda: source.choice(_CONTROLS),
    ]
    if special_tokens:
        kinds.append(lambda: source.choice(special_tokens))
    parts: list[str] = []
    size = 0
    while size < byte_count:
        parts.append(source.choice(kinds)())
        size += len(parts[-1].encode())
    return "".join(parts)


def _random_script(source: random.Random) -> str:
    low, high = source.choice(_SCRIPTS)
    characters = (chr(source.randint(low, high)) for _ in range(source.randint(1, 12)))
    # Unassigned characters are left out: their class depends on the Unicode version that a library
    # was built with.
    return "".join(c for c in characters if unicodedata.category(c) not in ("Cn", "Cs", "Co"))
