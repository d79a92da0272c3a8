"""quire.hf.QuireCache: tokens against DynamicCache's, bits among forks, saves and recomputation."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import MODELS, PAD, model, random_ids, reference

from quire import hf

torch.set_num_threads(1)

CAPACITY = 4096


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def models():
    return {name: model(name) for name in MODELS}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


def quire_cache(made, **options):
    return hf.QuireCache(made.config, **{"token_capacity": CAPACITY, **options})


def generate(made, ids, cache, **options):
    torch.manual_seed(11)
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    return made.generate(ids, past_key_values=cache, **options)


def padded_batch():
    ids = random_ids(3, 30)
    mask = torch.ones_like(ids)
    for row, padding in ((0, 7), (2, 21)):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return ids, mask


def repeating_prompt():
    ids = random_ids(1, 30)
    ids[0, 15:] = ids[0, :15]
    return ids


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "padding": {},
    "padded_beams": {"num_beams": 3},
    "prefill_in_chunks": {"prefill_chunk_size": 8},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_dynamic_cache(models, name, way):
    made, options = models[name], dict(WAYS[way])
    ids = repeating_prompt()
    if way in ("padding", "padded_beams", "prefill_in_chunks"):
        ids, options["attention_mask"] = padded_batch()
    with reference(made):
        expected = generate(made, ids, transformers.DynamicCache(config=made.config), **options)
    cache = quire_cache(made)
    assert torch.equal(generate(made, ids, cache, **options), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    cache.kv_cache.check_invariants()


def test_prompt_lookup_takes_tokens_back(models, monkeypatch):
    taken_back = []
    crop = hf.QuireCache.crop
    monkeypatch.setattr(
        hf.QuireCache, "crop", lambda cache, count: (taken_back.append(count), crop(cache, count))
    )
    generate(models["mistral"], repeating_prompt(), quire_cache(models["mistral"]),
             prompt_lookup_num_tokens=4)  # fmt: skip
    assert min(taken_back) < 0 < len(taken_back)


def test_beams_of_a_long_prompt_hold_it_once(llama):
    cache = quire_cache(llama)
    held = []

    class Counts(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            held.append(cache.kv_cache.get_distinct_token_count())
            return scores

    prompt = random_ids(1, 700)
    generate(llama, prompt, cache, num_beams=4, max_new_tokens=8,
             logits_processor=transformers.LogitsProcessorList([Counts()]))  # fmt: skip
    assert held[0] == 700
    assert max(held) <= 700 + 4 * 7
    assert cache.batch_size == 4


def test_equal_rows_that_differ_in_a_later_layer_go_on_by_themselves(llama):
    """As where a matrix product rounds equal rows of a batch differently."""
    calls = []

    def nudge(module, inputs, output):
        calls.append(module)
        output[1] *= 1.5
        return output

    ids = random_ids(1, 20).repeat(3, 1)
    hook = llama.model.layers[1].self_attn.k_proj.register_forward_hook(nudge)
    try:
        with reference(llama):
            expected = generate(llama, ids, transformers.DynamicCache(config=llama.config))
        cache = quire_cache(llama)
        answer = generate(llama, ids, cache)
    finally:
        hook.remove()
    assert calls and torch.equal(answer, expected)
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(expected[0], expected[2])
    cache.kv_cache.check_invariants()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_several_turns_on_one_cache(models, name):
    made = models[name]
    cache, theirs = quire_cache(made), transformers.DynamicCache(config=made.config)
    ours = expected = random_ids(1, 20)
    for turn in range(3):
        message = random_ids(1, 9, seed=turn + 1)
        ours = generate(made, torch.cat([ours, message], dim=1), cache, max_new_tokens=10)
        with reference(made):
            expected = generate(
                made, torch.cat([expected, message], dim=1), theirs, max_new_tokens=10
            )
        assert torch.equal(ours, expected)
    assert cache.get_seq_length() == theirs.get_seq_length() == ours.shape[1] - 1


def test_turns_of_a_padded_batch(llama):
    """The second message is padded, too, so a row has padding between its tokens."""
    ids, mask = padded_batch()
    message, shown = random_ids(3, 8, seed=5), torch.ones(3, 8, dtype=torch.int64)
    message[1, :3], shown[1, :3] = PAD, 0
    answers = []
    for cache in (transformers.DynamicCache(config=llama.config), quire_cache(llama)):
        llama.set_attn_implementation("quire" if isinstance(cache, hf.QuireCache) else "eager")
        first = generate(llama, ids, cache, attention_mask=mask, max_new_tokens=10)
        whole = torch.cat([mask, torch.ones(3, 10, dtype=torch.int64), shown], dim=1)
        text = torch.cat([first, message], dim=1)
        answers.append(generate(llama, text, cache, attention_mask=whole, max_new_tokens=10))
    assert torch.equal(*answers)
    held = cache.kv_cache.get_total_sequence_length()
    assert held == whole.sum() + 3 * 9


def logits(made, ids, cache):
    return made(ids, past_key_values=cache).logits


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_forks_saves_and_recomputation_have_equal_bits(models, name, tmp_path):
    made = models[name]
    prompt, more = random_ids(2, 40), random_ids(2, 5, seed=1)
    first = quire_cache(made)
    logits(made, prompt, first)
    fork, copied = first.fork(), copy.deepcopy(first)
    first.save(tmp_path / "saved", prompt)
    expected = logits(made, more, first)

    again = quire_cache(made)
    logits(made, prompt, again)
    loaded = quire_cache(made)
    ids = loaded.load(tmp_path / "saved")
    assert torch.equal(ids, prompt)
    for cache in (fork, copied, again, loaded):
        assert cache.get_seq_length() == 40
        assert torch.equal(logits(made, more, cache), expected)
        assert cache.get_seq_length() == 45
    fork.crop(-5)
    assert torch.equal(logits(made, more, fork), expected)
    assert torch.equal(logits(made, more, first.fork()), logits(made, more, first))


def test_saved_rows_keep_their_padding(llama, tmp_path):
    ids, mask = padded_batch()
    cache = quire_cache(llama)
    first = generate(llama, ids, cache, attention_mask=mask, max_new_tokens=6)
    cache.reorder_cache(torch.tensor([0, 2, 2, 1]))
    cache.save(tmp_path / "rows")
    other = quire_cache(llama)
    assert other.load(tmp_path / "rows") is None
    rows = [0, 2, 2, 1]
    whole = torch.cat([mask[rows], torch.ones(4, 6, dtype=torch.int64)], dim=1)
    answers = [
        generate(llama, first[rows], one, attention_mask=whole, max_new_tokens=6)
        for one in (cache, other)
    ]
    assert torch.equal(*answers)
    assert other.kv_cache.sequence_count() == 3  # the equal rows are one still


def test_a_row_without_any_token_yet(llama, tmp_path):
    """Chunks of a prefill that are nothing but padding for one of the rows."""
    cache = quire_cache(llama)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    ids = random_ids(2, 4)
    llama(ids, past_key_values=cache, attention_mask=mask)
    assert cache.kv_cache.get_total_sequence_length() == 4
    cache.save(tmp_path / "half")
    other = quire_cache(llama)
    other.load(tmp_path / "half")
    more = random_ids(2, 3, seed=1)
    whole = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], dim=1)
    positions = whole.cumsum(dim=1)[:, 4:] - 1
    alone = llama(more[1:], past_key_values=quire_cache(llama)).logits
    for one in (cache, other):
        both = llama(more, past_key_values=one, attention_mask=whole, position_ids=positions).logits
        torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-4)
    cache.crop(-5)
    assert cache.kv_cache.get_total_sequence_length() == 2
    cache.kv_cache.check_invariants()


def test_a_bfloat16_model_and_a_narrower_cache(llama):
    """Keys of the model's own type; and int8, whose answers may differ and are not compared."""
    bfloat16 = model("llama", dtype=torch.bfloat16).to(torch.bfloat16)
    ids = random_ids(1, 30)
    own = quire_cache(bfloat16, dtype="bfloat16")
    out = logits(bfloat16, ids, own)
    again = quire_cache(bfloat16, dtype=torch.bfloat16)
    assert torch.equal(out, logits(bfloat16, ids, again))
    narrow = quire_cache(llama, dtype="int8")
    generate(llama, ids, narrow)
    assert narrow.kv_cache.layers[0].dtype == "int8"
    assert narrow.get_seq_length() == 30 + 23


