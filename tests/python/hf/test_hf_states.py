"""quire.hf.QuireCache in unusual states: every refusal names what is wrong and changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import quire
import torch
import transformers
from hf_models import model, random_ids

from quire import hf

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def llama():
    return model("llama")


@pytest.fixture
def cache(llama):
    """Two rows of twelve columns."""
    cache = quire_cache(llama)
    run(llama, cache, random_ids(2, 12))
    return cache


def quire_cache(made, **options):
    return hf.QuireCache(made.config, **{"token_capacity": 1024, **options})


def run(made, cache, ids, **options):
    return made(ids, past_key_values=cache, **options).logits


class Unchanged:
    """The block raises that error with that text and leaves the cache as it was: what is seen of
    it, and the bits of the next forward."""

    def __init__(self, cache, error, match):
        self._raises = pytest.raises(error, match=match)
        self._cache = cache

    def __enter__(self):
        self._before = self._seen()
        return self._raises.__enter__()

    def __exit__(self, *exception):
        swallowed = self._raises.__exit__(*exception)
        assert self._seen() == self._before
        self._cache.kv_cache.check_invariants()
        return swallowed

    def _seen(self):
        kv = self._cache.kv_cache
        return (kv.state_digest(), self._cache.get_seq_length(), self._cache.batch_size)


def test_another_batch_size_needs_a_reset(llama, cache):
    with Unchanged(cache, quire.BadArgumentError, r"\(3, 4, 1, 16\), .*\(2, 4, 1, 16\).*reset"):
        run(llama, cache, random_ids(3, 1))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and not cache.is_initialized
    cache.reset()
    fresh = quire_cache(llama)
    ids = random_ids(3, 9)
    assert torch.equal(run(llama, cache, ids), run(llama, fresh, ids))
    assert cache.batch_size == 3


def test_a_full_cache_names_its_capacity(llama):
    full = quire_cache(llama, token_capacity=256)
    run(llama, full, random_ids(1, 250))
    with Unchanged(full, quire.OutOfPagesError, "1 rows of 200 new tokens.*token_capacity"):
        run(llama, full, random_ids(1, 200))
    with Unchanged(full, quire.TooLargeError, "1 rows of 300 new tokens.*token_capacity"):
        run(llama, full, random_ids(1, 300))
    few = quire_cache(llama, max_num_sequences=1)
    with Unchanged(few, quire.TooLargeError, "5 rows of 2 new tokens.*max_num_sequences"):
        run(llama, few, random_ids(5, 2))
    full.crop(-200)
    run(llama, full, random_ids(1, 100))


def test_generate_that_fills_the_cache_leaves_what_fitted(llama):
    full = quire_cache(llama, token_capacity=64, page_size=16)
    with pytest.raises(quire.OutOfPagesError, match="token_capacity"):
        llama.generate(random_ids(1, 40), past_key_values=full, max_new_tokens=100)
    held = full.get_seq_length()
    assert 64 <= held < 140 and full.kv_cache.get_total_sequence_length() == held
    full.crop(-20)
    run(llama, full, random_ids(1, 5))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.crop(-1),
        lambda cache: cache.crop(0),
        lambda cache: cache.fork(),
        lambda cache: copy.deepcopy(cache),
        lambda cache: cache.save("never_written"),
        lambda cache: cache.load("never_read"),
    ],
)
def test_a_call_in_the_middle_of_a_forward(llama, cache, call):
    ids = random_ids(2, 3, seed=1)
    expected = run(llama, cache.fork(), ids)
    raised = []

    def between(*_):
        with Unchanged(cache, quire.BadStateError, "before its layer 1 of 3.*abort_forward"):
            call(cache)
        raised.append(True)

    hook = llama.model.layers[0].register_forward_hook(between)
    try:
        out = run(llama, cache, ids)
    finally:
        hook.remove()
    assert raised and torch.equal(out, expected)


@pytest.mark.parametrize("recover", ["abort_forward", "reset"])
def test_an_interrupted_forward(llama, cache, recover):
    def interrupt(*_):
        raise KeyboardInterrupt

    ids = random_ids(2, 3, seed=1)
    expected = run(llama, cache.fork(), ids)
    hook = llama.model.layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(llama, cache, ids)
    finally:
        hook.remove()
    with Unchanged(cache, quire.BadStateError, "before its layer 2 of 3.*abort_forward"):
        run(llama, cache, ids)
    getattr(cache, recover)()
    if recover == "reset":
        run(llama, cache, random_ids(2, 12))
    assert torch.equal(run(llama, cache, ids), expected)


def test_a_cache_that_ends_in_an_open_forward_releases_it(llama, cache):
    def interrupt(*_):
        raise KeyboardInterrupt

    fork = cache.fork()
    hook = llama.model.layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(llama, fork, random_ids(2, 3))
    finally:
        hook.remove()
    with Unchanged(cache, quire.BadStateError, "forward is open|open"):
        run(llama, cache, random_ids(2, 3))
    del fork
    gc.collect()  # the traceback of the interrupt held it
    run(llama, cache, random_ids(2, 3))
    assert cache.kv_cache.sequence_count() == 2


def test_a_fork_that_ends_while_a_thread_is_in_a_call(llama, cache, monkeypatch):
    """As the garbage collector may end one. What it held was never given back."""
    fork = cache.fork()
    run(llama, fork, random_ids(2, 3))
    assert cache.kv_cache.sequence_count() == 4

    def busy(*_):
        raise quire.BadStateError("another call is inside")

    with monkeypatch.context() as patch:
        patch.setattr(quire.KVCache, "remove_sequence", busy)
        del fork
        gc.collect()
    assert cache.kv_cache.sequence_count() == 4
    run(llama, cache, random_ids(2, 3))
    assert cache.kv_cache.sequence_count() == 2
    cache.kv_cache.check_invariants()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_cache_that_outlives_its_pages_ends_in_silence(llama):
    cache = quire_cache(llama)
    run(llama, cache, random_ids(2, 12))
    cache.kv_cache.close()
    del cache
    gc.collect()


def test_two_models_on_one_cache(llama, cache):
    other = model("llama", seed=1)
    with Unchanged(cache, quire.BadStateError, "another model.*layer 0.*reset"):
        run(other, cache, random_ids(2, 3))
    with Unchanged(cache, quire.BadStateError, "another model"):
        run(other, cache.fork(), random_ids(2, 3))
    cache.reset()
    run(other, cache, random_ids(2, 3))


def test_attention_and_cache_must_both_be_quires(llama, cache):
    for others in ({}, {"past_key_values": transformers.DynamicCache(config=llama.config)}):
        with pytest.raises(quire.BadStateError, match="without a quire.hf.QuireCache"):
            llama(random_ids(1, 3), **others)
    for name in ("sdpa", "eager"):
        llama.set_attn_implementation(name)
        try:
            with Unchanged(cache, quire.BadStateError, "attn_implementation='quire'"):
                run(llama, cache, random_ids(2, 3))
        finally:
            llama.set_attn_implementation("quire")


def test_layers_out_of_order(llama, cache):
    attention = llama.model.layers[1].self_attn
    ids = random_ids(2, 3)
    positions = torch.arange(12, 15)[None]
    embedded = llama.model.embed_tokens(ids)
    around = llama.model.rotary_emb(embedded, positions)
    with Unchanged(cache, quire.BadStateError, "layer 1 is called where layer 0 is next"):
        attention(embedded, around, None, past_key_values=cache)


ONES = torch.ones(2, 15, dtype=torch.int64)


def _mask(*hidden):
    mask = ONES.clone()
    for row, column in hidden:
        mask[row, column] = 0
    return mask


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (ONES[:, :3], r"has shape \(2, 3\), and only \(2, 15\)"),
        (_mask((0, 4)), "other columns than when they were stored"),
        (_mask((1, 14)), "hides the last of the new columns"),
        (_mask(*((row, column) for row in (0, 1) for column in (12, 13, 14))), "hides the last"),
        (torch.ones(2, 1, 3, 15, dtype=torch.bool), r"shape \(2, 1, 3, 15\), and only"),
    ],
)
def test_masks_that_are_refused(llama, cache, mask, match):
    with Unchanged(cache, quire.BadArgumentError, match):
        run(llama, cache, random_ids(2, 3), attention_mask=mask)


def test_padding_must_be_told_again(llama):
    padded = quire_cache(llama)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    run(llama, padded, random_ids(2, 6), attention_mask=mask)
    with Unchanged(padded, quire.BadArgumentError, r"attention_mask is needed, of shape \(2, 7\)"):
        run(llama, padded, random_ids(2, 1))
    with Unchanged(padded, quire.BadArgumentError, "other columns"):
        run(llama, padded, random_ids(2, 1), attention_mask=torch.ones(2, 7, dtype=torch.int64))


def test_windows_and_padding_between_tokens():
    mistral = model("mistral")
    cache = quire_cache(mistral)
    run(mistral, cache, random_ids(2, 12))
    with Unchanged(cache, quire.BadArgumentError, "sliding layers"):
        run(mistral, cache, random_ids(2, 3), attention_mask=_mask((0, 12)))


@pytest.mark.parametrize("count", [1, -13, 12])
def test_crop_of_what_is_not_there(cache, count):
    with Unchanged(cache, quire.BadArgumentError, f"tokens_to_remove is {count}; .* 12 columns"):
        cache.crop(count)


def test_crop_of_nothing_and_of_everything(llama, cache):
    before = cache.kv_cache.state_digest()
    cache.crop(0)
    assert cache.kv_cache.state_digest() == before
    cache.crop(-12)
    assert cache.get_seq_length() == 0 and cache.kv_cache.empty()
    run(model("llama", seed=1), cache, random_ids(5, 4))  # nothing of another model is held
    empty = quire_cache(llama)
    empty.crop(0)


def test_crop_beyond_what_windows_keep():
    mistral = model("mistral")
    cache = quire_cache(mistral, max_crop=4)
    run(mistral, cache, random_ids(2, 300))
    expected = run(mistral, cache.fork(), random_ids(2, 2))
    with Unchanged(cache, quire.BadStateError, "max_crop is 4"):
        cache.crop(-250)
    assert torch.equal(run(mistral, cache, random_ids(2, 2)), expected)
    cache.crop(-2)
    assert torch.equal(run(mistral, cache, random_ids(2, 2)), expected)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("reorder_cache", torch.tensor([0, 2])),
        ("reorder_cache", torch.tensor([-1, 0])),
        ("reorder_cache", torch.tensor([], dtype=torch.int64)),
        ("batch_select_indices", torch.tensor([2])),
        ("batch_select_indices", torch.tensor([False, False])),
        ("batch_select_indices", torch.tensor(1)),
        ("batch_select_indices", torch.tensor([[0], [1]])),
        ("batch_repeat_interleave", 0),
    ],
)
def test_rows_that_are_not_there(cache, call, argument):
    with Unchanged(cache, quire.BadArgumentError, f"QuireCache.{call}"):
        getattr(cache, call)(argument)


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [
        ("crop", -1.5, "tokens_to_remove must be an integer, not float"),
        ("crop", None, "tokens_to_remove must be an integer, not NoneType"),
        ("batch_repeat_interleave", 1.5, "repeats must be an integer, not float"),
        ("reorder_cache", torch.tensor([0.0, 0.5]), "beam_idx must be integers"),
        ("reorder_cache", torch.tensor([True, False]), "batch_select_indices"),
    ],
)
def test_what_is_no_integer_is_not_made_one(cache, call, argument, message):
    with Unchanged(cache, (quire.BadArgumentError, TypeError), message):
        getattr(cache, call)(argument)


def test_calls_on_an_empty_cache_do_nothing(llama):
    empty = quire_cache(llama)
    empty.reorder_cache(torch.tensor([1, 0]))
    empty.batch_repeat_interleave(2)
    empty.batch_select_indices(torch.tensor([1]))
    empty.abort_forward()
    fork = empty.fork()
    assert fork.get_seq_length() == 0 and empty.kv_cache.empty()
    run(llama, fork, random_ids(1, 3))
    assert empty.get_seq_length() == 0


def test_a_mask_of_rows_is_selected_by_bools(llama, cache):
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.batch_size == 1 and cache.kv_cache.sequence_count() == 1
    alone = quire_cache(llama)
    run(llama, alone, random_ids(2, 12))
    alone.reorder_cache(torch.tensor([1]))
    assert torch.equal(run(llama, alone, random_ids(1, 2)), run(llama, cache, random_ids(1, 2)))


def test_rows_of_forks_are_each_others_business_alone(llama, cache):
    fork = cache.fork()
    fork.crop(-5)
    run(llama, fork, random_ids(2, 9))
    fork.reorder_cache(torch.tensor([1, 1]))
    other = quire_cache(llama)
    run(llama, other, random_ids(2, 12))
    assert torch.equal(run(llama, cache, random_ids(2, 2)), run(llama, other, random_ids(2, 2)))
    cache.reset()
    run(llama, fork, random_ids(2, 2))
    assert fork.get_seq_length() == 18


def test_what_attention_refuses(llama, cache):
    ids = random_ids(2, 1)
    with torch.enable_grad(), Unchanged(cache, quire.BadArgumentError, "gradients"):
        run(llama, cache, ids)
    one = model("llama").requires_grad_(False)
    one.model.layers[0].self_attn.k_proj.weight.requires_grad_(True)
    bound = quire_cache(one)
    with torch.enable_grad(), Unchanged(bound, quire.BadArgumentError, "gradients"):
        run(one, bound, ids)
    with Unchanged(cache, quire.BadArgumentError, "dropout"):
        config = copy.deepcopy(llama.config)
        config.attention_dropout = 0.5
        trained = transformers.LlamaForCausalLM(config)
        trained.set_attn_implementation("quire")
        run(trained.train(), cache, ids)
    gemma = model("gemma3", attn_logit_softcapping=30.0)
    capped = quire_cache(gemma)
    with Unchanged(capped, quire.BadArgumentError, "softcap=None.* says 30.0"):
        run(gemma, capped, ids)
    wide = model("llama", dtype=torch.bfloat16).to(torch.bfloat16)
    narrow = quire_cache(wide, dtype="float32")
    with Unchanged(narrow, quire.BadArgumentError, "torch.bfloat16.*dtype='bfloat16'"):
        run(wide, narrow, ids)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_a_forward_of_nothing(llama, shape):
    """IndexError, of a tensor that the caller has never seen, or a cache of no rows."""
    cache = quire_cache(llama)
    attention = llama.model.layers[0].self_attn
    rows, columns = shape
    query, key = torch.zeros(rows, 4, columns, 16), torch.zeros(rows, 2, columns, 16)
    with Unchanged(cache, quire.BadArgumentError, f"{rows} rows and {columns} new columns"):
        keys, values = cache.update(key, key, 0)
        attention_of = transformers.AttentionInterface()["quire"]
        attention_of(attention, query, keys, values, None)


def test_configurations_that_are_refused():
    for config, what in (
        (transformers.T5Config(), "an encoder and a decoder"),
        (transformers.Llama4TextConfig(), "chunked attention"),
        (transformers.DeepseekV3Config(), "multi-head latent attention"),
        (transformers.Gemma3Config(), "more than text"),
        (transformers.MambaConfig(), "Mamba|LinearAttention"),
        (transformers.Qwen3NextConfig(), "LinearAttention"),
    ):
        with pytest.raises(quire.BadArgumentError, match=f"{config.model_type}.*({what})"):
            hf.QuireCache(config, token_capacity=64)


def test_save_and_load_refuse(llama, cache, tmp_path):
    with Unchanged(quire_cache(llama), quire.BadStateError, "nothing is held"):
        quire_cache(llama).save(tmp_path / "empty")
    for shape in ((2, 11), (3, 12)):
        with Unchanged(cache, quire.BadArgumentError, "2 rows of 12 columns"):
            cache.save(tmp_path / "ids", torch.zeros(shape, dtype=torch.int64))
    with Unchanged(cache, quire.BadArgumentError, r"shape \(12,\)"):
        cache.save(tmp_path / "ids", torch.zeros(12, dtype=torch.int64))
    assert not [*tmp_path.iterdir()]
    cache.save(tmp_path / "saved")
    with Unchanged(cache, FileExistsError, "exists already"):
        cache.save(tmp_path / "saved")
    with Unchanged(cache, quire.NotFoundError, "absent"):
        cache.load(tmp_path / "absent")
    run(llama, more := quire_cache(llama), random_ids(3, 12))
    more.save(tmp_path / "more")
    for small in (dict(token_capacity=16, page_size=16), dict(max_num_sequences=1)):
        small = quire_cache(llama, **small)
        with Unchanged(small, quire.QuireError, "pages|max_num_sequences"):
            small.load(tmp_path / "more")
    qwen = model("qwen3")
    with Unchanged(quire_cache(qwen), quire.IncompatibleError, "revision|model"):
        quire_cache(qwen).load(tmp_path / "saved")
    with Unchanged(cache, TypeError, "save"):
        pickle.dumps(cache)


def test_padding_alone_is_not_saved(llama, tmp_path):
    """The folder had no file, so load() did not find it."""
    cache = quire_cache(llama)
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])
    run(llama, cache, random_ids(2, 4), attention_mask=mask)
    cache.crop(-2)
    with Unchanged(cache, quire.BadStateError, "save: nothing is held, but for padding"):
        cache.save(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_a_note_of_fewer_layers_is_refused(cache, tmp_path, monkeypatch):
    """It was loaded, and the next forward ended with IndexError."""
    real = json.dumps

    def crafted(fields, **options):
        return real({**fields, "weights": ["0" * 32]} if "lengths" in fields else fields, **options)

    monkeypatch.setattr(json, "dumps", crafted)
    cache.save(tmp_path / "saved")
    monkeypatch.undo()
    with Unchanged(cache, quire.IncompatibleError, "weights of 1 layers; this .* has 3"):
        cache.load(tmp_path / "saved")


def test_weights_that_have_changed_since_are_not_noted(tmp_path):
    """Keys of the weights before were saved with the digests of those after."""
    changing = model("llama", seed=5)
    cache = quire_cache(changing)
    run(changing, cache, random_ids(1, 12))
    weight = changing.model.layers[1].self_attn.v_proj.weight
    weight.data += 0.5  # as where PEFT merges an adapter
    for one in (cache, cache.fork()):
        with Unchanged(one, quire.BadStateError, "save: weights of layer 1 have changed"):
            one.save(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]
    weight.data -= 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_no_integers_are_not_saved(cache, tmp_path, dtype):
    """The folder was one that load() refuses."""
    with Unchanged(cache, TypeError, "QuireCache.save: input_ids must be integers, not torch"):
        cache.save(tmp_path / "saved", torch.ones(2, 12, dtype=dtype))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, None) for name in ("columns", "lengths", "rows", "weights")),
        *((name, 1) for name in ("lengths", "rows", "shown", "input_ids", "weights")),
        ("columns", -1),
        ("columns", "12"),
        ("columns", 13),
        ("lengths", []),
        ("lengths", [12, "x"]),
        ("lengths", [12, 11]),
        ("lengths", [10**30, 12]),
        ("rows", [0, 2]),
        ("rows", [0, -1]),
        ("rows", [0, 0]),
        ("rows", [0]),
        ("shown", [[1] * 12]),
        ("shown", [[1] * 12, [2] * 12]),
        ("shown", [[0] + [1] * 11, [1] * 12]),
        ("input_ids", [[1] * 12, [1] * 11]),
        ("input_ids", [[1] * 12, [2**63] * 12]),
        ("weights", [1]),
        ("counted", 1),
        ("must_count", None),
        ("version", 2),
        ("version", None),
    ],
)
def test_a_note_that_save_does_not_write_is_refused(
    llama, cache, tmp_path, monkeypatch, field, value
):
    """Its checksums are right."""
    real = json.dumps

    def crafted(fields, **options):
        return real({**fields, field: value} if "lengths" in fields else fields, **options)

    monkeypatch.setattr(json, "dumps", crafted)
    cache.save(tmp_path / "saved")
    monkeypatch.undo()
    with Unchanged(cache, quire.IncompatibleError, "0.quire: was not written by QuireCache.save"):
        cache.load(tmp_path / "saved")


def test_a_note_that_lacks_a_field_or_is_of_other_files_is_refused(
    llama, cache, tmp_path, monkeypatch
):
    real = json.dumps

    def without(fields, **options):
        return real({name: fields[name] for name in fields if name != "rows"}, **options)

    monkeypatch.setattr(json, "dumps", without)
    cache.save(tmp_path / "lacks")
    monkeypatch.undo()
    with Unchanged(cache, quire.IncompatibleError, "rows is not what that writes"):
        cache.load(tmp_path / "lacks")
    run(llama, longer := quire_cache(llama), random_ids(2, 14))
    cache.save(tmp_path / "saved")
    longer.save(tmp_path / "longer")
    shutil.copy(tmp_path / "longer" / "1.quire", tmp_path / "saved" / "1.quire")
    with Unchanged(cache, quire.IncompatibleError, "1.quire: has 14 tokens; 12 were noted"):
        cache.load(tmp_path / "saved")


def test_a_damaged_save_is_refused(llama, cache, tmp_path):
    cache.save(tmp_path / "saved")
    file = tmp_path / "saved" / "1.quire"
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 1
    file.write_bytes(damaged)
    with Unchanged(cache, quire.CorruptError, "1.quire"):
        cache.load(tmp_path / "saved")
    run(llama, cache, random_ids(2, 1))


def test_a_snapshot_of_another_program_is_refused(llama, cache, tmp_path):
    (tmp_path / "other").mkdir()
    kv = cache.kv_cache
    (sequence,) = [seq for seq in range(8) if kv.has_sequence(seq)][:1]
    quire.snapshot.save_sequence(
        kv, sequence, [0] * 12, tmp_path / "other" / "0.quire", identity={"model": "x"}
    )
    with Unchanged(cache, quire.IncompatibleError, "not written by QuireCache.save"):
        cache.load(tmp_path / "other")


def test_saved_keys_of_other_weights_are_found_by_the_next_forward(llama, cache, tmp_path):
    cache.save(tmp_path / "saved")
    other, same = model("llama", seed=1), model("llama")
    loaded = quire_cache(other)
    loaded.load(tmp_path / "saved")
    with Unchanged(loaded, quire.BadStateError, "another model"):
        run(other, loaded, random_ids(2, 1))
    expected = run(llama, cache, random_ids(2, 1))
    assert torch.equal(run(same, loaded, random_ids(2, 1)), expected)
    del same
    gc.collect()
    with Unchanged(loaded, quire.BadStateError, "the model .* is gone"):
        loaded.save(tmp_path / "again")


def test_without_torch_the_import_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport quire.hf"
    environment = {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "the package torch is missing: pip install 'quire[hf]'" in done.stderr

