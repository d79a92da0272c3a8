"""docs/formats/chunk.md and snapshot.md, followed by a second reader: bytes that the library wrote,
read with the standard library alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from pathlib import Path

import pytest

TESTDATA = Path(__file__).parents[2] / "src" / "chunk" / "testdata"
TOKENS = (3, 1, 4, 1, 5)
PASSPORT = (
    '{"block":5,"dtype":"bf16","head_dim":4,"kv_heads":1,"layers":[0,2],"layout":"L2THD",'
    '"model":"sample","quant":"none","revision":"","rope":"none","shard":"canonical",'
    '"v":1,"v_head_dim":2}'
)


def crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def root_key(passport: str, salt: bytes) -> bytes:
    return sha256(
        b"quire/kv/1\0", sha256(passport.encode()), struct.pack("<I", len(salt)), salt
    )


def next_key(previous: bytes, tokens: tuple[int, ...]) -> bytes:
    ids = struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens)
    return sha256(b"\x01", previous, ids, struct.pack("<I", 0))


def sections_of(chunk: bytes) -> list[tuple[int, int, int, tuple[int, ...], bytes]]:
    """(kind, layer, element type, shape, bytes) of each; checks every checksum."""
    header_bytes = struct.unpack_from("<I", chunk, 12)[0]
    flags, token_count, count = (
        struct.unpack_from("<H", chunk, 10)[0],
        struct.unpack_from("<I", chunk, 80)[0],
        struct.unpack_from("<I", chunk, 156)[0],
    )
    header = bytearray(chunk[:header_bytes])
    mac_at = 168 + 40 * count + 4 * token_count
    if flags & 32:
        header[mac_at : mac_at + 32] = bytes(32)
    header[160:164] = bytes(4)
    assert crc32c(bytes(header)) == struct.unpack_from("<I", chunk, 160)[0]
    sections = []
    end = header_bytes
    for i in range(count):
        kind, first, last, dtype, rank, d0, d1, d2, d3, offset, length, crc = struct.unpack_from(
            "<HHHHB3x4IIII", chunk, 168 + 40 * i
        )
        assert first == last
        assert header_bytes + 64 * offset >= end
        end = header_bytes + 64 * offset + length
        data = chunk[header_bytes + 64 * offset : end]
        assert crc32c(data) == crc
        sections.append((kind, first, dtype, (d0, d1, d2, d3)[:rank], data))
    assert len(chunk) == -(-end // 64) * 64
    return sections


@pytest.mark.parametrize("name", ["chunk_v1.bin", "signed_chunk_v1.bin"])
def test_chunk(name: str) -> None:
    chunk = (TESTDATA / name).read_bytes()
    assert chunk[:8] == b"QKVCHNK1"
    assert struct.unpack_from("<H", chunk, 8) == (1,)
    root = root_key(PASSPORT, b"salt")
    assert chunk[16:48] == next_key(root, TOKENS)
    assert chunk[48:80] == sha256(PASSPORT.encode())
    assert struct.unpack_from("<II", chunk, 80) == (5, 0)
    assert struct.unpack_from("<QQ", chunk, 88) == (1000, 2000)
    assert chunk[104:136] == root
    assert chunk[136:144] == sha256(b"rope")[:8]
    assert struct.unpack_from("<QI", chunk, 144) == (7, 9)
    assert struct.unpack_from("<5i", chunk, 168 + 4 * 40) == TOKENS
    sections = sections_of(chunk)
    bf16 = 4 * 256 + 16
    assert [section[:4] for section in sections] == [
        (kind, layer, bf16, (5, 1, dim)) for layer in (0, 1) for kind, dim in ((1, 4), (2, 2))
    ]
    for i, section in enumerate(sections):
        assert section[4] == bytes((37 * i + j) % 256 for j in range(len(section[4])))


def test_mac() -> None:
    chunk = bytearray((TESTDATA / "signed_chunk_v1.bin").read_bytes())
    assert struct.unpack_from("<H", chunk, 10) == (32,)
    at = 168 + 4 * 40 + 5 * 4
    mac = bytes(chunk[at : at + 32])
    chunk[at : at + 32] = bytes(32)
    chunk[160:164] = bytes(4)
    assert hmac.digest(b"key", bytes(chunk), "sha256") == mac


def test_snapshot() -> None:
    file = (TESTDATA / "snapshot_v1.bin").read_bytes()
    magic, version, header_bytes, length, count, crc, created, passport_bytes = struct.unpack_from(
        "<8sIIQIIQI", file
    )
    assert (magic, version, length, count, created) == (b"QSNAPSH1", 1, len(file), 2, 1)
    header = bytearray(file[:header_bytes])
    header[28:32] = bytes(4)
    assert crc32c(bytes(header)) == crc
    at = 64 + 16 * count
    assert file[at : at + passport_bytes].decode() == PASSPORT
    assert json.loads(PASSPORT)["block"] == 5
    places = [struct.unpack_from("<QQ", file, 64 + 16 * i) for i in range(count)]
    first, state = (file[offset : offset + size] for offset, size in places)
    root = root_key(PASSPORT, b"")
    assert first[16:48] == next_key(root, TOKENS)
    assert len(sections_of(first)) == 4
    assert state[16:48] == sha256(b"\x02", root, struct.pack("<I", 0))
    assert sections_of(state) == []