def test_many_calls_leave_nothing_behind(llama):
    cache = quire_cache(llama)
    prompt = random_ids(1, 40)
    seen = set()
    for call in range(12):
        cache.crop(-cache.get_seq_length())
        generate(llama, prompt, cache, max_new_tokens=8, num_beams=1 + call % 3)
        fork = cache.fork()
        logits(llama, random_ids(fork.batch_size, 2), fork)
        del fork
        kv = cache.kv_cache
        seen.add((call % 3, kv.pages_in_use(), kv.sequence_count(), kv.pages_allocated()))
        kv.check_invariants()
    assert len(seen) == 3
    cache.reset()
    assert cache.kv_cache.empty() and cache.kv_cache.pages_in_use() == 0


def test_random_calls_against_dynamic_cache(llama):
    """Every call in any order: the same logits, but for rounding, and lengths."""
    chance = random.Random(3)
    pairs = [(quire_cache(llama), transformers.DynamicCache(config=llama.config))]
    kv = pairs[0][0].kv_cache

    def forward(ours, theirs):
        rows = ours.batch_size if ours.is_initialized else chance.randint(1, 3)
        ids = random_ids(rows, chance.choice([1, 1, 2, 7, 33]), seed=chance.randint(0, 99))
        if chance.random() < 0.4:
            ids = ids[:1].repeat(rows, 1)
        with reference(llama):
            expected = logits(llama, ids, theirs)
        torch.testing.assert_close(logits(llama, ids, ours), expected, rtol=0, atol=2e-4)

    def rows_call(ours, theirs):
        rows = max(ours.batch_size, 1)
        call, argument = chance.choice(
            [
                ("reorder_cache", torch.randint(rows, (rows,))),
                ("batch_select_indices", torch.randperm(rows)[: chance.randint(1, rows)]),
                ("batch_repeat_interleave", 2 if rows < 4 else 1),
                ("crop", -chance.randint(0, max(ours.get_seq_length() - 1, 0))),
            ]
        )
        getattr(ours, call)(argument)
        getattr(theirs, call)(argument)

    torch.manual_seed(1)
    for _ in range(120):
        ours, theirs = pair = chance.choice(pairs)
        step = chance.random()
        if step < 0.5:
            forward(*pair)
        elif step < 0.85:
            rows_call(*pair)
        elif step < 0.93 and len(pairs) < 4:
            pairs.append((ours.fork(), copy.deepcopy(theirs)))
        elif len(pairs) > 1:
            pairs.remove(pair)
        else:
            ours.reset()
            theirs.reset()
        del ours, theirs, pair
        kv.check_invariants()
        assert all(ours.get_seq_length() == theirs.get_seq_length() for ours, theirs in pairs)
    pairs.clear()
    assert kv.empty() and kv.pages_in_use() == 0


def test_the_code_of_the_page_runs(tiny, tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 5
    folder = shutil.copytree(tiny.directory, tmp_path / "model")
    # transformers writes special tokens as plain texts.
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, value in config.items():
        config[name] = value["content"] if isinstance(value, dict) else value
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join(blocks).replace("MODEL_DIR", str(folder)), names)
    assert capsys.readouterr().out.strip()
    assert names["later"].get_seq_length() == names["ids"].shape[1] - 1
