"""The options of engines, answers and chunk stores. Each is written here once: its name, type,
default, meaning, and how the command line takes it. The signatures of :class:`quire.Engine` and
:class:`quire.ChunkStore`, docstrings, flags and their `--help`, the environment, the file of
`quire serve --config`, /set, the fields of a line of `--file` and the tables of docs/program.md and
docs/store.md are made from these entries.

A new option needs an entry here, a member in quire/engine.h (ForEachOption) or quire/chunk_store.h
(and a line in src/ffi/store.cc), and what uses it.
"""

# Without `from __future__ import annotations`: the entries are read from the annotations. Types
# whose modules load the library are texts.
import dataclasses
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from quire import _json_values as values
from quire._json_values import Kind
from quire._numbers import milliseconds
from quire._ranges import (
    Integer,
    Number,
    activations,
    addresses,
    cache_salt,
    kernel_path,
    key_file,
    kv_dtype,
    place,
    readable_file,
    secret_file,
    size,
    switch,
)

if TYPE_CHECKING:
    from quire.grammar import CompiledGrammar, Grammar
    from quire.store import ChunkStore

Group = Literal[
    "engine", "serve", "store", "store details", "prefill", "connection", "sampling", "samples"
]


@dataclasses.dataclass(frozen=True)
class Flag:
    """How the command line takes an option.

    help: the text of `--help` and of the tables in docs/program.md; more: the tables' alone.
    reads: the value of a text, or raises argparse.ArgumentTypeError.
    name: where it is not the option's.
    group: which commands have it, and under which title.
    action: of argparse, for flags without a value or with several.
    in_chat: whether /set of `quire chat` takes it.
    """

    help: str
    metavar: str | None = None
    reads: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    name: str | None = None
    group: Group = "engine"
    action: Literal["store", "store_true", "store_false", "append"] = "store"
    in_chat: bool = False
    more: str = ""


@dataclasses.dataclass(frozen=True)
class ModelOwn:
    """An option that generation_config.json of a model may have. `words`: what it must be there;
    off: the value that changes nothing."""

    words: str
    off: Any


# Which part takes an option: the engine, its answers, the store that an engine makes, its use,
# processes that compute prompts for it, connections to and from them, or quire.Engine itself.
Part = Literal["engine", "store", "use", "peers", "connection", "answer", "binding"]


@dataclasses.dataclass(frozen=True, repr=False)
class Option:
    """One option. `kind`: its value in JSON; None where it is no field of a line. `field`: its name
    in the part that takes it, where that is another one. `most_seconds`: the option is a time,
    which the library takes as milliseconds up to this."""

    default: Any
    doc: str
    flag: Flag | None = None
    part: Part = "engine"
    kind: Kind | None = None
    own: ModelOwn | None = None
    field: str | None = None
    most_seconds: float | None = None

    def __repr__(self) -> str:
        return f"Option({self.default!r})"


Path = str | os.PathLike[str]
_N = "N"


Eviction = Literal["lru", "s3fifo", "cost"]
WritePolicy = Literal["through", "selective", "back"]
Durability = Literal["none", "async", "os", "sync"]
FolderUse = Literal["create", "existing", "look"]
Numa = Literal["auto", "off"]
_CENTURIES = 1e12  # seconds: longer than any store is there
_YEAR = 365 * 86400.0


