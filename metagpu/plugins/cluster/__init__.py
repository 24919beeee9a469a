"""The API server's side: configuration that the cluster chooses, and what the node tells.

Nothing here is in the way of serving: it runs beside, from what the registry knows, and an API
server that does not answer costs a line in the log. The library that speaks to it is loaded only
when this runs.
"""

import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog
from anyio import to_thread

from metagpu.core.errors import ClusterError
from metagpu.core.model import ResourceName
from metagpu.core.news import ConfigurationRefused
from metagpu.core.profiles import Instruction
from metagpu.core.registry import Registry
from metagpu.plugins.cluster import node_news, pod_news
from metagpu.plugins.cluster.choice import Outcome, instruction, mig_state
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
        decided: set once the cluster has said which configuration this node has, and that was done.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        follow: Callable[[Instruction], Awaitable[Outcome]],
    ) -> None:
        self.decided = anyio.Event()
        self._settings = settings
        self._registry = registry
        self._follow = follow
        self._followed: Instruction | None = None
        self._outcome = Outcome()
        self._missing = ""
        self._chores: list[tuple[Feature, Chore]] = []
        self._node: Followed | None = None
        self._config_map: Followed | None = None
        self._recorder: Recorder | None = None
        self._labeller: Labeller | None = None
        self._rivals = RivalPods(registry, self._tell_rival)
        self._pod_recorder: Recorder | None = None
        self._pods: FollowedPods | None = None
        self._dropped = self._pods_dropped = 0

    async def decision(self) -> None:
        """Wait until the cluster has said which configuration this node has, but not for long."""
        if Feature.CONFIG not in self._settings.features:
            return
        with anyio.move_on_after(self._settings.patience) as waiting:
            await self.decided.wait()
        if waiting.cancelled_caught:
            log.warning(
                "the API server has not said which profile this node has; going on without",
                after=f"{self._settings.patience:g}s",
            )

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
        if self._config_map is not None:
            others = self._config_map.problem or self._missing
            problems[Feature.CONFIG] = problems[Feature.CONFIG] or others
        if self._labeller is not None and Feature.NODE_FEATURE in problems:
            problems[Feature.NODE_FEATURE] = self._labeller.node_feature.problem
        if self._pods is not None:
            problems[Feature.PODS] = self._pods.problem

        followed = self._followed or Instruction()
        return {
            "node": self._settings.node,
            "connected": bool(self._node and self._node.known and not self._node.problem),
            "problem": self._node.problem if self._node else "",
            "uses": dict(sorted(problems.items())),
            "label": followed.label or None,
            "profile": followed.profile,
            "migConfig": followed.mig_config,
            "refusal": self._outcome.refusal,
            **(self._labeller.report() if self._labeller else {}),
            "rivalPods": self._rivals.report(list(self._registry.snapshot.offers)),
            "eventsDropped": self._dropped + _dropped_by(self._recorder),
            "podEventsDropped": self._pods_dropped + _dropped_by(self._pod_recorder),
        }

    def _arranged(self, client: "Client") -> Sequence[Callable[[], Awaitable[None]]]:
        """Make what the settings ask for; give what takes back what was told."""
        settings, features = self._settings, self._settings.features
        self._node = Followed(client, NODES, settings.node, self._stir)
        self._dropped += _dropped_by(self._recorder)
        self._pods_dropped += _dropped_by(self._pod_recorder)
        self._recorder = Recorder(client, socket.gethostname())
        writer = Writer(client, self._node)
        teller = Teller(writer, self._registry)
        self._labeller = Labeller(
            writer,
            self._registry,
            self._mig_state,
            NodeFeature(client, self._node, settings.namespace),
            by_nfd=Feature.NODE_FEATURE in features,
        )
        work: dict[Feature, Callable[[], Awaitable[float | None]]] = {
            Feature.CONFIG: self._configure,
            Feature.LABELS: self._labeller.label,
            Feature.TAINT: teller.lift_taint,
            Feature.CONDITION: teller.judge,
        }

        self._chores = [(it, Chore(it, do)) for it, do in work.items() if it in features]
        if Feature.ALLOCATABLE in features:
            self._chores.append((Feature.ALLOCATABLE, Chore("allocatable", teller.lower, PROMPT)))
            self._chores.append((Feature.ALLOCATABLE, Chore("allocatable, rising", teller.rise)))
        if Feature.EVENTS in features:
            self._chores.append((Feature.EVENTS, self._recorder.chore))
        if Feature.POD_EVENTS in features:
            # Pods that misbehave must not use up what is meant for news of the node.
            self._pod_recorder = Recorder(
                client, socket.gethostname(), name=Feature.POD_EVENTS, each=EACH_POD
            )
            self._chores.append((Feature.POD_EVENTS, self._pod_recorder.chore))
        if Feature.PODS in features:
            self._pods = FollowedPods(client, settings.node, self._registry)
        if settings.config_map is not None:
            namespace, name = settings.config_map
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            self._config_map = Followed(client, path, name, self._stir)
        return self._labeller.leave, teller.leave

    async def _work(self) -> None:
        assert self._node is not None  # noqa: S101 - made just before
        async with anyio.create_task_group() as group:
            group.start_soon(self._node.run)
            if self._config_map is not None:
                group.start_soon(self._config_map.run)
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

    async def _configure(self) -> None:
        """Go by what the node's labels and the ConfigMap say now."""
        node, held = self._node, self._config_map
        if node is None or not node.known or (held is not None and not held.known):
            return
        if node.object is None:
            raise ClusterError(f"there is no Node {self._settings.node}; see --node-name")

        place = "ConfigMap {}/{}".format(*self._settings.config_map or ("", "")) if held else ""
        had = self._followed is not None and bool(self._followed.profiles)
        if held is not None and held.object is None and had:
            self._refuse(f"{place} is gone")
            return

        labels = node.object["metadata"].get("labels") or {}
        content = held.object or {} if held is not None else None
        wanted = instruction(labels, content, place)
        if wanted != self._followed:
            self._outcome = await self._follow(wanted)
            self._followed = wanted
            self._tell_outcome(wanted)
            self._stir()
        self._missing = ""
        self.decided.set()

    def _refuse(self, why: str) -> None:
        said = f"{why}; the last good configuration stays"
        if said != self._missing:
            self._missing = said
            log.error("the configuration was not taken", error=said)
            self._registry.news.publish(ConfigurationRefused(why, time.time()))

    def _tell_outcome(self, wanted: Instruction) -> None:
        if (refusal := self._outcome.refusal) is not None:
            self._registry.news.publish(ConfigurationRefused(refusal, time.time()))
        elif self._outcome.misfit:
            self._tell("MIGLayoutRefused", self._outcome.misfit, "Configure", warning=True)
        elif wanted.profile is not None:
            note = f"profile {wanted.profile}, by the label {wanted.label}"
            self._tell("ConfigurationTaken", note, "Configure")

    def _mig_state(self) -> str | None:
        return mig_state(self._followed, self._outcome, self._registry.snapshot)

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
