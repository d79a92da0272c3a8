"""What a service manager is told: systemd's Type=notify, a datagram for each state."""

from __future__ import annotations

import os
import socket

__all__ = ["notify"]


def notify(state: str) -> None:
    """Sends a state such as "READY=1" to NOTIFY_SOCKET; nothing where that is not set. OSError: the
    socket is not there."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # in Linux' abstract name space
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
        peer.connect(address)
        peer.sendall(state.encode())