class ChunkStoreOptions(TypedDict, total=False):
    """The options of :class:`quire.ChunkStore`, beside its directory.

    OPTIONS
    """

    folder_use: Annotated[
        FolderUse,
        Option(
            "create",
            '"create" makes the folder if it is absent; "existing" raises NotFoundError unless it '
            'is the folder of a store; "look" does the same, and changes nothing in it: what is '
            "damaged or expired stays, and puts fail.",
        ),
    ]
    redis: Annotated[
        str,
        Option(
            "",
            '"HOST:PORT", several with commas (seeds of a cluster), or "unix:PATH"; or all of it '
            'in one word, "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX", percent-encoded; with '
            'TLS "rediss://...?ca=FILE" (:func:`quire.redis_url.parse` has all parameters).',
        ),
    ]
    ram_bytes: Annotated[
        int,
        Option(0, "memory for chunks; 0 = none (an engine's own pages come first anyway)."),
    ]
    disk_bytes: Annotated[
        int,
        Option(0, "the most that the folder takes; 0 = what is free there, less a tenth."),
    ]
    durability: Annotated[
        Durability,
        Option(
            "os",
            'what a put survives: "none" and "async" nothing, "os" the end of the process, "sync" '
            "a loss of power.",
        ),
    ]
    key: Annotated[
        bytes,
        Option(
            b"",
            "at least 16 bytes: chunks are signed with it, and those without its signature are not "
            'taken; b"" = not signed.',
        ),
    ]
    redis_username: Annotated[str, Option("", "the user at Redis, if not in the URL.")]
    redis_password: Annotated[str, Option("", "the password at Redis, if not in the URL.")]
    redis_prefix: Annotated[str, Option("", "stands before every key, if not in the URL.")]
    redis_ttl: Annotated[
        float,
        Option(
            0,
            "seconds after which Redis removes what is written there; 0 = never.",
            field="redis_ttl_ms",
            most_seconds=_CENTURIES,
        ),
    ]
    redis_tls: Annotated[bool, Option(False, "with TLS.")]
    redis_tls_ca_file: Annotated[
        Path,
        Option("", "PEM file of the authorities for servers' certificates; \"\" = the system's."),
    ]
    redis_tls_cert_file: Annotated[Path, Option("", "PEM file of this client's certificate.")]
    redis_tls_key_file: Annotated[Path, Option("", "PEM file of its private key.")]
    redis_tls_server_name: Annotated[
        str, Option("", "the name in servers' certificates; \"\" = each server's host.")
    ]
    redis_tls_verify: Annotated[
        bool, Option(True, "False accepts any certificate: any machine may pose as the server.")
    ]
    redis_connect_timeout_ms: Annotated[
        int, Option(500, "milliseconds that a connection to Redis may take.")
    ]
    redis_timeout_ms: Annotated[int, Option(2000, "milliseconds that Redis has for an answer.")]
    redis_replicas: Annotated[
        int,
        Option(
            0,
            "a put is acknowledged when this number of replicas have it; 0 = when the server has.",
        ),
    ]
    eviction: Annotated[
        Eviction,
        Option(
            "lru",
            'which chunk goes first when a tier is full: "lru" the one that was not used for the '
            'longest time, "s3fifo" what was used once, so that one scan does not empty the tier, '
            '"cost" what saves least seconds per byte.',
        ),
    ]
    write_policy: Annotated[
        WritePolicy,
        Option(
            "through",
            'when the folder and Redis get a chunk: "through" at once, "selective" when it was put '
            'or found `admit_after` times, "back" when RAM gives it up, at flush() and at close().',
        ),
    ]
    admit_after: Annotated[int, Option(2, 'with "selective"; at least 1.')]
    promote: Annotated[
        bool, Option(True, "what came from a slow tier is kept in the faster ones, too.")
    ]
    priority: Annotated[
        int,
        Option(
            50,
            "priority of chunks that are put, 0 to 100: those of lower priority are evicted first.",
        ),
    ]
    pin_timeout: Annotated[
        float,
        Option(
            60.0,
            "seconds after which a pin ends by itself.",
            field="pin_timeout_ms",
            most_seconds=_YEAR,
        ),
    ]
    use_uring: Annotated[
        bool, Option(True, "io_uring for the folder; False, or where there is none: threads.")
    ]
    disk_timeout_ms: Annotated[int, Option(2000, "milliseconds that the folder has for a chunk.")]
    queue_bytes: Annotated[
        int, Option(256 << 20, "memory of puts that wait to be written; more are refused.")
    ]
    fetch_bytes: Annotated[
        int, Option(1 << 30, "memory of fetches under way and not yet given back.")
    ]
    scrub_bytes_per_second: Annotated[
        int, Option(0, "reads and verifies what lies in the folder, at this rate; 0 = never.")
    ]


