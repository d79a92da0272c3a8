"""quire.hf.QuireCache in a quire.ChunkStore: what keep() puts, find() holds again, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
import torch
import transformers
from hf_models import MODELS, PAD, model, random_ids, reference

from quire import hf

torch.set_num_threads(1)
CHUNK = 16


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def llama() -> Any:
    return model("llama")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.ChunkStore]:
    # However long the disk takes.
    with quire.ChunkStore(tmp_path / "kv", ram_bytes=16 << 20, disk_timeout_ms=60_000) as store:
        yield store


def new_cache(made: Any, **options: Any) -> hf.QuireCache:
    return hf.QuireCache(made.config, **{"token_capacity": 1024, **options})


def run(made: Any, cache: hf.QuireCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    logits: torch.Tensor = made(ids, past_key_values=cache, **options).logits
    return logits


def counted(mask: torch.Tensor) -> torch.Tensor:
    """Positions that count the tokens of each row, as those of generate() do."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def padded(row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row behind this much padding, and its mask."""
    ids = torch.cat([torch.full((1, count), PAD), row], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :count] = 0
    return ids, mask


def recomputed(made: Any, ids: torch.Tensor, border: int) -> torch.Tensor:
    """Logits behind the border, computed anew in two forwards that meet there."""
    cache = new_cache(made)
    run(made, cache, ids[:, :border])
    return run(made, cache, ids[:, border:])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_found_has_the_bits_of_recomputation(
    store: quire.ChunkStore, name: str, dtype: torch.dtype
) -> None:
    made = model(name).to(dtype)
    made.config.dtype = dtype
    ids = random_ids(1, 70)
    cache = new_cache(made)
    run(made, cache, ids[:, :60])
    assert cache.keep(store, ids, made, chunk_tokens=CHUNK) == [48]
    store.flush()
    later = new_cache(made)
    assert later.find(store, ids, made, chunk_tokens=CHUNK) == 48
    later.kv_cache.check_invariants()
    assert torch.equal(run(made, later, ids[:, 48:]), recomputed(made, ids, 48))


def test_generate_goes_on_after_what_was_found_as_dynamic_cache_does(
    store: quire.ChunkStore, llama: Any
) -> None:
    question = random_ids(1, 40)
    cache = new_cache(llama)
    answer = llama.generate(question, past_key_values=cache, max_new_tokens=24)
    assert cache.keep(store, answer, llama, chunk_tokens=CHUNK) == [48]
    ids = torch.cat([answer, random_ids(1, 9, seed=5)], dim=1)
    later = new_cache(llama)
    assert later.find(store, ids, llama, chunk_tokens=CHUNK) == 48
    out = llama.generate(ids, past_key_values=later, max_new_tokens=24)
    with reference(llama):
        expected = llama.generate(
            ids, past_key_values=transformers.DynamicCache(), max_new_tokens=24
        )
    assert torch.equal(out, expected)


_OTHER_PROCESS = """
    import sys, torch, quire
    sys.path.insert(0, sys.argv[1])
    from hf_models import model, random_ids
    from quire import hf
    torch.set_num_threads(1)
    made, ids = model("llama"), random_ids(1, 70)
    with torch.no_grad(), quire.ChunkStore(sys.argv[2], disk_timeout_ms=60_000) as store:
        cache = hf.QuireCache(made.config, token_capacity=1024)
        print(cache.find(store, ids, made, chunk_tokens=16))
        logits = made(ids[:, 48:], past_key_values=cache).logits
        torch.save(logits, sys.argv[3])
"""


def test_another_process_finds_it(llama: Any, tmp_path: Path) -> None:
    ids = random_ids(1, 70)
    with quire.ChunkStore(tmp_path / "kv", disk_timeout_ms=60_000) as store:
        cache = new_cache(llama)
        run(llama, cache, ids[:, :60])
        cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    arguments = [str(Path(__file__).parent), str(tmp_path / "kv"), str(tmp_path / "logits")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_OTHER_PROCESS), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "48\n", done.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), recomputed(llama, ids, 48))


