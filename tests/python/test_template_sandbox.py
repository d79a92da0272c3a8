"""Chat templates of strangers: whatever is in them, they end in an answer or one of our errors, in
bounded time and memory. (tests/python/test_text.py has what templates are for.)"""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import pytest
from quire import errors, template_sandbox
from quire.chat_template import ChatTemplate
from quire.text import Tokenizer
from tiny_model import CHAT_TEMPLATE, TinyModel

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Why?"},
]

# In the style of those in use: namespaces, macros, loop controls, filters, tools.
LONG_TEMPLATE = """\
{%- macro turn(role, text) -%}
{{ '<|im_start|>' ~ role ~ '\\n' ~ text|trim ~ '<|im_end|>\\n' }}
{%- endmacro -%}
{%- set ns = namespace(system='', last=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set ns.system = ns.system + message.content -%}
  {%- elif message.role == 'user' -%}{%- set ns.last = loop.index0 -%}
  {%- elif message.role not in ['assistant', 'tool'] -%}
    {{ raise_exception('unknown role ' ~ message.role) }}
  {%- endif -%}
{%- endfor -%}
{{ bos_token or '' }}{{ turn('system', ns.system or 'You are helpful.') }}
{%- if tools is not none and tools|length > 0 -%}
  {{ turn('tools', tools|map('tojson')|join(', ')) }}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
  {%- if not loop.first and messages[loop.index0 - 1]['role'] == message.role %}{% continue %}
  {%- endif -%}
  {{ turn(message.role, '%s' % message.content if loop.index0 < 10 ** 5 else '') }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[None]:
    """2 GiB more than there is: what makes large values ends in a MemoryError, and not in the end
    of the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(source: str) -> str:
    with pytest.raises(errors.BadArgumentError) as caught:
        ChatTemplate(source).render(MESSAGES)
    message = str(caught.value)
    assert "MemoryError" not in message
    return message


BIG = '{% set x = "x" * 10000000 %}'
GROWTH = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        '{{ "x" * 10000000000 }}',
        "{{ [1] * 10000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        '{{ "%1000000000d"|format(1) }}',
        '{{ "x".ljust(10000000000) }}',
        '{{ "x".zfill(10000000000) }}',
        '{{ "x"|center(10000000000) }}',
        '{{ "x"|indent(10000000000, true) }}',
        '{{ ("x\\n" * 1000000)|indent(1000000) }}',
        '{{ "{:9999999999}".format(1) }}',
        '{{ "{:{w}}".format(1, w=9999999999) }}',
        '{{ "{x:9999999999}".format_map({"x": 1}) }}',
        GROWTH.replace("START", '"x"').replace("STEP", "ns.x ~ ns.x"),
        GROWTH.replace("START", '"x"').replace("STEP", "ns.x + ns.x"),
        GROWTH.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
        GROWTH.replace("START", '"x"').replace("STEP", 'ns.x.replace("x", "xx")'),
        GROWTH.replace("START", '"x"').replace("STEP", '"{0}{0}".format(ns.x)'),
        GROWTH.replace("START", "3").replace("STEP", "ns.x * ns.x"),
        BIG + "{{ ([x] * 10000)|join }}",
        BIG + "{{ ([x] * 10000)|string }}",
        BIG + "{{ ([x] * 10000)|tojson }}",
        BIG + "{{ [x] * 10000 }}",
        BIG + "{{ [x] * 10000 ~ '' }}",
        BIG + '{{ x.replace("x", x) }}',
        BIG + '{{ x|replace("", x) }}',
        BIG + '{{ x.join(["a"] * 1000) }}',
        BIG + '{{ (["a"] * 1000)|join(x) }}',
        BIG + '{{ ("{0}" * 1000).format(x) }}',
        BIG + '{{ "%s%s%s" % (x, x, x) }}',
        BIG + "{{ x.translate({120: x}) }}",
        BIG + '{{ ("\\t" * 1000).expandtabs(1000000) }}',
        BIG + "{{ x }}{{ x }}",
        "{{ [[1]]|tojson(indent=1000000000) }}",
        "{{ range(10000000000)|list }}",
        "{{ [1]|batch(10000000000)|list }}",
        "{{ [1]|slice(10000000000)|list }}",
    ],
)
def test_what_would_be_too_large_is_not_made(source: str) -> None:
    message = refusal(source)
    reasons = ("limit", "digits", "the number", "prints", "without end")
    assert any(reason in message for reason in reasons), message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        BIG + "{% for c in x %}{% for d in x %}{% endfor %}{% endfor %}",
        '{% set x = "a " * 5000000 %}{% for i in range(99999) %}{{ x|wordcount }}{% endfor %}',
        '{% set x = "a " * 5000000 %}{% for i in range(99999) %}{{ x.count("a") }}{% endfor %}',
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{{ x|sum }}{% endfor %}",
        GROWTH.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    ],
)
def test_what_would_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "WORK_MAX", 50_000)  # the same, in less time
    assert "without end" in refusal(source)


