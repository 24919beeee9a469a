"""One resource name at the kubelet: serve, register, notice the loss, again."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.exceptions import StreamTerminatedError

from metagpu.core.errors import KubeletError, why
from metagpu.plugins import wire
from metagpu.plugins.kubelet_directory import KubeletDirectory
from metagpu.plugins.record import KubeletRecord
from metagpu.plugins.registrar import Line, Registrar
from metagpu.plugins.rivals import rival_of
from metagpu.plugins.service import Service
from metagpu.plugins.serving import Calls, identity_of, serving

LIST_DEADLINE: Final = 10.0
"""Seconds from a registration to the kubelet's ListAndWatch, which it opens at once."""
REFUSED_PAUSE: Final = (1.0, 30.0)
"""First and longest pause, in seconds, while the kubelet answers and says no."""
BAD_PAUSE: Final = 0.05
"""Seconds before the third of two rounds that ended soon; it doubles with each more."""
STEADY: Final = 10.0
"""Seconds after which a round was a good one."""

log = structlog.get_logger()


class Endpoint:
    """Keeps one service registered."""

    def __init__(
        self,
        service: Service,
        directory: KubeletDirectory,
        registrar: Registrar,
        rivalled: Callable[[Path | None], None] = lambda _: None,
        record: KubeletRecord | None = None,
    ) -> None:
        self._record = record or KubeletRecord()
        self._rivalled = rivalled
        self._pause = 0.0
        self._service = service
        self._directory = directory
        self._registrar = registrar
        self._log = log.bind(resource=service.resource)

    async def run(self) -> None:
        """Serve and register until cancelled; what the kubelet loses is registered again.

        Every round has a socket of its own, made when a kubelet answers: one that starts wipes the
        folder before it listens, so what is made then stays. Leaving a round ends its stream before
        the next one registers: with both open, the end of the old would make the kubelet drop the
        new.
        """
        while True:
            await self._alone()
            with closing(await self._registrar.line()) as line:
                kubelet = self._directory.kubelet()
                began = anyio.current_time()
                refused = await self._round(line, kubelet)
            await self._rest(kubelet, anyio.current_time() - began, refused=refused)

    async def _alone(self) -> None:
        """Wait while another plugin serves this resource: two would take it from each other."""
        met: Path | None = None

        while (rival := await rival_of(self._directory.path, self._service.resource)) is not None:
            if rival != met:
                met = rival
                self._rivalled(rival)
                mend = "stop it, or give our resource another name"
                self._log.error("another device plugin serves it", socket=str(rival), mend=mend)
            await self._directory.changed()

        self._rivalled(None)
        if met is not None:
            self._log.info("the other device plugin is gone")

    async def _round(self, line: Line, kubelet: tuple[int, int, int] | None) -> bool:
        """Serve and register once, and stay until that is lost; tell whether it was refused."""
        path = self._directory.fresh(self._service.resource)
        calls = Calls()

        try:
            async with serving(path, self._service.methods(calls), calls):
                await self._register(line, path)
                line.close()
                self._record.meet(kubelet)
                await self._lost(path, kubelet, calls)
        except KubeletError as error:
            self._log.warning("the kubelet refuses the registration", error=str(error))
            return True
        except (OSError, StreamTerminatedError) as error:
            reason = why(error)
            self._log.warning("the resource could not be served", socket=str(path), error=reason)
        return False

    async def _rest(
        self, kubelet: tuple[int, int, int] | None, lasted: float, *, refused: bool
    ) -> None:
        """Wait before the next round: not at all after a good one, longer after each bad one.

        Another kubelet ends the wait.
        """
        if lasted >= STEADY:
            self._pause = 0.0

        pause = max(self._pause, REFUSED_PAUSE[0]) if refused else self._pause
        await self._directory.replaced(kubelet, pause)
        another = self._directory.kubelet() != kubelet
        self._pause = 0.0 if another else min(max(pause * 2, BAD_PAUSE), REFUSED_PAUSE[1])

    async def _register(self, line: Line, path: Path) -> None:
        """Register once (see `Line.register`)."""
        service = self._service
        await line.register(
            wire.register_request(service.resource, path.name, pre_start=service.pre_start)
        )
        self._service.record.registrations += 1
        self._log.info("registered", socket=path.name)

    async def _lost(self, path: Path, kubelet: tuple[int, int, int] | None, calls: Calls) -> None:
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
            self._service.record.listed = True
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(first, calls.ended)
                    group.start_soon(first, changed)
            finally:
                self._service.record.listed = False

            if self._directory.kubelet() not in (None, kubelet):
                reason = "there is a new kubelet"
            elif identity_of(path) is None:
                reason = "our socket was removed"
            else:
                reason = "the kubelet closed the list"
        self._log.info("registration lost", reason=reason)
