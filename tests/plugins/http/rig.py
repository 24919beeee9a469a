"""A raw HTTP client."""

import asyncio
from contextlib import suppress
from typing import NamedTuple


async def asked(
    port: int, path: str = "/metrics", method: str = "GET", host: str = "127.0.0.1"
) -> tuple[int, dict[str, str], str]:
    """Request a page; return status, headers and body."""
    return await sent(port, f"{method} {path} HTTP/1.1\r\nHost: it\r\n\r\n".encode(), host)


async def sent(port: int, data: bytes, host: str = "127.0.0.1") -> tuple[int, dict[str, str], str]:
    """Send bytes, and read the whole answer."""
    answer = await exchanged(port, data, host)
    return answer.status, answer.headers, answer.body.decode()


class Answer(NamedTuple):
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


async def fetched(port: int, path: str, headers: str = "") -> Answer:
    """Request a page with more headers."""
    return await exchanged(port, f"GET {path} HTTP/1.1\r\nHost: it\r\n{headers}\r\n".encode())


async def exchanged(port: int, data: bytes, host: str = "127.0.0.1") -> Answer:
    """Send bytes, and return the whole answer as bytes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        answer = await reader.read()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)
