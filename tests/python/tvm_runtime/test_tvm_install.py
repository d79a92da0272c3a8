"""quire.tvm.install and uninstall: versions, order, whose objects go where, bad arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_calls import Calls, OneCache, create_arguments, function, unused_kernel
from tvm_ffi import Shape

import quire
import quire.tvm

CACHE_KEY = "quire.tvm.KVCache"


def key_of(thing: Any) -> str:
    return str(type(thing).__tvm_ffi_type_info__.type_key)


def test_another_version_of_tvm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm, "__version__", "0.28.0")
    with pytest.raises(quire.IncompatibleError, match=r"TVM 0\.28\.0.*0\.27\.0\.post1"):
        quire.tvm.install()
    assert not quire.tvm.installed()


def test_names_are_taken_and_given_back() -> None:
    before = function("kv_state_add_sequence")
    quire.tvm.install()
    assert quire.tvm.installed()
    assert not function("kv_state_add_sequence").same_as(before)
    quire.tvm.uninstall()
    assert not quire.tvm.installed()
    assert function("kv_state_add_sequence").same_as(before)
    with pytest.raises(quire.BadStateError, match="not installed"):
        quire.tvm.uninstall()


def test_a_second_install_is_refused(installed: None) -> None:
    with pytest.raises(quire.BadStateError, match="installed already"):
        quire.tvm.install(tvm_window_span=False)


def test_uninstall_does_not_undo_what_came_after_it(installed: None) -> None:
    name = "vm.builtin.kv_state_clear"
    ours = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, unused_kernel, override=True)
    with pytest.raises(quire.BadStateError, match="kv_state_clear"):
        quire.tvm.uninstall()
    assert quire.tvm.installed()
    tvm_ffi.register_global_func(name, ours, override=True)


def test_objects_that_are_not_ours_go_to_the_previous_function(installed: None) -> None:
    calls = Calls()
    for thing in (None, 3, Shape([1])):
        with pytest.raises(TypeError, match="KVState"):
            calls.add_sequence(thing, 0)


def test_our_objects_outlive_the_installation() -> None:
    quire.tvm.install()
    cache = OneCache()
    quire.tvm.uninstall()
    cache.add_sequence(0)
    cache.forward([0], [3])
    assert cache.get_sequence_length(0) == 3
    # The name is TVM's again, which knows no such object.
    with pytest.raises(TypeError, match="KVState"):
        function("kv_state_add_sequence")(cache.cache, 1)


def test_an_object_of_the_wrong_kind_is_named(installed: None) -> None:
    calls = Calls()
    state = calls.rnn_state_create(1, 1, 1, [unused_kernel], [unused_kernel], [tvm.runtime.tensor(np.zeros(2, "float32"))])
    with pytest.raises(TypeError, match="quire.tvm.RNNState"):
        calls.attention_kv_cache_empty(state)


def test_creation_takes_28_or_29_arguments(installed: None) -> None:
    create = function("paged_attention_kv_cache_create")
    arguments = create_arguments()
    assert len(arguments) == 28
    assert key_of(create(*arguments)) == CACHE_KEY
    assert key_of(create(*arguments, unused_kernel)) == CACHE_KEY
    for wrong in (arguments[:-1], [*arguments, unused_kernel, unused_kernel]):
        with pytest.raises(quire.BadArgumentError, match="arguments; there are 28"):
            create(*wrong)


def _bad_tensor() -> Any:
    return tvm.runtime.tensor(np.zeros((), "int32"))


@pytest.mark.parametrize(
    "index, value, message",
    [
        (0, lambda: Shape([8, 64, 64, 4]), "4 entries"),
        (0, lambda: Shape([0, 64, 64, 4, 0]), "max_num_sequences"),
        (0, lambda: Shape([8, 0, 64, 4, 0]), "token_capacity"),
        (0, lambda: Shape([8, 64, 0, 4, 0]), "prefill_chunk_size"),
        (0, lambda: Shape([8, 64, 64, 0, 0]), "page_size"),
        (0, lambda: Shape([8, 64, 64, 4, 2]), "support_sliding_window"),
        (0, lambda: Shape([8, 64, 64, 4, 0, 0]), "layer_sliding_window_size"),
        (1, lambda: Shape([0, 1, 2]), "pipeline stage"),
        (1, lambda: Shape([0, 3]), "attention kinds"),
        (2, lambda: 0, "num_qo_heads"),
        (2, lambda: 3.5, "num_qo_heads"),
        (3, lambda: 3, "kv_heads"),
        (4, lambda: -1, "qk_head_dim"),
        (5, lambda: 4, "v_head_dim"),
        (6, lambda: Shape([0]), "attention kinds"),
        (6, lambda: Shape([0, 7]), "kind 7"),
        (6, lambda: Shape([0, 2]), "kind 2, LinearAttn"),
        (8, lambda: 3, "rope mode"),
        (9, lambda: 0.0, "rotary scale"),
        (10, lambda: -1.0, "rotary theta"),
        (12, lambda: None, "dtype and device"),
        (12, _bad_tensor, "int32"),
        (13, lambda: 1, "append kernel"),
        (14, lambda: "x", "MLA append kernel"),
        (15, lambda: ["cutlass", unused_kernel], "tirx"),
        (16, lambda: ["tirx"], "tirx"),
        (22, lambda: 5, "attention kernel"),
        (23, lambda: [], "merge kernels"),
        (23, lambda: [1], "merge kernels"),
        (24, lambda: 1, "kernel"),
        (27, lambda: 1, "kernel"),
    ],
)
def test_a_bad_argument_is_named(installed: None, index: int, value: Any, message: str) -> None:
    arguments = create_arguments()
    arguments[index] = value()
    with pytest.raises(quire.BadArgumentError, match=message):
        function("paged_attention_kv_cache_create")(*arguments)
