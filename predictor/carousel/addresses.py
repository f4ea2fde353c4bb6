"""Hosts and ports: as URLs write them, and bound by a gRPC server."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc
    from grpc import aio

__all__ = ["bind_grpc", "is_loopback", "url_host"]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def url_host(address: str) -> str:
    """A host's name or address as it stands in a URL: IPv6 in brackets, which it may have already."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def bind_grpc(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Have a server listen, with TLS if there are ``credentials``. Returns the port, which 0 leaves to the system.

    Raises:
        OSError: the port cannot be had.
    """
    address = f"{url_host(host)}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address} for gRPC: {error}") from None
    if not bound:
        raise OSError(f"cannot listen on {address} for gRPC")
    return bound