def test_rows_of_several_lengths_end_at_one_column(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(2, 70)
    ids[1, :7] = PAD
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :7] = 0
    positions = counted(mask)
    cache = new_cache(llama)
    run(llama, cache, ids, attention_mask=mask, position_ids=positions)
    assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == [64, 48]
    later = new_cache(llama)
    assert later.find(store, ids, llama, attention_mask=mask, chunk_tokens=CHUNK) == 55
    expected = new_cache(llama)
    run(llama, expected, ids[:, :55], attention_mask=mask[:, :55], position_ids=positions[:, :55])
    behind = {"attention_mask": mask, "position_ids": positions[:, 55:]}
    rest = run(llama, later, ids[:, 55:], **behind)
    assert torch.equal(rest, run(llama, expected, ids[:, 55:], **behind))
    alone = new_cache(llama)
    assert alone.find(store, ids[1:, 7:], llama, chunk_tokens=CHUNK) == 48
    assert torch.equal(run(llama, alone, ids[1:, 55:]), recomputed(llama, ids[1:, 7:], 48))


@pytest.mark.parametrize("name", MODELS)
def test_keys_that_were_rotated_at_columns_are_not_kept(
    store: quire.ChunkStore, name: str
) -> None:
    """A forward without position_ids counts padding. Others were given these keys as those of the
    text without padding, with other logits."""
    made, row = model(name), random_ids(1, 40)
    ids, mask = padded(row, 5)
    cache = new_cache(made)
    run(made, cache, ids, attention_mask=mask)
    for one in (cache, cache.fork()):
        with pytest.raises(quire.BadStateError, match="keep: .* other positions than those of"):
            one.keep(store, ids, made, chunk_tokens=CHUNK)
    assert not store.list("ram")
    cache.reset()
    run(made, cache, ids, attention_mask=mask, position_ids=counted(mask))
    assert cache.keep(store, ids, made, chunk_tokens=CHUNK) == [32]
    later = new_cache(made)
    assert later.find(store, row, made, chunk_tokens=CHUNK) == 32
    # The products of another number of columns may round apart, unlike keys of other positions.
    torch.testing.assert_close(
        run(made, later, row[:, 32:]), recomputed(made, row, 32), rtol=0, atol=1e-3
    )


def test_keys_at_positions_of_the_callers_own_are_not_kept(
    store: quire.ChunkStore, llama: Any, tmp_path: Path
) -> None:
    ids, columns = random_ids(1, 40), torch.arange(40)[None]
    cache = new_cache(llama)
    run(llama, cache, ids[:, :20], position_ids=columns[:, :20])
    assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == [16]
    run(llama, cache, ids[:, 20:], position_ids=columns[:, 20:] + 1)
    cache.crop(-10)
    run(llama, cache, ids[:, 30:], position_ids=columns[:, 30:])
    cache.save(tmp_path / "saved")
    loaded = new_cache(llama)
    loaded.load(tmp_path / "saved")
    for one in (cache, loaded):
        with pytest.raises(quire.BadStateError, match="keep: .* other positions"):
            one.keep(store, ids, llama, chunk_tokens=CHUNK)
    cache.crop(-40)
    run(llama, cache, ids, position_ids=columns)
    assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == [32]


