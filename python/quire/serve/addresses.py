"""Hosts that a server can listen on, and addresses of its clients."""

from __future__ import annotations

import ipaddress

__all__ = ["address_key", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_key(client: tuple[str, int] | None) -> str:
    """What clients are counted by: the address, of IPv6 its /64, which one host has alone."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
