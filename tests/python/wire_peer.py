"""A peer of the remote buffers, written from docs/formats/wire.md alone: for tests that check the
page, or that misbehave."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<4sHBBQQHHIIIIIQII")
HELLO, PROVE, PING, CANCEL, TAKE, ACKNOWLEDGE, PUT, GET = range(1, 9)
GOODBYE = 12
REPLY, CONTINUED, ABORTED = 1, 2, 4
REMOTE, CLOSED = 14, 12  # status codes


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def tensor_header(name: str, code: int, bits: int, shape: tuple[int, ...]) -> bytes:
    text = name.encode()
    fixed = struct.pack("<BBBBHH", code, bits, len(shape), 0, len(text), 0)
    return fixed + struct.pack(f"<{len(shape)}q", *shape) + text


@dataclass
class Frame:
    opcode: int
    flags: int
    request: int
    number: int
    status: int
    tensors: int
    fields: bytes
    headers: bytes
    data: bytes
    position: int


def encode(
    opcode: int,
    request: int,
    number: int,
    fields: bytes = b"",
    headers: bytes = b"",
    data: bytes = b"",
    tensors: int = 0,
) -> bytes:
    head = fields + headers
    header = _HEADER.pack(
        b"QWIR",
        1,
        opcode,
        0,
        request,
        number,
        0,
        0,
        tensors,
        len(head),
        len(fields),
        len(data),
        crc32c(head),
        len(data),
        crc32c(data),
        0,
    )[:-4]
    return header + struct.pack("<I", crc32c(header)) + head + data


class Peer:
    """One connection, one message at a time."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        self._number = 0

    def send(self, opcode: int, request: int, fields: bytes = b"", **parts: object) -> None:
        self.socket.sendall(encode(opcode, request, self._number, fields, **parts))  # type: ignore[arg-type]
        self._number += 1

    def hello(self, services: int) -> Frame:
        self.send(HELLO, 0, struct.pack("<HHI", 1, 1, services) + bytes(32))
        return self.read()

    def read_bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def read(self) -> Frame:
        raw = self.read_bytes(64)
        (magic, version, opcode, flags, request, number, status, zero, tensors, head, fields, data,
         head_crc, position, data_crc, header_crc) = _HEADER.unpack(raw)  # fmt: skip
        assert (magic, version, zero, crc32c(raw[:60])) == (b"QWIR", 1, 0, header_crc)
        head_bytes, data_bytes = self.read_bytes(head), self.read_bytes(data)
        assert (crc32c(head_bytes), crc32c(data_bytes)) == (head_crc, data_crc)
        return Frame(opcode, flags, request, number, status, tensors, head_bytes[:fields],
                     head_bytes[fields:], data_bytes, position)  # fmt: skip
