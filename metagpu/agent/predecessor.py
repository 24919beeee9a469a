"""The daemon that has the node, as the one that takes over asks it."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from metagpu import __version__
from metagpu.agent.exchange import COMMAND, PROTOCOL, ExchangeTiming, HandedState, Hello, Step
from metagpu.core.errors import TakeoverFailed, describe_error
from metagpu.core.model.shares import ResourceName
from metagpu.plugins.control.client import SOCKET_NAME
from metagpu.plugins.control.socket import LINE_LIMIT

_WATCH_PERIOD: Final = 0.05
"""Seconds between two checks whether the old daemon has hung up."""


class Predecessor:
    """Asks the old daemon, step by step (`Step`).

    Every function raises `TakeoverFailed` if the old daemon refuses, ends, or does not answer.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timing: ExchangeTiming
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timing = timing
        self._ends = math.inf

    async def begin(self) -> HandedState:
        """Make the old daemon hold all calls and leave the GPUs; return what it knows.

        From here on the exchange has `ExchangeTiming.successor` seconds.
        """
        self._ends = anyio.current_time() + self._timing.successor
        state: HandedState = _convert(await self._ask(Step.BEGIN), HandedState)
        return state

    async def expect_detach(self) -> None:
        """Report that the kubelet is about to forget the old daemon."""
        await self._ask(Step.DETACH)

    async def end_lists(self, sockets: Mapping[ResourceName, Path]) -> None:
        """Make the old daemon forward its calls to these sockets, and end its lists."""
        await self._ask(Step.END_LISTS, sockets={name: str(it) for name, it in sockets.items()})

    async def finish(self) -> None:
        """Report that the kubelet reads the new lists: the old daemon ends."""
        await self._ask(Step.FINISH)

    async def wait_gone(self) -> None:
        """Wait until the old daemon has hung up, as it does when it goes on."""
        while not self._reader.at_eof():  # noqa: ASYNC110 - a stream has no event for its end
            await anyio.sleep(_WATCH_PERIOD)

    async def greet(self) -> None:
        """Begin the exchange, and check that both daemons know the same order of steps."""
        hello = _convert(await self._ask(None, command=COMMAND), Hello)
        if hello.protocol != PROTOCOL:
            raise TakeoverFailed(
                f"metagpu {hello.version} hands over by protocol {hello.protocol}, and this one "
                f"({__version__}) takes over by protocol {PROTOCOL}"
            )

    async def _ask(self, step: str | None, **arguments: object) -> object:
        request = {"step": step, "version": __version__, **arguments}
        self._check_time()
        try:
            with anyio.fail_after(self._timing.answer):
                self._writer.write(msgspec.json.encode(request) + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
        except TimeoutError:
            limit = f"{self._timing.answer:g}"
            raise TakeoverFailed(f"the old daemon did not answer within {limit} s") from None
        except (OSError, ValueError) as error:
            raise TakeoverFailed(f"the old daemon hung up: {describe_error(error)}") from error
        answer = _convert(msgspec.json.decode(line), dict[str, Any]) if line else {}
        if "ok" not in answer:
            raise TakeoverFailed(str(answer.get("error", "the old daemon has ended")))
        return answer["ok"]

    def _check_time(self) -> None:
        if anyio.current_time() > self._ends:
            limit = f"{self._timing.successor:g}"
            raise TakeoverFailed(f"the exchange took longer than {limit} s")


@asynccontextmanager
async def connect_predecessor(run_dir: Path, timing: ExchangeTiming) -> AsyncIterator[Predecessor]:
    """Talk to the daemon of a run folder while the block lasts.

    Raises:
        TakeoverFailed: no daemon answers, or it cannot hand over.
    """
    try:
        with anyio.fail_after(timing.answer):
            reader, writer = await asyncio.open_unix_connection(
                str(run_dir / SOCKET_NAME), limit=LINE_LIMIT
            )
    except OSError as error:
        raise TakeoverFailed(f"no daemon answers in {run_dir}: {describe_error(error)}") from error
    try:
        predecessor = Predecessor(reader, writer, timing)
        await predecessor.greet()
        yield predecessor
    finally:
        writer.close()


def _convert(value: object, kind: Any) -> Any:  # noqa: ANN401 - as `kind`
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TakeoverFailed(f"the old daemon's answer is not understood: {error}") from error