def test_a_folder_that_does_not_tell_positions_is_not_kept(
    store: quire.ChunkStore, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, real = random_ids(1, 40), json.dumps
    cache = new_cache(llama)
    run(llama, cache, ids)

    def without(fields: dict[str, Any], **options: Any) -> str:
        return real({name: fields[name] for name in fields if name != "counted"}, **options)

    monkeypatch.setattr(json, "dumps", without)
    cache.save(tmp_path / "saved")
    monkeypatch.undo()
    loaded = new_cache(llama)
    loaded.load(tmp_path / "saved")
    with pytest.raises(quire.BadStateError, match="keep: .* other positions"):
        loaded.keep(store, ids, llama, chunk_tokens=CHUNK)


def test_a_model_that_does_not_tell_positions_is_not_kept(store: quire.ChunkStore) -> None:
    """Its attention is not given any."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.PersimmonConfig(vocab_size=160, num_attention_heads=4, **sizes)
    made: Any = transformers.PersimmonForCausalLM(config)
    made.set_attn_implementation("quire")
    ids, cache = random_ids(1, 40), new_cache(made)
    run(made.eval(), cache, ids)
    with pytest.raises(quire.BadStateError, match="keep: .* or the model does not say"):
        cache.keep(store, ids, made, chunk_tokens=CHUNK)
    run(made, cache, ids)


def test_forwards_after_what_was_found_must_count_tokens(
    store: quire.ChunkStore, llama: Any, tmp_path: Path
) -> None:
    """A forward without position_ids counts padding, which the found keys do not."""
    row = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, row)
    cache.keep(store, row, llama, chunk_tokens=CHUNK)
    ids, mask = padded(row, 5)
    later = new_cache(llama)
    assert later.find(store, ids, llama, attention_mask=mask, chunk_tokens=CHUNK) == 37
    later.save(tmp_path / "saved")
    loaded = new_cache(llama)
    loaded.load(tmp_path / "saved")
    held = later.kv_cache.state_digest()
    for one in (later, later.fork(), loaded):
        for positions in (None, torch.arange(36, 44)[None]):
            with pytest.raises(quire.BadStateError, match="positions .* found .*position_ids"):
                run(llama, one, ids[:, 37:], attention_mask=mask, position_ids=positions)
        assert one.get_seq_length() == 37
    assert later.kv_cache.state_digest() == held
    for one in (later, later.fork(), loaded):
        rest = {"attention_mask": mask, "position_ids": counted(mask)[:, 37:]}
        assert torch.equal(run(llama, one, ids[:, 37:], **rest), recomputed(llama, row, 32))
    later.reset()
    run(llama, later, ids, attention_mask=mask)  # it is the caller's again


@pytest.mark.parametrize(("beams", "columns"), [(1, 48), (3, 40)])
def test_generate_with_padding_is_kept_and_goes_on(
    store: quire.ChunkStore, llama: Any, beams: int, columns: int
) -> None:
    """Of beams the prompts: what comes behind them is in another order than the answers."""
    ids, mask = random_ids(2, 40), torch.ones(2, 60, dtype=torch.long)
    ids[1, :7] = PAD
    mask[1, :7] = 0
    cache = new_cache(llama)
    options = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 12}
    ids = llama.generate(ids, past_key_values=cache, attention_mask=mask[:, :40], **options)
    cache.crop(columns - cache.get_seq_length())
    rows = [*range(2 * beams)][::-1]
    cache.reorder_cache(torch.tensor(rows))
    ids, mask = ids[rows][:, :columns], mask.repeat_interleave(beams, dim=0)[rows]
    for _ in range(2):
        shown = mask[:, : ids.shape[1]]
        tokens = shown.sum(dim=1)
        assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == (
            (tokens // CHUNK * CHUNK).tolist()
        )
        cache = new_cache(llama)
        found = cache.find(store, ids, llama, attention_mask=shown, chunk_tokens=CHUNK)
        assert found == ((shown == 0).sum(dim=1) + (tokens - 1) // CHUNK * CHUNK).min()
        options = {"attention_mask": shown, "max_new_tokens": 6}
        answers = llama.generate(ids, past_key_values=cache, **options)
        with reference(llama):
            other = transformers.DynamicCache()
            assert torch.equal(answers, llama.generate(ids, past_key_values=other, **options))
        ids = answers[:, :-1]


def test_a_mask_that_the_caller_writes_to_later_is_a_copy(
    store: quire.ChunkStore, llama: Any, tmp_path: Path
) -> None:
    """A mask of bools was not: what was saved could not be loaded."""
    row = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, row)
    cache.keep(store, row, llama, chunk_tokens=CHUNK)
    ids, mask = padded(row, 5)
    bools = mask.bool()
    later = new_cache(llama)
    assert later.find(store, ids, llama, attention_mask=bools, chunk_tokens=CHUNK) == 37
    bools[:] = True
    later.save(tmp_path / "saved")
    loaded = new_cache(llama)
    loaded.load(tmp_path / "saved")
    rest = {"attention_mask": mask, "position_ids": counted(mask)[:, 37:]}
    expected = recomputed(llama, row, 32)
    for one in (loaded, later):
        assert torch.equal(run(llama, one, ids[:, 37:], **rest), expected)


def test_equal_rows_are_found_once(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(1, 40).repeat(3, 1)
    cache = new_cache(llama)
    run(llama, cache, ids)
    assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == [32] * 3
    assert len(store.list("ram")) == 2
    later = new_cache(llama)
    assert later.find(store, ids, llama, chunk_tokens=CHUNK) == 32
    assert later.kv_cache.get_distinct_token_count() == 32
    assert later.batch_size == 3


def test_nothing_of_others_is_found(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, ids)
    cache.keep(store, ids, llama, chunk_tokens=CHUNK, cache_salt="ann")

    def found(made: Any = llama, **options: Any) -> int:
        asked = {"chunk_tokens": CHUNK, "cache_salt": "ann", **options}
        return new_cache(made).find(store, ids, made, **asked)

    assert found() == 32
    assert found(cache_salt="bob") == found(cache_salt=b"") == found(chunk_tokens=8) == 0
    assert found(model("llama", seed=1)) == 0
    changed = model("llama")
    assert found(changed) == 32
    changed.lm_head.weight[0, 0] += 1  # not even a weight that computes keys
    assert found(changed) == 0


def test_weights_that_torch_does_not_see_change_are_others(store: quire.ChunkStore) -> None:
    """As where PEFT merges an adapter: it adds to `.data`."""
    ids, changing = random_ids(1, 40), model("llama", seed=3)
    cache = new_cache(changing)
    run(changing, cache, ids)
    cache.keep(store, ids, changing, chunk_tokens=CHUNK)
    assert new_cache(changing).find(store, ids, changing, chunk_tokens=CHUNK) == 32
    weight = changing.model.layers[1].mlp.down_proj.weight
    before = weight._version
    weight.data += 0.5
    assert weight._version == before
    assert new_cache(changing).find(store, ids, changing, chunk_tokens=CHUNK) == 0
    weight.data -= 0.5


def test_keys_of_the_weights_before_are_not_kept(store: quire.ChunkStore) -> None:
    """They were, under the digest of the weights after: others found them."""
    ids, changing = random_ids(1, 40), model("llama", seed=3)
    cache = new_cache(changing)
    run(changing, cache, ids)
    changing.model.layers[2].self_attn.k_proj.weight.data *= 1.5
    with pytest.raises(quire.BadStateError, match="keep: weights of layer 2 have changed"):
        cache.keep(store, ids, changing, chunk_tokens=CHUNK)
    assert not store.list("ram")
    cache.reset()
    run(changing, cache, ids)
    assert cache.keep(store, ids, changing, chunk_tokens=CHUNK) == [32]
    later = new_cache(changing)
    assert later.find(store, ids, changing, chunk_tokens=CHUNK) == 32
    changing.model.layers[0].self_attn.q_proj.weight.data *= 1.5
    with pytest.raises(quire.BadStateError, match="keep: weights of layer 0 have changed"):
        later.keep(store, ids, changing, chunk_tokens=CHUNK)


@pytest.mark.parametrize("is_forked", [False, True])
def test_keys_of_weights_that_were_changed_for_one_forward_are_not_kept(
    store: quire.ChunkStore, tmp_path: Path, is_forked: bool
) -> None:
    """And changed back: all samples were those of the beginning."""
    ids, changing = random_ids(1, 40), model("llama", seed=3)
    cache = new_cache(changing)
    run(changing, cache, ids[:, :20])
    weight = changing.model.layers[1].self_attn.k_proj.weight
    before = weight.data.clone()
    weight.data.mul_(-1)
    run(changing, cache, ids[:, 20:30])
    weight.data.copy_(before)
    cache = cache.fork() if is_forked else cache
    run(changing, cache, ids[:, 30:])
    with pytest.raises(quire.BadStateError, match="keep: weights of layer 1 have changed"):
        cache.keep(store, ids, changing, chunk_tokens=CHUNK)
    with pytest.raises(quire.BadStateError, match="save: weights of layer 1 have changed"):
        cache.save(tmp_path / "saved")
    assert not store.list("ram")
    cache.reset()
    run(changing, cache, ids)
    assert cache.keep(store, ids, changing, chunk_tokens=CHUNK) == [32]


class _Tuned(torch.nn.Module):
    """A projection with two adapters, as PEFT's layers are."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.disable_adapters, self.scaling = base, False, {"a": 1.0, "b": 1.0}
        self.active_adapters = ["a"]
        self.lora = torch.nn.ParameterDict(
            {name: torch.full_like(base.weight, step) for name, step in (("a", 0.1), ("b", 0.2))}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(hidden)
        for name in [] if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * torch.nn.functional.linear(hidden, self.lora[name])
        return out


def test_keys_of_another_adapter_are_not_found(store: quire.ChunkStore, tmp_path: Path) -> None:
    """All are weights of one model, whichever is in use."""
    ids, made = random_ids(1, 40), model("llama", seed=3)
    attention = made.model.layers[1].self_attn
    attention.k_proj = tuned = _Tuned(attention.k_proj)

    def found() -> int:
        return new_cache(made).find(store, ids, made, chunk_tokens=CHUNK)

    cache = new_cache(made)
    run(made, cache, ids)
    assert cache.keep(store, ids, made, chunk_tokens=CHUNK) == [32]
    cache.save(tmp_path / "saved")
    assert found() == 32
    for name, value in (
        ("active_adapters", ["b"]),
        ("disable_adapters", True),
        ("scaling", {"a": 0.5, "b": 1.0}),
    ):
        before = getattr(tuned, name)
        setattr(tuned, name, value)
        assert found() == 0, name
        with pytest.raises(quire.BadStateError, match="keep: weights of layer 1 have changed"):
            cache.keep(store, ids, made, chunk_tokens=CHUNK)
        loaded = new_cache(made)
        loaded.load(tmp_path / "saved")
        with pytest.raises(quire.BadStateError, match="another model"):
            run(made, loaded, ids[:, :3])
        setattr(tuned, name, before)
    assert found() == 32


def test_keys_of_a_turn_without_its_adapter_are_not_kept(store: quire.ChunkStore) -> None:
    """As in `with model.disable_adapter():`."""
    ids, made = random_ids(1, 40), model("llama", seed=3)
    attention = made.model.layers[1].self_attn
    attention.k_proj = tuned = _Tuned(attention.k_proj)
    cache = new_cache(made)
    run(made, cache, ids)
    cache.keep(store, ids, made, chunk_tokens=CHUNK)
    found = new_cache(made)
    assert found.find(store, ids, made, chunk_tokens=CHUNK) == 32
    tuned.disable_adapters = True
    more = random_ids(1, 20, seed=1)
    run(made, found, more)
    tuned.disable_adapters = False
    whole = torch.cat([ids[:, :32], more], dim=1)
    with pytest.raises(quire.BadStateError, match="keep: weights of layer 1 have changed"):
        found.keep(store, whole, made, chunk_tokens=CHUNK)
    assert len(store.list("ram")) == 2


_LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i / 2 for i in range(8)],
    },
}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}


