"""The configuration that the cluster chooses for this node, as labels and profiles change."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.news import ConfigurationRefused
from metagpu.core.profiles import Instruction
from metagpu.core.registry import Registry
from metagpu.plugins.cluster.choice import Outcome, instruction, mig_state
from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.settings import Feature, Settings

log = structlog.get_logger()


class Tell(Protocol):
    """How the node is told of."""

    def __call__(self, reason: str, note: str, action: str, *, warning: bool = False) -> None:
        """Tell of the node by an Event."""


@dataclass(eq=False)
class Chooser:
    """Has the daemon follow what the node's labels and the ConfigMap say.

    Attributes:
        registry: where it is news that a configuration was refused.
        follow: does what the cluster says.
        tell: tells of the node.
        stir: called when what the node tells of itself may have changed.
        decided: set once the cluster has said which configuration this node has, and that was done.
        node: the Node as it was told, `None` while nobody asked.
        config_map: the profiles as they were told, `None` if they are not in the cluster.
    """

    settings: Settings
    registry: Registry
    follow: Callable[[Instruction], Awaitable[Outcome]]
    tell: Tell
    stir: Callable[[], None]
    decided: anyio.Event = field(default_factory=anyio.Event)
    node: Followed | None = None
    config_map: Followed | None = None
    _followed: Instruction | None = None
    _outcome: Outcome = field(default_factory=Outcome)
    _missing: str = ""

    @property
    def problem(self) -> str:
        """What hinders it, empty when nothing does."""
        return (self.config_map.problem or self._missing) if self.config_map is not None else ""

    def mig_state(self) -> str | None:
        """Answer mig-manager's label; `None` where it asks nothing of us."""
        return mig_state(self._followed, self._outcome, self.registry.snapshot)

    def report(self) -> Mapping[str, Any]:
        """Say what is followed, and what became of it."""
        followed = self._followed or Instruction()
        return {
            "label": followed.label or None,
            "profile": followed.profile,
            "migConfig": followed.mig_config,
            "refusal": self._outcome.refusal,
        }

    async def decision(self) -> None:
        """Wait until the cluster has said which configuration this node has, but not for long."""
        if Feature.CONFIG not in self.settings.features:
            return
        with anyio.move_on_after(self.settings.patience) as waiting:
            await self.decided.wait()
        if waiting.cancelled_caught:
            log.warning(
                "the API server has not said which profile this node has; going on without",
                after=f"{self.settings.patience:g}s",
            )

    async def choose(self) -> None:
        """Go by what the node's labels and the ConfigMap say now.

        Raises:
            ClusterError: if there is no such Node.
        """
        node, held = self.node, self.config_map
        if node is None or not node.known or (held is not None and not held.known):
            return
        if node.object is None:
            raise ClusterError(f"there is no Node {self.settings.node}; see --node-name")

        place = "ConfigMap {}/{}".format(*self.settings.config_map or ("", "")) if held else ""
        had = self._followed is not None and bool(self._followed.profiles)
        if held is not None and held.object is None and had:
            self._refuse(f"{place} is gone")
            return

        labels = node.object["metadata"].get("labels") or {}
        content = held.object or {} if held is not None else None
        wanted = instruction(labels, content, place)
        if wanted != self._followed:
            self._outcome = await self.follow(wanted)
            self._followed = wanted
            self._tell_outcome(wanted)
            self.stir()
        self._missing = ""
        self.decided.set()

    def _refuse(self, why: str) -> None:
        said = f"{why}; the last good configuration stays"
        if said != self._missing:
            self._missing = said
            log.error("the configuration was not taken", error=said)
            self.registry.news.publish(ConfigurationRefused(why, time.time()))

    def _tell_outcome(self, wanted: Instruction) -> None:
        if (refusal := self._outcome.refusal) is not None:
            self.registry.news.publish(ConfigurationRefused(refusal, time.time()))
        elif self._outcome.misfit:
            self.tell("MIGLayoutRefused", self._outcome.misfit, "Configure", warning=True)
        elif wanted.profile is not None:
            note = f"profile {wanted.profile}, by the label {wanted.label}"
            self.tell("ConfigurationTaken", note, "Configure")
