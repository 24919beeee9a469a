"""The old daemon's side of an exchange: it gives the node to another daemon.

Until the last step it can go on, and does so if the new daemon ends, hangs, or fails.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import structlog

from metagpu import __version__
from metagpu.agent.exchange import PROTOCOL, ExchangeTiming, HandedState, Hello, Step
from metagpu.core.config.profiles import ClusterChoice
from metagpu.core.errors import TakeoverFailed
from metagpu.core.health.fault_note import FaultNote
from metagpu.core.layout.backend_runner import BackendRunner
from metagpu.core.model.shares import ResourceName
from metagpu.core.runtime.tasks import PausableTasks
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
from metagpu.plugins.control.socket import Conversation
from metagpu.plugins.kubelet.call_gate import CallGate

log = structlog.get_logger()


class FollowsCluster(Protocol):
    """The API server's side of a daemon, as far as an exchange concerns it."""

    keeps_labels: bool

    @property
    def choice(self) -> ClusterChoice | None:
        """The part of the configuration that the cluster chose."""
        ...


@dataclass
class Duties:
    """All that a daemon does to its node beside answering the kubelet.

    Attributes:
        guests: the tasks that the kubelet does not need.
        cluster: the API server's side, `None` without one.
        read_note: returns the faults and cordons of now.
        learn_leases: learns which shares a successor granted that failed.
    """

    registry: Registry
    call_stats: KubeletCallStats
    backend_runner: BackendRunner
    guests: PausableTasks
    cluster: FollowsCluster | None
    read_note: Callable[[], FaultNote]
    learn_leases: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint

    async def pause(self) -> None:
        """End all that changes the node, and leave the GPUs as they are."""
        if self.cluster is not None:
            self.cluster.keeps_labels = True
        await self.guests.pause()
        await self.backend_runner.release()

    def resume(self) -> None:
        """Go on after a pause."""
        if self.cluster is not None:
            self.cluster.keeps_labels = False
        self.backend_runner.resume()
        self.guests.resume()

    def describe(self) -> HandedState:
        """Return what this daemon knows, and another one may not."""
        snapshot = self.registry.snapshot
        leases = (it for state in snapshot.gpus.values() for it in state.leases.values())
        return HandedState(
            tuple(leases),
            tuple(it for it in snapshot.offers if self.call_stats.of_resource(it).listed),
            self.read_note(),
            self.cluster.choice if self.cluster else None,
        )


@dataclass
class HandOver:
    """Hands the node over in a conversation with another daemon.

    Attributes:
        gate: holds the kubelet's calls meanwhile.
        duties: paused meanwhile.
        list_end: seconds for the kubelet to see the end of a list.
        done: set once the new daemon has the node.
    """

    gate: CallGate
    duties: Duties
    list_end: float
    timing: ExchangeTiming
    done: anyio.Event = field(default_factory=anyio.Event)
    _under_way: bool = False

    async def converse(self, conversation: Conversation) -> None:
        """Hand over step by step, as the new daemon asks (`Step`).

        Raises:
            MetagpuError: there is another exchange, or the kubelet's calls do not end.
            ConnectionError: the new daemon has ended.
        """
        if self._under_way or self.done.is_set():
            raise TakeoverFailed("another daemon is taking this one's node over")
        self._under_way = True
        try:
            await conversation.send(Hello(PROTOCOL, __version__))
            request = await conversation.receive()
            if request is not None:
                await self._exchange(conversation, request)
        finally:
            self._under_way = False

    async def _exchange(self, conversation: Conversation, request: Mapping[str, Any]) -> None:
        _expect(request, Step.BEGIN)
        if not await self.gate.close(self.timing.calls):
            raise TakeoverFailed("it answers calls of the kubelet, which take long")
        log.info("handing over", to=request.get("version"))
        try:
            with anyio.fail_after(self.timing.exchange):
                with anyio.fail_after(self.timing.pause):
                    await self.duties.pause()
                await conversation.send(self.duties.describe())
                while not self.done.is_set():
                    request = await conversation.receive() or {}
                    await self._take(request, conversation)
        except TimeoutError:
            raise TakeoverFailed("the exchange took too long; the old daemon goes on") from None
        finally:
            if not self.done.is_set():
                log.error("successor failed", effect="this daemon goes on")
                await self._go_on()

    async def _go_on(self) -> None:
        """Serve again; what the successor granted is not granted twice."""
        try:
            if self.gate.forwards:
                with anyio.move_on_after(self.timing.look):
                    await self.duties.learn_leases()
        finally:
            await self.gate.reopen(self.list_end)
            self.duties.resume()

    async def _take(self, request: Mapping[str, Any], conversation: Conversation) -> None:
        match request.get("step"):
            case Step.DETACH:
                self.gate.expect_detach()
            case Step.END_LISTS:
                sockets = {ResourceName(n): Path(p) for n, p in request["sockets"].items()}
                await self.gate.hand_over(sockets, self.timing.calls, self.list_end)
            case Step.FINISH:
                await conversation.send({})
                self.done.set()
                return
            case None:
                raise TakeoverFailed("the new daemon has ended")
            case _:
                _expect(request, "of an exchange")
        await conversation.send({})


def _expect(request: Mapping[str, Any], step: str) -> None:
    if request.get("step") != step:
        raise TakeoverFailed(f"unexpected step {request.get('step')!r}; expected: {step}")
