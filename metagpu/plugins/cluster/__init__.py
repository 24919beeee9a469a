"""The API server's side: configuration that the cluster chooses, and what the node tells.

Nothing here is in the way of serving: it runs beside, from what the registry knows, and an API
server that does not answer costs a line in the log. The library that speaks to it is loaded only
when this runs.
"""

import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog
from anyio import to_thread

from metagpu.core.errors import ClusterError
from metagpu.core.model import ResourceName
from metagpu.core.profiles import Instruction
from metagpu.core.registry import Registry
from metagpu.plugins.cluster import node_news, pod_news
from metagpu.plugins.cluster.choice import Outcome
from metagpu.plugins.cluster.choosing import Chooser
from metagpu.plugins.cluster.chore import Chore
from metagpu.plugins.cluster.events import EACH_POD, News, Recorder, Subject
from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.labelling import Labeller
from metagpu.plugins.cluster.node_feature import NodeFeature
from metagpu.plugins.cluster.pods import FollowedPods
from metagpu.plugins.cluster.rival_pods import RivalPod, RivalPods, note_of
from metagpu.plugins.cluster.settings import Feature, Settings
from metagpu.plugins.cluster.telling import PROMPT, Teller, look
from metagpu.plugins.cluster.writing import Writer

if TYPE_CHECKING:
    from types import ModuleType

    from metagpu.plugins.cluster.client import Client

NODES: Final = "/api/v1/nodes"
ANEW: Final = 30.0
"""Seconds before all of this starts anew after a fault of our own."""
_FAREWELL: Final = 2.0
"""Seconds that the end of the daemon waits for the API server."""

log = structlog.get_logger()


