"""What `mgctl` says inside a container: of its own pod, and of nobody else."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import CapacityLimiter, to_thread

from metagpu import __version__
from metagpu.core.errors import MetagpuError
from metagpu.core.host import Container, Host
from metagpu.core.usage_report import Pod
from metagpu.plugins import pod_folder
from metagpu.plugins.frames import Request
from metagpu.plugins.pod_socket import Conversation, PodSocket, Refused
from metagpu.pod_words import HELP, Command, Misuse, understood
from metagpu.sheets import PLAIN, Terminal, afresh
from metagpu.usage_tables import Answer
from metagpu.usage_text import TABLES, Top, written

PERIOD: Final = 1.0
"""Seconds between two looks of `-w` and `top`."""
MISUSED: Final = 2

log = structlog.get_logger()


@dataclass
class Inside:
    """Keeps the folder that containers see, and answers who calls from there.

    Attributes:
        place: the folder, as the container runtime finds it too; `None` where there shall be none.
        node: its name.
        report: says to a pod what concerns it.
        wanted: whether the configuration wants `mgctl` in pods now.
    """

    place: Path | None
    node: str
    host: Host
    report: Callable[[Pod], Awaitable[Answer]]
    wanted: Callable[[], bool]
    _furnished: bool | None = None
    _drawing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))

    async def folder(self) -> Path | None:
        """Give the folder that can be mounted, made when first asked for; `None` if it cannot be.

        What cannot be made is told once, and costs containers nothing but their `mgctl`.
        """
        if self.place is not None and self._furnished is None:
            try:
                await to_thread.run_sync(pod_folder.furnish, self.place)
                self._furnished = True
            except MetagpuError as error:
                self._furnished = False
                log.warning("containers will have no mgctl", error=str(error))
        return self.place if self._furnished else None

    async def run(self) -> None:
        """Answer until cancelled, if there is a folder to do it in."""
        folder = await self.folder()
        if folder is None:
            return

        try:
            await PodSocket(folder, self.host, self._respond).run()
        except MetagpuError as error:
            log.warning("mgctl in containers will not be answered", error=str(error))

    async def _respond(self, container: Container, request: Request, to: Conversation) -> int:
        if not self.wanted():
            raise Refused("mgctl is switched off on this node: `mgctl: {inPods: false}`")
        if request.old:
            await to.complain(
                "MG_CTL_ADDR and MG_CTL_TOKEN are MetaGPU's and mean nothing here: metagpu is on "
                "this node, and knows who asks"
            )
        try:
            command = understood(request.arguments)
        except Misuse as error:
            await to.complain(str(error))
            return MISUSED

        match command.name:
            case "help":
                await to.out(HELP)
            case "version":
                await to.out(f"metagpu {__version__}\n")
            case _:
                await self._show(await self._pod(container), command, _terminal(request), to)
        return 0

    async def _show(self, pod: Pod, command: Command, terminal: Terminal, to: Conversation) -> None:
        """Say once, or again and again until who asked has gone."""
        form, top = command.form, Top()
        drawn = terminal is not PLAIN and form in TABLES
        follow = drawn if command.name == "top" else command.watch and (drawn or form not in TABLES)

        def write(answer: Answer) -> str:
            if command.name == "top":
                return top.screen(answer, terminal)
            return written(answer, command.kind, form, terminal, compact=follow)

        while True:
            answer = await self._answer(pod)
            # In a thread: a pod with very many processes must not keep the kubelet waiting.
            text = await to_thread.run_sync(write, answer, limiter=self._drawing)
            await to.out(afresh(text, terminal) if follow and drawn else text)
            if not follow:
                return
            await anyio.sleep(PERIOD)

    async def _answer(self, pod: Pod) -> Answer:
        return {"version": __version__, "node": self.node, **await self.report(pod)}

    async def _pod(self, container: Container) -> Pod:
        """Name the pod of a container.

        Raises:
            Refused: if nobody knows its name.
        """
        holders = await self.host.holders([container])
        if container not in holders:
            raise Refused(
                "metagpu does not know this container's name yet; try again in a second. If it "
                "never does: its pod needs the host's /var/log, read-only"
            )
        holder = holders[container]
        return Pod(holder.namespace, holder.pod, container.pod_uid)


def _terminal(request: Request) -> Terminal:
    if not request.tty:
        return PLAIN
    return Terminal(request.columns or None, request.rows or None, colours=True)