def test_what_is_slow_without_paying_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS_MAX", 0.05)
    source = "{% set x = range(9999)|list %}{% for i in range(9999) %}{{ -1 in x }}{% endfor %}"
    assert "seconds" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for c in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content[99].x.y }}",
        "{% for i in 5 %}{% endfor %}",
    ],
)
def test_a_template_that_fails_says_so(source: str) -> None:
    assert "chat template" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000,
        "{% if 1 %}" * 3000,
        "{{ 9" + "9" * 5000 + " }}",
        "x" * (2 << 20),
        "{{ \0",
    ],
    ids=["brackets", "blocks", "digits", "length", "zero"],
)
def test_a_source_that_no_compiler_takes_is_corrupt(source: str) -> None:
    with pytest.raises(errors.CorruptError, match="chat template"):
        ChatTemplate(source)


def test_a_long_chat_is_far_below_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "WORK_MAX", template_sandbox.WORK_MAX // 10)
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 100}
        for i in range(1000)
    ]
    for source in (CHAT_TEMPLATE, LONG_TEMPLATE):
        text = ChatTemplate(source).render(messages, tools=[{"name": "f"}])
        assert "message 999" in text and text.count("<|im_start|>") > 1000


LOOPS = """\
{%- for m in messages -%}
[{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.revindex0 }}
 {{ (loop.previtem or {}).role }} {{ (loop.nextitem or {}).role }} {{ loop.cycle('a', 'b') }}
 {{ loop.changed(m.role) }} {{ m.content[1:3] }} {{ m.content.split(' ')[-1] ~ (1 + 2) }}]
{%- else -%}none{%- endfor -%}
{%- for k, v in {'b': 1, 'a': 2}|dictsort if v > 1 %}{{ k }}{{ v }}{% else %}empty{% endfor -%}
{%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }};{% endfor -%}
{%- for x in nothing %}{% else %}nothing{% endfor -%}
{{ none }} {{ undefined_name }} {{ 1.5 }} {{ [1, 'a', none] }} {{ {'k': [1]} }} {{ true }}
{{ messages|map(attribute='role')|unique|join(', ') }} {{ '%s-%03d' % ('x', 7) }}
{{ '{:>8}|{}'.format('x', 1) }} {{ 'abc'|replace('b', 'xx')|upper|indent(2, true) }}
{{ 7 ** 2 % 5 }}
{%- set ns = namespace(n=0) %}
{%- for i in range(5) %}{% set ns.n = ns.n + i * 2 %}{% endfor %}{{ ns.n }}
"""


@pytest.mark.parametrize(
    "source", [CHAT_TEMPLATE, LONG_TEMPLATE, LOOPS], ids=["short", "long", "loops"]
)
def test_the_limits_change_no_text(source: str) -> None:
    """Beside jinja2's own sandbox."""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    plain.filters["tojson"] = json.dumps
    variables = {"messages": MESSAGES, "tools": [{"name": "f"}], "add_generation_prompt": True}
    expected = plain.from_string(source).render(**variables)
    assert ChatTemplate(source).render(MESSAGES, tools=[{"name": "f"}]) == expected


def test_a_message_may_hold_what_a_template_may_not_make() -> None:
    """Limits are for templates: braces, percents and large numbers in a message are text."""
    content = "{:9999999999} %1000000000d {{ x }} " + "9" * 10_000
    for source in (CHAT_TEMPLATE, LONG_TEMPLATE):
        text = ChatTemplate(source).render([{"role": "user", "content": content}])
        assert content in text


# ---- Mutants


def mutant(source: str, random: random.Random, words: list[str]) -> str:
    """One to four changes: characters flipped, parts cut, doubled, moved, or put in from
    elsewhere."""
    text = source
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(text) + 1)
        to = min(len(text), at + random.choice([1, 1, 3, 10, 50]))
        kind = random.randrange(6)
        if kind == 0:
            text = (
                text[:at] + chr(random.choice([0, 9, 34, 37, 123, 125, 0x2028, 0xD800])) + text[to:]
            )
        elif kind == 1:
            text = text[:at] + text[to:]
        elif kind == 2:
            text = text[:to] + text[at:]
        elif kind == 3:
            text = text[:at]
        elif kind == 4:
            text = text[:at] + random.choice(words) + text[at:]
        elif to > at:
            text = text[:at] + chr(ord(text[at]) ^ 1 << random.randrange(7)) + text[at + 1 :]
        if not text:
            return "{"
    return text