class Cluster:
    """This node at the API server, while `run` runs.

    Attributes:
        chooser: follows the configuration that the cluster chooses.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        follow: Callable[[Instruction], Awaitable[Outcome]],
    ) -> None:
        self.chooser = Chooser(settings, registry, follow, self._tell, self._stir)
        self._settings = settings
        self._registry = registry
        self._chores: list[tuple[Feature, Chore]] = []
        self._node: Followed | None = None
        self._recorder: Recorder | None = None
        self._labeller: Labeller | None = None
        self._rivals = RivalPods(registry, self._tell_rival)
        self._pod_recorder: Recorder | None = None
        self._pods: FollowedPods | None = None
        self._dropped = self._pods_dropped = 0

    async def run(self) -> None:
        """Do what the settings say until cancelled; what fails here ends nothing else."""
        while True:
            try:
                await self._join()
            except Exception:
                log.exception("the API server's side failed; it starts anew", after=f"{ANEW:g}s")
            await anyio.sleep(ANEW)

    async def _join(self) -> None:
        library = await to_thread.run_sync(_loaded)

        async with library.connected(self._settings.kubeconfig) as client:
            leaving = self._arranged(client)
            try:
                await self._work()
            finally:
                if self._settings.remove_labels:
                    with anyio.move_on_after(_FAREWELL, shield=True):
                        await _leave(leaving)

    def report(self) -> Mapping[str, Any]:
        """Say how each use of the API server goes: empty when it goes well."""
        problems = {str(feature): "" for feature in self._settings.features}
        for feature, chore in self._chores:
            problems[feature] = problems[feature] or chore.problem
        if Feature.CONFIG in problems:
            problems[Feature.CONFIG] = problems[Feature.CONFIG] or self.chooser.problem
        if self._labeller is not None and Feature.NODE_FEATURE in problems:
            problems[Feature.NODE_FEATURE] = self._labeller.node_feature.problem
        if self._pods is not None:
            problems[Feature.PODS] = self._pods.problem

        return {
            "node": self._settings.node,
            "connected": bool(self._node and self._node.known and not self._node.problem),
            "problem": self._node.problem if self._node else "",
            "uses": dict(sorted(problems.items())),
            **self.chooser.report(),
            **(self._labeller.report() if self._labeller else {}),
            "rivalPods": self._rivals.report(list(self._registry.snapshot.offers)),
            "eventsDropped": self._dropped + _dropped_by(self._recorder),
            "podEventsDropped": self._pods_dropped + _dropped_by(self._pod_recorder),
        }

    def _arranged(self, client: "Client") -> Sequence[Callable[[], Awaitable[None]]]:
        """Make what the settings ask for; give what takes back what was told."""
        settings, features = self._settings, self._settings.features
        self._node = self.chooser.node = Followed(client, NODES, settings.node, self._stir)
        self._dropped += _dropped_by(self._recorder)
        self._pods_dropped += _dropped_by(self._pod_recorder)
        self._recorder = Recorder(client, socket.gethostname())
        writer = Writer(client, self._node)
        teller = Teller(writer, self._registry)
        self._labeller = Labeller(
            writer,
            self._registry,
            self.chooser.mig_state,
            NodeFeature(client, self._node, settings.namespace),
            by_nfd=Feature.NODE_FEATURE in features,
        )
        if Feature.POD_EVENTS in features:
            # Pods that misbehave must not use up what is meant for news of the node.
            self._pod_recorder = Recorder(
                client, socket.gethostname(), name=Feature.POD_EVENTS, each=EACH_POD
            )
        self._chores = [it for it in self._all_chores(teller, self._labeller) if it[0] in features]
        if Feature.PODS in features:
            self._pods = FollowedPods(client, settings.node, self._registry)
        if settings.config_map is not None:
            namespace, name = settings.config_map
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            self.chooser.config_map = Followed(client, path, name, self._stir)
        return self._labeller.leave, teller.leave

    def _all_chores(self, teller: Teller, labeller: Labeller) -> Iterator[tuple[Feature, Chore]]:
        yield Feature.CONFIG, Chore(Feature.CONFIG, self.chooser.choose)
        yield Feature.LABELS, Chore(Feature.LABELS, labeller.label)
        yield Feature.TAINT, Chore(Feature.TAINT, teller.lift_taint)
        yield Feature.CONDITION, Chore(Feature.CONDITION, teller.judge)
        yield Feature.ALLOCATABLE, Chore("allocatable", teller.lower, PROMPT)
        yield Feature.ALLOCATABLE, Chore("allocatable, rising", teller.rise)
        if self._recorder is not None:
            yield Feature.EVENTS, self._recorder.chore
        if self._pod_recorder is not None:
            yield Feature.POD_EVENTS, self._pod_recorder.chore

    async def _work(self) -> None:
        assert self._node is not None  # noqa: S101 - made just before
        async with anyio.create_task_group() as group:
            group.start_soon(self._node.run)
            if self.chooser.config_map is not None:
                group.start_soon(self.chooser.config_map.run)
            if self._pods is not None:
                group.start_soon(self._pods.run)
            if Feature.RIVALS in self._settings.features:
                group.start_soon(self._rivals.run)
            for _, chore in self._chores:
                group.start_soon(chore.run)
            group.start_soon(self._stir_on_news)
            if self._recorder is not None and Feature.EVENTS in self._settings.features:
                group.start_soon(self._tell_news, self._recorder)
            if self._pod_recorder is not None:
                group.start_soon(self._tell_pods, self._pod_recorder)

    def _stir(self) -> None:
        for feature, chore in self._chores:
            if feature not in {Feature.EVENTS, Feature.POD_EVENTS}:
                chore.stir()

    async def _stir_on_news(self) -> None:
        async for _ in self._registry.watch(look):
            self._stir()

    async def _tell_news(self, recorder: Recorder) -> None:
        with self._registry.news.subscribe(*node_news.KINDS) as news:
            for told in node_news.resets(self._registry.snapshot, self._subject):
                recorder.tell(told)
            async for event in news:
                now, node = self._registry.snapshot, self._subject
                its = node_news.news_of(event, now, node, self._server_of)
                if its is not None:
                    recorder.tell(its)

    async def _tell_pods(self, recorder: Recorder) -> None:
        with self._registry.news.subscribe(*pod_news.KINDS) as news:
            async for event in news:
                if (told := pod_news.news_of(event, self._registry.snapshot)) is not None:
                    recorder.tell(told)

    def _tell_rival(self, rival: RivalPod) -> None:
        log.warning("another device plugin runs here", program=rival.program, pod=rival.pod)
        note = note_of(rival, self._registry.snapshot.offers)
        # Anybody may call a DaemonSet so, and have it make pod after pod.
        self._tell("RivalPlugin", note, "Serve", warning=True, key=rival.program)

    @property
    def _subject(self) -> Subject:
        """The Node, for Events about it."""
        told = self._node.object if self._node else None
        uid = str(told["metadata"].get("uid", "")) if told else ""
        return Subject("Node", self._settings.node, uid)

    def _server_of(self, resource: ResourceName) -> str:
        named = [str(it) for it in self._rivals.found if it.contested([resource])]
        return " or ".join(named) or "another device plugin"

    def _tell(
        self, reason: str, note: str, action: str, *, warning: bool = False, key: str = ""
    ) -> None:
        """Tell of the node, if Events are wanted."""
        if self._recorder is None or Feature.EVENTS not in self._settings.features:
            return
        self._recorder.tell(News(self._subject, reason, note, action, warning, key))


def _loaded() -> "ModuleType":
    """Load what speaks to the API server: 45 MB and a third of a second, for who needs it."""
    from metagpu.plugins.cluster import client  # noqa: PLC0415 - as said

    return client


def _dropped_by(recorder: Recorder | None) -> int:
    return recorder.dropped if recorder else 0


async def _leave(leaving: Sequence[Callable[[], Awaitable[None]]]) -> None:
    for leave in leaving:
        try:
            await leave()
        except ClusterError as error:
            log.warning("labels or condition stay on the node", error=str(error))


__all__ = ["Cluster", "Feature", "Instruction", "Outcome", "Settings"]
