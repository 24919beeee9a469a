"""One resource name at the kubelet: serve, register, notice the loss, again."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.errors import KubeletError
from metagpu.plugins import wire
from metagpu.plugins.kubelet_directory import KubeletDirectory
from metagpu.plugins.pb import v1beta1
from metagpu.plugins.service import Service
from metagpu.plugins.serving import Calls, identity_of, serving

REGISTER_DEADLINE: Final = 15.0
"""Seconds; the kubelet itself gives up dialling us back after 10."""
LIST_DEADLINE: Final = 10.0
"""Seconds from a registration to the kubelet's ListAndWatch, which it opens at once."""
ABSENT_PAUSE: Final = (0.001, 1.0)
"""First and longest pause, in seconds, while the kubelet's socket refuses connections."""
REFUSED_PAUSE: Final = (1.0, 30.0)
"""The same while the kubelet answers and says no."""

log = structlog.get_logger()


class Endpoint:
    """Keeps one service registered.

    Attributes:
        registrations: how often the kubelet accepted it.
    """

    def __init__(self, service: Service, directory: KubeletDirectory) -> None:
        self.registrations = 0
        self._service = service
        self._directory = directory
        self._log = log.bind(resource=service.resource)

    async def run(self) -> None:
        """Serve and register until cancelled; what the kubelet loses is registered again.

        Every round has a socket of its own. Leaving a round ends its stream before the next one
        registers: with both open, the end of the old would make the kubelet drop the new.
        """
        while True:
            path = self._directory.fresh(self._service.resource)
            calls = Calls()

            try:
                async with serving(path, self._service.methods(calls), calls):
                    kubelet = await self._registered(path)
                    if kubelet is not None:
                        await self._lost(path, kubelet, calls)
            except OSError as error:
                if self._directory.path.is_dir():
                    self._log.warning("the socket cannot be served", error=str(error))
                await self._directory.changed()

    async def _registered(self, path: Path) -> tuple[int, int, int] | None:
        """Register until it works; give the kubelet's identity, or `None` if our socket was wiped.

        A starting kubelet binds its socket first and listens a moment later, so the first tries
        follow each other within milliseconds. One that says no is asked again slowly, or as soon
        as there is another kubelet.
        """
        pauses = {"absent": ABSENT_PAUSE[0], "refused": REFUSED_PAUSE[0]}
        told = ""

        while identity_of(path) is not None:
            kubelet = self._directory.kubelet()
            try:
                if kubelet is not None:
                    kubelet = await self._register(path)
                    self.registrations += 1
                    self._log.info("registered", socket=path.name)
                    return kubelet
            except KubeletError as error:
                if str(error) != told:
                    told = str(error)
                    self._log.warning("the kubelet refuses the registration", error=told)
                await self._unchanged(path, kubelet, pauses["refused"])
                pauses["refused"] = min(pauses["refused"] * 2, REFUSED_PAUSE[1])
            except (OSError, StreamTerminatedError):
                await self._unchanged(path, kubelet, pauses["absent"])
                pauses["absent"] = min(pauses["absent"] * 2, ABSENT_PAUSE[1])
            else:
                await self._unchanged(path, kubelet, ABSENT_PAUSE[1])
                pauses["absent"] = ABSENT_PAUSE[0]

        return None

    async def _register(self, path: Path) -> tuple[int, int, int]:
        """Register once; give the identity of the kubelet that took it.

        Raises:
            KubeletError: if it says no.
            OSError: if it does not listen, or a socket is gone, its own or ours.
        """
        request = wire.register_request(
            self._service.resource, path.name, pre_start=self._service.pre_start
        )

        async with Channel(path=str(self._directory.kubelet_socket)) as channel:
            await channel.__connect__()
            # A kubelet wipes the folder before it listens: what is there now will stay. Looking
            # before connecting would leave a gap in which it wipes, and then dials us in vain.
            kubelet = self._directory.kubelet()
            if kubelet is None or identity_of(path) is None:
                raise FileNotFoundError(path)

            try:
                stub = v1beta1.RegistrationStub(channel)
                await stub.register(request, timeout=REGISTER_DEADLINE)
            except GRPCError as error:
                raise KubeletError(error.message or error.status.name) from error
            except TimeoutError as error:
                raise KubeletError(f"no answer within {REGISTER_DEADLINE:g} s") from error
            return kubelet

    async def _unchanged(
        self, path: Path, kubelet: tuple[int, int, int] | None, within: float
    ) -> None:
        """Wait while the kubelet's socket and ours stay what they are, at most `within` seconds."""
        with anyio.move_on_after(within):
            while self._directory.kubelet() == kubelet and identity_of(path) is not None:
                await self._directory.changed()

    async def _lost(self, path: Path, kubelet: tuple[int, int, int], calls: Calls) -> None:
        """Wait until this registration is worth nothing any more.

        It is when our socket was removed, the kubelet has a new one, or the list's stream ended,
        which the kubelet never opens again by itself.
        """
        reason = "the kubelet did not ask for the list"

        with anyio.move_on_after(LIST_DEADLINE):
            await calls.opened()
            reason = ""

        async def first(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        async def changed() -> None:
            # A socket file that is merely gone hurts nobody while the stream is open.
            while self._directory.kubelet() in (None, kubelet) and identity_of(path) is not None:
                await self._directory.changed()

        if not reason:
            async with anyio.create_task_group() as group:
                group.start_soon(first, calls.ended)
                group.start_soon(first, changed)

            if self._directory.kubelet() not in (None, kubelet):
                reason = "there is a new kubelet"
            elif identity_of(path) is None:
                reason = "our socket was removed"
            else:
                reason = "the kubelet closed the list"
        self._log.info("registration lost", reason=reason)