WORDS = [
    "{{ ", " }}", "{% for x in messages %}", "{% endfor %}", "{% if ", " %}", "{% endif %}",
    "{% set messages = ", "messages", "loop.index", "|tojson", "|join(messages)", "|length", "|list",
    "range(99999)", " * 99999", " ** 999", " ~ ", " + ", "'%9999999d' % ", ".format(", "namespace(",
    "{% macro turn(", "{% endmacro %}", "{{ loop(messages) }}", " recursive ", "{% break %}",
    "|sort(attribute='x')", "|groupby('role')", "|map('upper')", "|batch(99999)", ".__class__",
    "|attr('__init__')", "self", "caller()", "{% include 'x' %}", "{% extends messages %}",
    "{% import 'x' as y %}", "{% block a %}", "{% endblock %}", "{% filter upper %}", "cycler()",
    "joiner()", "lipsum()", "none", "true", "[", "]", "(", ")", "{", "}", "9" * 5000, "raise_exception",
]  # fmt: skip


# What Python says of "1()" and jinja2 of "\\{".
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LONG_TEMPLATE], ids=["short", "long"])
def test_mutants_work_or_give_our_errors(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "WORK_MAX", 20_000)
    generator = random.Random(1)
    outcomes = {"works": 0, "corrupt": 0, "refuses": 0}
    for number in range(400):
        text = mutant(source, generator, WORDS)
        try:
            rendered = ChatTemplate(text).render(MESSAGES, tools=[{"name": "f"}])
            assert isinstance(rendered, str)
            outcomes["works"] += 1
        except errors.CorruptError:
            outcomes["corrupt"] += 1
        except errors.BadArgumentError:
            outcomes["refuses"] += 1
        except BaseException as error:
            error.add_note(f"mutant {number}: {text!r}")
            raise
    assert min(outcomes.values()) > 5, outcomes


# ---- Tokenizer files


def garbled(value: object, generator: random.Random) -> object:
    """A JSON value with one place changed."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(sorted(value))
        kind = generator.randrange(8)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return {**value, generator.choice(["type", "x", key * 2]): value[key]}
        return {**value, key: garbled(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.9:
        at = generator.randrange(len(value))
        item = generator.choice([[], [value[at]] * 2, [garbled(value[at], generator)]])
        return [*value[:at], *item, *value[at + 1 :]]
    return generator.choice(
        [None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 1e999, 0.5, "", "x", "\0", "\ud800",
         "BPE", "Sequence", "(?:(?:a*)*)*b", "[", [], {}, [value], {"x": value}]
    )  # fmt: skip


def damaged(raw: bytes, generator: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or lost; half of the time a value changed and all else sound."""
    if generator.random() < 0.5:
        try:
            return json.dumps(garbled(json.loads(raw), generator)).encode()
        except ValueError:
            return raw[:-1]
    data = bytearray(raw)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(data))
        kind = generator.randrange(4)
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del data[at : at + generator.choice([1, 4, 40, len(data)])]
        elif kind == 2:
            data[at:at] = data[at : at + 60]
        else:
            data[at : at + 1] = generator.choice([b"9" * 30, b'"', b"{", b"\xff", b"\0", b"1e999"])
        if not data:
            break
    return bytes(data)


def test_a_panic_of_the_tokenizer_is_one_of_our_errors(tiny: TinyModel, tmp_path: Path) -> None:
    """The package subtracts the length of the prefix from that of a token without a look."""
    tokenizer = json.loads((tiny.directory / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "x" * 30
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.CorruptError, match="tokenizer.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "count"),
    [("tokenizer.json", 300), ("tokenizer_config.json", 300), ("special_tokens_map.json", 100)],
)
def test_damaged_tokenizer_files_work_or_give_our_errors(
    tiny: TinyModel, tmp_path: Path, name: str, count: int
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny.directory / file).read_bytes())
    path = tmp_path / name
    if not path.exists():
        path.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    raw = path.read_bytes()
    generator = random.Random(2)
    outcomes = {"works": 0, "refused": 0}
    for number in range(count):
        path.write_bytes(damaged(raw, generator))
        try:
            tokenizer = Tokenizer(tmp_path)
            ids = tokenizer.encode("Hello, größe 123 🙂")
            tokenizer.decode(ids)
            if tokenizer.chat_template is not None:
                tokenizer.encode_chat(MESSAGES)
            outcomes["works"] += 1
        except errors.QuireError:
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"mutant {number} of {name}: {path.read_bytes()[:2000]!r}")
            raise
    assert min(outcomes.values()) > 5, outcomes
