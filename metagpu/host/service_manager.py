"""Reports of this process to the systemd that started it: sd_notify(3)."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import anyio

_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = "WATCHDOG_USEC"
"""Microseconds after which systemd takes a silent process for one that hangs."""


async def report_state(ready: anyio.Event, environment: Mapping[str, str] | None = None) -> None:
    """Report that this process is ready, and again and again that its loop turns.

    Returns at once where no systemd wants to know.
    """
    environment = os.environ if environment is None else environment
    if not (address := environment.get(_SOCKET)):
        return
    if address.startswith("@"):  # a socket without a file
        address = f"\0{address[1:]}"

    async with anyio.create_task_group() as group:
        if period := environment.get(_WATCHDOG):
            group.start_soon(_report_turns, address, int(period) / 2e6)
        await ready.wait()
        _send(address, b"READY=1")


async def _report_turns(address: str, period: float) -> None:
    while True:
        _send(address, b"WATCHDOG=1")
        await anyio.sleep(period)


def _send(address: str, message: bytes) -> None:
    """Send one message without waiting: a lost one costs no pod anything."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0)
        sender.sendto(message, address)