class EngineOptions(TypedDict, total=False):
    """The options of :class:`quire.Engine`.

    OPTIONS
    """

    dtype: Annotated[
        Any,
        Option(
            "bfloat16",
            '"bfloat16" or "float32": of products, and of stored keys and values unless kv_dtype '
            "says otherwise.",
            Flag(
                "type of products, and of KV without --kv-dtype (default: bfloat16)",
                choices=("bfloat16", "float32"),
            ),
        ),
    ]
    activations: Annotated[
        Any,
        Option(
            "int8",
            '"int8", "bfloat16" or "float32": of rows that meet quantised weights (GGUF, GPTQ, '
            "AWQ, ...). int8 is the fastest; with the others answers are nearer to those of the "
            "weights before they were quantised.",
            Flag(
                "type of rows that meet quantised weights: int8, bfloat16 or float32 (default: "
                "int8)",
                "TYPE",
                activations,
                more="int8 is the fastest; with bfloat16 answers are nearer to those of the "
                "weights before they were quantised ([what it costs](models.md#activations)). No "
                "effect on other weights, nor on FP8",
            ),
        ),
    ]
    kv_dtype: Annotated[
        str,
        Option(
            "",
            '"bfloat16", "float32", "float16", "int8" or "fp8", or two of them for keys and for '
            'values: "bfloat16,int8". The narrow ones are codes with a scale per token and head.',
            Flag(
                "type of stored keys and values: bfloat16, float32, float16, int8 or fp8; two with "
                "a comma for keys and values (default: as --dtype)",
                "TYPE",
                kv_dtype,
                more="int8 and fp8 (e4m3) are codes with a float32 scale per token and head: a "
                "little over half the memory of bfloat16",
            ),
        ),
    ]
    threads: Annotated[
        int,
        Option(
            0,
            "0 = one per core that the process may use (affinity, CPU quota).",
            Flag(
                "number of threads; 0: one per core, within the CPU quota (default)",
                _N,
                Integer(0, 1024),
            ),
        ),
    ]
    numa: Annotated[
        Numa,
        Option(
            "off",
            '"auto": where the process may use several NUMA nodes, threads are bound to them, and '
            "weights and KV are placed on them; answers do not change.",
            Flag(
                "auto: bind threads to NUMA nodes and place weights and KV on them, where there "
                "are several (default: off)",
                choices=("auto", "off"),
                more="[What it does](notes/speed.md#numa-nodes); `quire inspect` shows the nodes",
            ),
        ),
    ]
    page_size: Annotated[
        int,
        Option(
            0,
            "tokens per page of KV; 0 = chosen for the model.",
            Flag("tokens per page of KV; 0: by the model (default)", _N, Integer(0, 2**20)),
        ),
    ]
    kv_bytes: Annotated[
        int,
        Option(
            0,
            "memory for KV pages; 0 = one sequence of all the model's positions, at most a quarter "
            "of the machine's memory, and fewer where that is not free.",
            Flag(
                "memory for KV: 512M, 2G, ... (default: one sequence of all the model's positions)",
                "SIZE",
                size,
                more="By default at most a quarter of the machine, and no more than is free",
            ),
        ),
    ]
    state_bytes: Annotated[
        int,
        Option(
            0,
            "models with recurrent layers: memory for the states that the prefix cache keeps, "
            "beside those of samples in work; 0 = at most 128 states and an eighth of the free "
            "memory.",
        ),
    ]
    prefill_chunk: Annotated[
        int,
        Option(
            512,
            "most new tokens of one step.",
            Flag("at most N new tokens per step (default: 512)", _N, Integer(1, 2**20)),
        ),
    ]
    max_num_sequences: Annotated[
        int,
        Option(
            64,
            "most samples in work at a time; more wait.",
            Flag("at most N answers computed at a time (default: 64)", _N, Integer(1, 2**20)),
        ),
    ]
    max_waiting: Annotated[
        int,
        Option(
            65536,
            "most requests that wait, beside those by which the engine learns documents. They come "
            "in by turns of their turn_group.",
        ),
    ]
    max_step_ms: Annotated[
        int,
        Option(
            100,
            "while samples decode, prompts are cut so that few steps take longer, but to no less "
            "than 16 tokens of a step: the most that the next tokens of others wait for them.",
            Flag(
                "while answers are computed, long prompts are cut so that the next token of each "
                "answer waits at most about this long (default: 100)",
                "MS",
                Integer(1, 10**6),
                group="serve",
            ),
        ),
    ]
    prefix_cache: Annotated[
        bool,
        Option(
            True,
            "keep the KV of finished answers, and reuse the longest common prefix.",
            Flag(
                "do not keep the KV of earlier prompts and answers",
                name="--no-prefix-cache",
                action="store_false",
            ),
        ),
    ]
    speculate: Annotated[
        str | None,
        Option(
            None,
            "guess the next tokens and verify them in one forward, which changes no bit of an "
            'answer: "ngram" (what followed earlier in prompt and answer) or "model" (a smaller '
            'one); "none" by default, with a draft_model "model".',
            Flag(
                "guess the next tokens from the text so far or with a smaller model; answers do "
                "not change (default: model with --draft-model, else none)",
                choices=("none", "ngram", "model"),
            ),
        ),
    ]
    draft_model: Annotated[
        Path | None,
        Option(
            None,
            "the smaller model's folder; its tokens are the same.",
            Flag(
                "folder of the smaller model",
                "DIR",
                place,
                more="It has the same tokens; ids may be missing in either",
            ),
        ),
    ]
    draft_tokens: Annotated[
        int,
        Option(
            8,
            "most guesses of a step.",
            Flag("at most N guesses per step (default: 8)", _N, Integer(1, 255)),
        ),
    ]
    draft_branches: Annotated[
        int,
        Option(
            2,
            "alternatives that are followed.",
            Flag("alternatives to follow (default: 2)", _N, Integer(1, 16)),
        ),
    ]
    max_tree_nodes: Annotated[
        int,
        Option(
            0,
            "guesses of all samples in a step, and one more for each sample; 0 = 64 if speculate "
            "or draft_model is given. Recurrent layers keep a state for each.",
            Flag(
                "room for N guesses of all answers in a step (default: 64 with --speculate or "
                "--draft-model, else 0: then no request can have guesses)",
                _N,
                Integer(0, 2**16),
            ),
        ),
    ]
    blend_piece: Annotated[
        int,
        Option(
            0,
            "most tokens of a piece of a prompt with `blend`, which a step takes beside "
            "prefill_chunk others; 0 = no prompt can blend. 2048 is a good number.",
            Flag(
                "at most N tokens of documents in a step (default: 2048 where prompts blend, else "
                "0)",
                _N,
                Integer(0, 2**20),
            ),
        ),
    ]
    blend_unverified: Annotated[
        bool,
        Option(
            False,
            "blend although no verdict of `quire blend eval` allows it for this model.",
            Flag(
                "blend although no verdict of `quire blend eval` allows it for this model",
                action="store_true",
            ),
            part="binding",
        ),
    ]
    exact: Annotated[
        bool,
        Option(
            False,
            "refuse every prompt whose answer may be approximate: `blend` with a ratio below 1.",
            Flag(
                "refuse answers that may be approximate: a blend with a ratio below 1",
                action="store_true",
            ),
            part="binding",
        ),
    ]
    kernel_path: Annotated[
        str,
        Option(
            "",
            "one of :func:`quire.kernel_paths`; the best one if empty.",
            Flag(
                "a kernel path that `quire inspect` lists (default: the fastest)",
                "NAME",
                kernel_path,
            ),
        ),
    ]
    kv_store: Annotated[
        "ChunkStore | None",
        Option(
            None,
            "a :class:`quire.ChunkStore` in which KV outlives the engine; the caller closes it. "
            "Not beside kv_dir, kv_redis or kv_ram_bytes, the tiers of a store of the engine's "
            "own.",
            part="store",
        ),
    ]
    kv_dir: Annotated[
        Path | None,
        Option(
            None,
            "a folder in which KV outlives the engine.",
            Flag(
                "keep KV in DIR and reuse what is there",
                "DIR",
                place,
                group="store",
                more="The folder is made if absent; several processes may share it",
            ),
            part="store",
            field="directory",
        ),
    ]
    kv_redis: Annotated[
        str,
        Option(
            "",
            '"HOST:PORT" of Redis, several of a cluster or a URL (as ``ChunkStore.redis``).',
            Flag(
                "keep KV in Redis; several addresses with commas are a cluster; or a URL: "
                "redis://USER:PASSWORD@HOST:PORT/?prefix=PREFIX, with TLS rediss://...?ca=FILE",
                "HOST:PORT",
                place,
                group="store",
            ),
            part="store",
            field="redis",
        ),
    ]
    kv_ram_bytes: Annotated[
        int,
        Option(
            0,
            "memory for stored KV, beside the pages; 0 = none.",
            part="store",
            field="ram_bytes",
        ),
    ]
    kv_dir_bytes: Annotated[
        int,
        Option(
            0,
            "the most that kv_dir takes; 0 = the free space, less a tenth.",
            Flag(
                "size limit of DIR (default: the free space, less a tenth)",
                "SIZE",
                size,
                name="--kv-quota",
                group="store details",
            ),
            part="store",
            field="disk_bytes",
        ),
    ]
    kv_durability: Annotated[
        str,
        Option(
            "os",
            '"none", "async", "os" or "sync".',
            Flag(
                "durability of stored KV: none, async (neither survives a crash), os (survives the "
                "process, default), sync (survives power loss)",
                choices=get_args(Durability),
                group="store details",
            ),
            part="store",
            field="durability",
        ),
    ]
    kv_key_file: Annotated[
        Path | None,
        Option(
            None,
            "a file whose content, at least 16 bytes, signs the chunks.",
            Flag(
                "sign stored KV with the key in FILE (at least 16 bytes); ignore unsigned or "
                "wrongly signed KV",
                "FILE",
                key_file,
                group="store details",
            ),
            part="store",
            field="key",
        ),
    ]
    kv_load_timeout: Annotated[
        float,
        Option(
            2.0,
            "seconds that a request waits for the store at most.",
            Flag(
                "a prompt waits for stored KV at most this long (default: 2)",
                "SECONDS",
                Number(0, 86400),
                group="store",
            ),
            part="use",
            field="load_timeout_ms",
        ),
    ]
    kv_io_timeout: Annotated[
        float,
        Option(
            2.0,
            "seconds that kv_dir and kv_redis have for an answer; for a slow disk or a busy server "
            "more than by default, with a kv_load_timeout to match.",
            Flag(
                "the folder and Redis have this long for an answer, then stored KV is a miss and "
                "new KV is not stored (default: 2)",
                "SECONDS",
                Number(0.001, 86400),
                group="store",
            ),
            part="store",
            field="io_timeout",
        ),
    ]
    kv_load_always: Annotated[
        bool,
        Option(
            False,
            "load even what is predicted to be computed sooner.",
            part="use",
            field="load_always",
        ),
    ]
    kv_write: Annotated[
        bool,
        Option(
            True,
            "put computed KV into the store; False: only look for it there.",
            Flag(
                "look for stored KV and store none",
                name="--kv-read-only",
                group="store",
                action="store_false",
            ),
            part="use",
            field="write",
        ),
    ]
    prefill_from: Annotated[
        Sequence[str] | str,
        Option(
            (),
            "processes that compute prompts for this engine (:meth:`Engine.serve_prefill`, `quire "
            'prefill`): "HOST:PORT", "ucx:HOST:PORT" or "unix:PATH", at most 64; or a text with '
            "commas between them. Answers do not change.",
            Flag(
                "let the processes at these addresses compute prompts, where `quire prefill` or "
                "`quire serve --prefill-listen` runs with the same model: HOST:PORT, "
                "ucx:HOST:PORT or unix:PATH",
                "ADDR[,ADDR...]",
                addresses,
                group="prefill",
                more="Answers do not change",
            ),
            part="peers",
            field="addresses",
        ),
    ]
    prefill_remote: Annotated[
        str,
        Option(
            "auto",
            'which prompts they compute: "auto" (those that come sooner so, as predicted from the '
            'measured speeds), "always" (all, while one is there) or "never".',
            Flag(
                "which prompts they compute: those that are predicted to come sooner so (auto, "
                "default), always, or never",
                choices=("auto", "always", "never"),
                group="prefill",
            ),
            part="peers",
            field="when",
        ),
    ]
    on_peer_loss: Annotated[
        str,
        Option(
            "recompute",
            "a prompt that a peer does not finish, because it is gone, late or refuses: "
            '"recompute" keeps what came and computes the rest here, "fail" ends the request with '
            "the reason.",
            Flag(
                "when a process does not finish a prompt: compute the rest here (recompute, "
                "default), or end the answer with an error (fail)",
                choices=("recompute", "fail"),
                group="prefill",
            ),
            part="peers",
            field="on_loss",
        ),
    ]
    prefill_timeout: Annotated[
        float,
        Option(
            120.0,
            "seconds that a peer has for a prompt, from asking to the last row.",
            Flag(
                "a process has this time for a prompt (default: 120)",
                "SECONDS",
                Number(0.001, 86400),
                group="prefill",
            ),
            part="peers",
            field="timeout_ms",
        ),
    ]
    prefill_streams: Annotated[
        int,
        Option(
            1,
            "TCP streams of the connection to each process of `prefill_from`, 1 to 16. Several may "
            "carry more through a network than one does. Over unix sockets and UCX there is one.",
            Flag(
                "TCP streams to each process of --prefill-from, 1 to 16 (default: 1)",
                "N",
                Integer(1, 16),
                group="prefill",
                more="Over unix sockets and UCX there is one",
            ),
            part="peers",
            field="streams",
        ),
    ]
    staging_bytes: Annotated[
        int,
        Option(
            0,
            "with prefill_from, memory for keys and values that arrive and are not in their pages "
            "yet, whatever the number of processes and prompts; 0 = 64 MiB. The memory plan counts "
            "it.",
            Flag(
                "memory for what arrives and is not in its pages yet (default: 64M)",
                "SIZE",
                size,
                group="prefill",
            ),
        ),
    ]
    sending_bytes: Annotated[
        int,
        Option(
            0,
            "for an engine that serves prefill, memory for keys, values and states that other "
            "processes have not taken yet, a quarter of it for one process; 0 = 128 MiB, which the "
            "memory plan does not count.",
        ),
    ]
    peer_secret_file: Annotated[
        Path | None,
        Option(
            None,
            "a file whose content, at least 16 bytes, both sides of a connection must have. This "
            "or TLS is needed for addresses that other machines reach, and for a cache_salt over "
            "TCP. Without TLS, what is sent is not encrypted.",
            Flag(
                "both sides must have the content of FILE (at least 16 bytes); this or TLS is "
                "needed for addresses that other machines reach, and for --cache-salt over TCP",
                "FILE",
                secret_file,
                group="connection",
                more="It is not sent. Without TLS, what is sent is not encrypted",
            ),
            part="connection",
        ),
    ]
    peer_tls_ca_file: Annotated[
        Path | None,
        Option(
            None,
            "with it and the next two, all of them PEM, connections over TCP use TLS: an authority "
            "in this file must have signed the certificates of both sides.",
            Flag(
                "TLS between both sides, whose certificates an authority in FILE signed; goes with "
                "the next two",
                "FILE",
                readable_file,
                group="connection",
                more="All are PEM. Not for unix:PATH, and there is none over UCX",
            ),
            part="connection",
        ),
    ]
    peer_tls_cert_file: Annotated[
        Path | None,
        Option(
            None,
            "this side's certificate, for both directions.",
            Flag(
                "this side's certificate; that of a process that listens must be for the address "
                "that others give",
                "FILE",
                readable_file,
                group="connection",
            ),
            part="connection",
        ),
    ]
    peer_tls_key_file: Annotated[
        Path | None,
        Option(
            None,
            "the private key of that certificate.",
            Flag(
                "private key of that certificate",
                "FILE",
                readable_file,
                group="connection",
            ),
            part="connection",
        ),
    ]
    peer_tls_server_name: Annotated[
        str,
        Option(
            "",
            "the name in the certificates of the processes of `prefill_from`; \"\" = each one's "
            "address.",
            Flag(
                "the name in the certificates of --prefill-from (default: each one's address)",
                "NAME",
                place,
                group="connection",
            ),
            part="connection",
        ),
    ]
    peer_dead_after: Annotated[
        float,
        Option(
            3.0,
            "seconds without a sign of life after which the other side counts as dead.",
            Flag(
                "the other side counts as dead after this time without a sign of life (default: 3)",
                "SECONDS",
                Number(1, 86400),
                group="connection",
            ),
            part="connection",
        ),
    ]