@pytest.mark.parametrize(
    ("name", "options"),
    [("phi3", {**_LONGROPE, "hidden_size": 64, "sliding_window": None}), ("llama", _DYNAMIC)],
)
def test_keys_that_depend_on_the_length_of_the_text_are_not_kept(
    store: quire.ChunkStore, name: str, options: dict[str, Any]
) -> None:
    """A short text was given the keys of a long one that begins with the same tokens."""
    made = model(name, **options)
    ids = random_ids(1, 60)
    cache = new_cache(made)
    run(made, cache, ids)
    with pytest.raises(quire.BadArgumentError, match=r"keep\(\) and find\(\) take no model with"):
        cache.keep(store, ids, made, chunk_tokens=CHUNK)
    with pytest.raises(quire.BadArgumentError, match="depends on the length of the text"):
        cache.find(store, ids[:, :20], made, chunk_tokens=CHUNK)
    assert cache.get_seq_length() == 60 and not store.list("ram")


def test_damage_is_a_miss(llama: Any, tmp_path: Path) -> None:
    ids = random_ids(1, 70)
    with quire.ChunkStore(tmp_path / "kv", disk_timeout_ms=60_000) as store:
        cache = new_cache(llama)
        run(llama, cache, ids)
        cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    third = b"".join(int(token).to_bytes(4, "little") for token in ids[0, 32:48])
    (file,) = [each for each in (tmp_path / "kv").rglob("*.qkv") if third in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[int.from_bytes(data[12:16], "little") + 9] ^= 1
    file.write_bytes(data)
    with quire.ChunkStore(tmp_path / "kv", disk_timeout_ms=60_000) as store:
        later = new_cache(llama)
        assert later.find(store, ids, llama, chunk_tokens=CHUNK) == 32
        assert torch.equal(run(llama, later, ids[:, 32:]), recomputed(llama, ids, 32))


def test_layers_that_have_slid_too_far_are_named(store: quire.ChunkStore) -> None:
    made = model("gemma3")
    ids = random_ids(1, 120)
    cache = new_cache(made, max_crop=8)
    run(made, cache, ids[:, :20])
    assert cache.keep(store, ids, made, chunk_tokens=CHUNK) == [16]
    run(made, cache, ids[:, 20:34])
    assert cache.keep(store, ids, made, chunk_tokens=CHUNK) == [32]
    run(made, cache, ids[:, 34:100])
    with pytest.raises(quire.BadStateError, match="max_crop"):
        cache.keep(store, ids, made, chunk_tokens=CHUNK)
    later = new_cache(made)
    assert later.find(store, ids, made, chunk_tokens=CHUNK) == 32
    assert torch.equal(run(made, later, ids[:, 32:]), recomputed(made, ids, 32))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :3] = 0
    with pytest.raises(quire.BadArgumentError, match="several lengths"):
        later.find(store, random_ids(2, 40), made, attention_mask=mask)


