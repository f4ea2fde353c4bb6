"""A client that resets its idle connection leaves nothing behind, not even for the rest of the keep-alive time."""

from __future__ import annotations

import gc
import json
import socket
import struct

from tests.server.harness import wait_until

from carousel.http_protocol import GuardedProtocol


def held(ports: set[int]) -> int:
    """How many connections from these client ports are still in memory."""
    gc.collect()
    held = [item for item in gc.get_objects() if isinstance(item, GuardedProtocol)]
    return sum(item.client is not None and item.client[1] in ports for item in held)


def test_a_reset_connection_is_forgotten_at_once(server) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    clients = [socket.create_connection(("127.0.0.1", server.settings.http_port)) for _ in range(10)]
    ports = {client.getsockname()[1] for client in clients}
    for client in clients:
        client.sendall(request)
    for client in clients:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert held(ports) == 10
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    wait_until(lambda: not held(ports))