_LIMIT_OF_TOKENS = """most new tokens; 0 computes the prompt and keeps its KV. None (default): what
there is room for in the model's positions and the engine's pages; with a window, which has no such
end, as many as the model has positions. Where a model's rotations change after its original length
(LongRoPE, dynamic NTK) the room ends there, unless that leaves less than a quarter of it."""
_GRAMMAR = """what the answer must look like: a :class:`quire.Grammar`, what
:meth:`Engine.compile_grammar` made of one, or what makes one, such as
{"json_schema": {...}}, {"json_object": True}, {"regex": "..."}, {"choice": ["a", "b"]} or
{"grammar": "root ::= ..."}. It holds by construction for every answer that ends by itself ("stop");
log-probabilities are those of the allowed tokens. Needs the package xgrammar (UnavailableError); an
answer that no token can go on raises BadArgumentError."""


def _answer(
    doc: str,
    kind: Kind | None = None,
    flag: Flag | None = None,
    own: ModelOwn | None = None,
    field: str | None = None,
) -> Option:
    """An option of answers. None of them has a default here: where one is not given, it is the
    model's own or the library's."""
    return Option(None, doc, flag, "answer", kind, own, field)


class SamplingOptions(TypedDict, total=False):
    """How an answer is drawn. A draw depends on logits, history, seed and position alone.

    Where temperature, top_k, top_p, min_p or repetition_penalty is not given, it is the model's own
    (:attr:`Engine.model_sampling`); a model without them is greedy.

    OPTIONS
    """

    max_tokens: Annotated[
        int | None,
        _answer(
            _LIMIT_OF_TOKENS,
            values.LIMIT,
            Flag(
                "at most N new tokens (default: {most_tokens})",
                _N,
                Integer(1),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    greedy: Annotated[
        bool,
        _answer(
            "True takes the most likely token and nothing of the model's own sampling.",
            values.BOOLEAN,
            Flag(
                "always take the most likely token; ignore the model's own sampling options",
                reads=switch,
                group="sampling",
                action="store_true",
                in_chat=True,
            ),
        ),
    ]
    temperature: Annotated[
        float,
        _answer(
            "0 takes the most likely token.",
            values.NUMBER,
            Flag(
                "sampling temperature; 0: the most likely token",
                "T",
                Number(0),
                group="sampling",
                in_chat=True,
            ),
            ModelOwn("a number of at least 0", 0.0),
        ),
    ]
    top_k: Annotated[
        int,
        _answer(
            "draws from the k most likely tokens; 0: from all.",
            values.INTEGER,
            Flag(
                "only the K most likely tokens; 0: all",
                "K",
                Integer(0),
                group="sampling",
                in_chat=True,
            ),
            ModelOwn("an integer of at least 0 (0 or -1: off)", 0),
        ),
    ]
    top_p: Annotated[
        float,
        _answer(
            "draws from the most likely tokens up to this total probability; 1: from all.",
            values.NUMBER,
            Flag(
                "only the most likely tokens, up to a total probability of P",
                "P",
                Number(0, 1, above=True),
                group="sampling",
                in_chat=True,
            ),
            ModelOwn("a number above 0 and at most 1", 1.0),
        ),
    ]
    min_p: Annotated[
        float,
        _answer(
            "draws from tokens with at least this part of the best one's probability; 0: from all.",
            values.NUMBER,
            Flag(
                "only tokens with at least P times the probability of the best",
                "P",
                Number(0, 1),
                group="sampling",
                in_chat=True,
            ),
            ModelOwn("a number from 0 to 1", 0.0),
        ),
    ]
    repetition_penalty: Annotated[
        float,
        _answer(
            "over prompt and answer; 1: off.",
            values.NUMBER,
            Flag(
                "penalty on tokens of prompt and answer; 1: off",
                "X",
                Number(0, above=True),
                group="sampling",
                in_chat=True,
            ),
            ModelOwn("a number above 0", 1.0),
        ),
    ]
    presence_penalty: Annotated[
        float,
        _answer(
            "once for each token of the answer; 0: off.",
            values.NUMBER,
            Flag(
                "penalty on tokens of the answer; 0: off",
                "X",
                Number(),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    frequency_penalty: Annotated[
        float,
        _answer(
            "the same, once per occurrence.",
            values.NUMBER,
            Flag(
                "the same, once per occurrence; 0: off",
                "X",
                Number(),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float], _answer("added to the logits of single token ids.", values.LOGIT_BIAS)
    ]
    seed: Annotated[
        int | None,
        _answer(
            "any number of 64 bits; None (default): one is drawn, and :attr:`Result.seed` has it.",
            values.SEED,
            Flag(
                "0 to 2^64 - 1 (default: random; --json prints it)",
                _N,
                Integer(0, 2**64 - 1),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    n: Annotated[
        int,
        _answer(
            "samples per prompt.",
            values.INTEGER,
            Flag(
                "with --json or --file: answers per prompt",
                _N,
                Integer(1, 2**20),
                group="samples",
            ),
        ),
    ]
    logprobs: Annotated[
        int | None,
        _answer(
            "0 (default) gives the log-probability of each token, k those of the k best ones as "
            "well, None none.",
            values.INTEGER_OR_NULL,
            Flag(
                "with --json or --file: log-probabilities of the tokens and of the K best",
                "K",
                Integer(0, 256),
                group="samples",
            ),
        ),
    ]
    ignore_eos: Annotated[
        bool,
        _answer(
            "continue after the end-of-answer token.",
            values.BOOLEAN,
            Flag("continue after the end-of-answer token", group="sampling", action="store_true"),
        ),
    ]
    stop: Annotated[
        str | Sequence[str | Sequence[int]],
        _answer(
            "texts, or lists of token ids, that end the answer and are cut from it.",
            values.STOPS,
            Flag(
                "end the answer before TEXT; may be repeated",
                "TEXT",
                place,
                group="sampling",
                action="append",
            ),
        ),
    ]
    window: Annotated[
        int,
        _answer(
            "endless text: a token sees the first `sinks` tokens and the last window - sinks, and "
            "prompt and answer may pass the model's positions; 0 (default): it sees all.",
            values.INTEGER,
            Flag(
                "endless text: a token sees N tokens, the sinks and the last ones; 0: all tokens",
                _N,
                Integer(0),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    sinks: Annotated[
        int,
        _answer(
            "with a window: the first tokens of the text, which stay visible.",
            values.INTEGER,
            Flag(
                "with --window: the first N tokens of the text always stay visible",
                _N,
                Integer(0),
                group="sampling",
                in_chat=True,
            ),
        ),
    ]
    cache_salt: Annotated[
        str | bytes,
        _answer(
            "requests with equal salts reuse each other's KV, others never do; a text or bytes.",
            values.SALT,
            Flag(
                "share KV only with requests of the same salt, in memory and in the store",
                "TEXT",
                cache_salt,
                group="sampling",
            ),
        ),
    ]
    speculate: Annotated[
        str,
        _answer(
            "how tokens are guessed, instead of what the engine was made with: as of the engine, "
            "with draft_tokens and draft_branches.",
            values.DRAFT_KIND,
            field="draft",
        ),
    ]
    draft_tokens: Annotated[int, _answer("with speculate: most guesses of a step.", values.INTEGER)]
    draft_branches: Annotated[
        int, _answer("with speculate: alternatives that are followed.", values.INTEGER)
    ]
    prediction: Annotated[
        str | Sequence[int],
        _answer(
            "a text or token ids that the answer is likely to repeat in parts, at most 65536 "
            "tokens: guesses come from it as well. It changes no answer, and needs max_tree_nodes "
            "or speculate of the engine.",
            field="predicted_tokens",
        ),
    ]
    turn_group: Annotated[
        bytes,
        _answer(
            "requests that wait come in by turns of their groups; by default those of one "
            "cache_salt are a group."
        ),
    ]
    turn_weight: Annotated[
        int,
        _answer("requests that the group has in a turn of one of weight 1, from 1 to 2^20 (1)."),
    ]
    prefill_peer: Annotated[
        str,
        _answer(
            "one of prefill_from: that process is asked for the prompt if it is there, and no "
            'other one, whatever is predicted; without effect where prefill_remote is "never".'
        ),
    ]
    held_for_peer: Annotated[
        bool,
        _answer(
            "another process is about to ask for the prompt (serve_prefill): until it has, for 30 "
            "seconds at most, its KV is given up last, but never kept from a request.",
        ),
    ]
    grammar: Annotated["CompiledGrammar | Grammar | Mapping[str, Any] | None", _answer(_GRAMMAR)]
    special_texts: Annotated[
        Sequence[str],
        _answer('special tokens that texts have, such as ["[TOOL_CALLS]"]; by default none.'),
    ]
    documents: Annotated[
        'Sequence[str | tuple[int, int]] | Literal["auto"]',
        _answer(
            "texts that stand before the prompt (of a chat: at the beginning of the first message "
            "of the user), each tokenised apart; or pairs (begin, end) of a prompt of token ids. A "
            'document may also be a part of a message, {"type": "document", "text": "..."} in the '
            "list of its content, and stands there then. "
            'They change nothing but the prompt, unless `blend` is given. "auto", with `blend`: '
            "those that earlier prompts with documents and `prepare` had are found in the "
            "prompt's tokens.",
            values.DOCUMENTS,
        ),
    ]
    blend: Annotated[
        "float | str | Mapping[str, Any] | None",
        _answer(
            "the answer is APPROXIMATE: KV of the documents is used wherever they stand, and this "
            'part of their tokens, from 0 to 1, is computed again; "auto": what can be computed in '
            "the time that loading takes, at least 0.15. Or a mapping: ratio, metric "
            '("v_l2", "k_l2", "kv_l2", "cosine", "random"), check_layers, ratios, thresholds, '
            'link_tokens, min_tokens, learn (True, False, "idle"), contextual (with '
            'documents="auto": '
            "True finds also those behind another beginning), document_ratios (a ratio for each "
            "document, None where it shares that of the others). Needs blend_piece, and a verdict "
            "of `quire blend eval`. docs/blend.md",
            values.BLEND,
        ),
    ]
    template_args: Annotated[
        Mapping[str, Any],
        _answer(
            "of chats: values (as JSON has them) that the model's template knows by name, such as "
            '{"enable_thinking": False}. BadArgumentError for names that the template does not '
            "use.",
            values.OBJECT,
        ),
    ]


def _entries(options: type) -> dict[str, Option]:
    found = {}
    for name, annotation in options.__annotations__.items():
        (option,) = [entry for entry in get_args(annotation) if isinstance(entry, Option)]
        found[name] = option
    return found


ENGINE = _entries(EngineOptions)
SAMPLING = _entries(SamplingOptions)
STORE = _entries(ChunkStoreOptions)


def described(indent: str, options: Mapping[str, Option]) -> str:
    """The options and what they mean, as a docstring lists them."""
    lines = []
    for name, option in options.items():
        lines += textwrap.wrap(
            f"{name}: {option.doc}",
            100,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).strip()


def describe(documented: Any, options: Mapping[str, Option]) -> None:
    """Puts the options where the docstring has the word OPTIONS."""
    for line in (documented.__doc__ or "").splitlines():  # none with python -OO
        if line.strip() == "OPTIONS":
            indent = line[: -len("OPTIONS")]
            text = documented.__doc__.replace(line, indent + described(indent, options))
            documented.__doc__ = text


describe(EngineOptions, ENGINE)
describe(SamplingOptions, SAMPLING)
describe(ChunkStoreOptions, STORE)


def check_names(call: str, given: Iterable[str], known: Mapping[str, Option]) -> None:
    """TypeError for a name that is no option, as Python raises for its own signatures."""
    for name in given:
        if name not in known:
            raise TypeError(f"{call}: there is no option {name!r}; options are {', '.join(known)}")


def whole_engine(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine with the defaults of those that were not given."""
    check_names("Engine", given, ENGINE)
    return {**{name: option.default for name, option in ENGINE.items()}, **given}


def whole_store(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a chunk store with the defaults of those that were not given."""
    return {**{name: option.default for name, option in STORE.items()}, **given}


def store_fields(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a chunk store as the library takes them; it refuses unknown names.
    BadArgumentError for a time that is none."""
    fields = dict(whole)
    for name, option in STORE.items():
        value, most = fields.pop(name), option.most_seconds
        fields[option.field or name] = value if most is None else milliseconds(value, name, most)
    return fields


def of_part(part: Part, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the part takes, by the names that it knows."""
    entries = {name: ENGINE[name] for name in options}
    return {
        entry.field or name: options[name] for name, entry in entries.items() if entry.part == part
    }


def with_signature(call: Any, options: Mapping[str, Option], types: type) -> None:
    """Shows the options as the keywords of a call that takes them with **."""
    plain = inspect.signature(call)
    named = [p for p in plain.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=get_args(types.__annotations__[name])[0],
        )
        for name, option in options.items()
    ]
    call.__signature__ = plain.replace(parameters=[*named, *keywords])