def test_what_was_found_is_of_one_model(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, ids)
    cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    with pytest.raises(quire.BadStateError, match="another model"):
        cache.keep(store, ids, model("llama"), chunk_tokens=CHUNK)
    assert cache.find(store, ids, llama, chunk_tokens=CHUNK) == 32
    with pytest.raises(quire.BadStateError, match="another model"):
        run(model("llama"), cache, ids[:, 32:])
    assert cache.get_seq_length() == 32
    assert cache.keep(store, ids, llama, chunk_tokens=CHUNK) == [32]
    forked = cache.fork()
    assert torch.equal(run(llama, forked, ids[:, 32:]), run(llama, cache, ids[:, 32:]))


def test_what_was_found_is_saved_with_its_weights(
    store: quire.ChunkStore, llama: Any, tmp_path: Path
) -> None:
    """Without a forward in between no digest was noted: any model went on, and was kept."""
    ids = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, ids)
    cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    found = new_cache(llama)
    assert found.find(store, ids, llama, chunk_tokens=CHUNK) == 32
    found.save(tmp_path / "saved")
    loaded, other = new_cache(llama), model("llama", seed=1)
    loaded.load(tmp_path / "saved")
    with pytest.raises(quire.BadStateError, match="another model"):
        run(other, loaded, ids[:, 32:])
    with pytest.raises(quire.BadStateError, match="another model"):
        loaded.keep(store, ids, other, chunk_tokens=CHUNK)
    assert torch.equal(run(llama, loaded, ids[:, 32:]), recomputed(llama, ids, 32))


def test_what_cannot_be_told_of_a_model_is_not_saved(
    store: quire.ChunkStore, llama: Any, tmp_path: Path
) -> None:
    """Two modules that call themselves the attention of layer 0."""
    ids = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, ids)
    cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    wrapped: Any = torch.nn.Module()
    wrapped.config, wrapped.own, wrapped.extra = llama.config, llama, torch.nn.Identity()
    wrapped.extra.layer_idx, wrapped.extra.is_causal = 0, True
    wrapped.state_dict = llama.state_dict
    assert cache.find(store, ids, wrapped, chunk_tokens=CHUNK) == 32
    with pytest.raises(quire.BadStateError, match="known after a forward alone"):
        cache.save(tmp_path / "saved")
    run(llama, cache, ids[:, 32:])
    cache.save(tmp_path / "saved")


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_was_found_is_kept_for_the_weights_of_then_alone(
    store: quire.ChunkStore, goes_on: bool
) -> None:
    """Of a model whose attention cannot be told no sample is taken at find()."""
    ids, changing = random_ids(1, 40), model("llama", seed=3)
    cache = new_cache(changing)
    run(changing, cache, ids)
    cache.keep(store, ids, changing, chunk_tokens=CHUNK)
    wrapped: Any = torch.nn.Module()
    wrapped.config, wrapped.own, wrapped.extra = changing.config, changing, torch.nn.Identity()
    wrapped.extra.layer_idx, wrapped.extra.is_causal = 0, True
    wrapped.state_dict = changing.state_dict
    assert cache.find(store, ids, wrapped, chunk_tokens=CHUNK) == 32
    assert cache.fork().keep(store, ids, wrapped, chunk_tokens=CHUNK) == [32]
    changing.model.layers[0].self_attn.q_proj.weight.data *= 1.5
    if goes_on:
        run(changing, cache, ids[:, 32:])
    for one in (cache, cache.fork()):
        with pytest.raises(quire.BadStateError, match="keep: weights of the model have changed"):
            one.keep(store, ids, wrapped, chunk_tokens=CHUNK)
    assert len(store.list("ram")) == 2


def test_of_padding_alone_nothing_is_found(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = mask[1, :4] = 0
    cache = new_cache(llama)
    assert cache.find(store, ids, llama, attention_mask=mask, chunk_tokens=CHUNK) == 0
    assert cache.get_seq_length() == 0 and cache.kv_cache.empty()


def test_a_loaded_cache_is_kept(store: quire.ChunkStore, llama: Any, tmp_path: Path) -> None:
    ids = random_ids(1, 40)
    cache = new_cache(llama)
    run(llama, cache, ids)
    cache.save(tmp_path / "saved")
    loaded = new_cache(llama)
    loaded.load(tmp_path / "saved")
    with pytest.raises(quire.BadStateError, match="another model"):
        loaded.keep(store, ids, model("llama", seed=1), chunk_tokens=CHUNK)
    assert loaded.keep(store, ids, llama, chunk_tokens=CHUNK) == [32]


def test_wrong_calls_change_nothing(store: quire.ChunkStore, llama: Any) -> None:
    ids = random_ids(2, 40)
    cache = new_cache(llama)
    with pytest.raises(quire.BadStateError, match="nothing is held"):
        cache.keep(store, ids, llama)
    run(llama, cache, ids)
    held = cache.kv_cache.state_digest()
    with pytest.raises(quire.BadArgumentError, match=r"shape \(1, 40\)"):
        cache.keep(store, ids[:1], llama)
    with pytest.raises(quire.BadArgumentError, match="another configuration"):
        cache.find(store, ids, model("llama", num_hidden_layers=2))
    with pytest.raises(quire.BadArgumentError, match="rows, columns"):
        cache.find(store, ids[0], llama)
    with pytest.raises(quire.BadArgumentError, match="attention_mask has shape"):
        cache.find(store, ids, llama, attention_mask=torch.ones(2, 3))
    for call in (cache.find, cache.keep):
        with pytest.raises(TypeError, match="input_ids must be a torch tensor, not list"):
            call(store, ids.tolist(), llama)  # type: ignore[operator]
        with pytest.raises(TypeError, match="input_ids must be integers, not torch.float32"):
            call(store, ids.float(), llama)  # type: ignore[operator]
    with pytest.raises(TypeError, match="attention_mask must be a torch tensor, not list"):
        cache.find(store, ids, llama, attention_mask=[1] * 40)  # type: ignore[arg-type]
    with pytest.raises(quire.BadArgumentError, match="timeout must be a number, not str"):
        cache.find(store, ids, llama, timeout="1")  # type: ignore[arg-type]
    mask = torch.ones(2, 40)
    mask[0, 20] = 0
    with pytest.raises(quire.BadArgumentError, match="pad on the left"):
        cache.find(store, ids, llama, attention_mask=mask)
    cache.keep(store, ids, llama, chunk_tokens=CHUNK)
    small = new_cache(llama, token_capacity=64, page_size=16)
    run(llama, small, ids[:1, :20])
    with pytest.raises(quire.OutOfPagesError):
        small.find(store, ids, llama, chunk_tokens=CHUNK)
    assert small.get_seq_length() == 20
    small.kv_cache.check_invariants()
    assert cache.kv_cache.state_digest() == held
    assert cache.find(store, ids[:, :1], llama) == 0, "one column is left to compute"
    assert cache.get_seq_length() == 0
    store.close()
    with pytest.raises(quire.ClosedError):
        cache.find(store, ids, llama)
