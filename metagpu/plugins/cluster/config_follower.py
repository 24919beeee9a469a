"""The follower of the cluster's configuration: node labels and ConfigMap."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import structlog

from metagpu.core.config.profiles import ClusterChoice, ConfigOutcome
from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.events import ConfigRejected
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.profile_choice import mig_state, read_choice
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.cluster.watch import WatchedObject

log = structlog.get_logger()


class RecordNodeEvent(Protocol):
    """Records an Event of the node."""

    def __call__(
        self, reason: EventReason, note: str, action: str, *, warning: bool = False
    ) -> None:
        """Record an Event of the node."""


@dataclass(eq=False)
class ConfigFollower:
    """Makes the daemon follow the node's labels and the ConfigMap.

    Attributes:
        registry: publishes rejected configurations.
        follow: applies the cluster's choice.
        record_event: records Events of the node.
        decided: set once the cluster's first choice is applied.
        problem: why the choice of now cannot be followed, empty without a problem.
    """

    settings: ClusterSettings
    registry: Registry
    follow: Callable[[ClusterChoice], Awaitable[ConfigOutcome]]
    record_event: RecordNodeEvent
    decided: anyio.Event = field(default_factory=anyio.Event)
    problem: str = ""
    _followed: ClusterChoice | None = None
    _outcome: ConfigOutcome = field(default_factory=ConfigOutcome)
    _logged: LogOnce = field(default_factory=LogOnce)

    @property
    def followed(self) -> ClusterChoice | None:
        """The choice that was applied last, `None` before the first."""
        return self._followed

    def mig_state(self) -> str | None:
        """Return the answer to mig-manager's label, `None` for no answer."""
        return mig_state(self._followed, self._outcome, self.registry.snapshot)

    def report(self) -> Mapping[str, Any]:
        """Return the choice that is followed, and its outcome."""
        followed = self._followed or ClusterChoice()
        return {
            "label": followed.label or None,
            "profile": followed.profile,
            "migConfig": followed.mig_config,
            "refusal": self._outcome.rejection,
        }

    async def wait_for_choice(self) -> None:
        """Wait until the cluster's first choice is applied, for `choice_timeout` at most."""
        if Feature.CONFIG not in self.settings.features:
            return
        with anyio.move_on_after(self.settings.choice_timeout) as waiting:
            await self.decided.wait()
        if waiting.cancelled_caught:
            log.warning(
                "cluster choice timed out; going on without it",
                after=f"{self.settings.choice_timeout:g}s",
            )

    async def reconcile(self, node: WatchedObject, held: WatchedObject | None) -> bool:
        """Apply the choice of labels and ConfigMap; return whether it has changed.

        Args:
            node: the Node.
            held: the ConfigMap with the profiles, `None` without profiles in the cluster.

        Raises:
            ClusterError: there is no such Node.
        """
        if not node.known or (held is not None and not held.known):
            return False
        if node.object is None:
            raise ClusterError(f"there is no Node {self.settings.node}; see --node-name")

        place = "ConfigMap {}/{}".format(*self.settings.config_map or ("", "")) if held else ""
        had_profiles = self._followed is not None and bool(self._followed.profiles)
        if held is not None and held.object is None and had_profiles:
            self._reject(f"{place} is gone")
            return False

        labels = node.object["metadata"].get("labels") or {}
        content = held.object or {} if held is not None else None
        wanted = read_choice(labels, content, place)
        changed = wanted != self._followed
        if changed:
            self._outcome = await self.follow(wanted)
            self._followed = wanted
            self._record_outcome(wanted)
        self.problem = ""
        self._logged.clear(self)
        self.decided.set()
        return changed

    def _reject(self, reason: str) -> None:
        self.problem = f"{reason}; the last good configuration stays"
        if self._logged.is_new(self, self.problem):
            log.error("configuration rejected", error=self.problem)
            self.registry.events.publish(ConfigRejected(reason, time.time()))

    def _record_outcome(self, wanted: ClusterChoice) -> None:
        if (refusal := self._outcome.rejection) is not None:
            self.registry.events.publish(ConfigRejected(refusal, time.time()))
        elif self._outcome.mig_mismatch:
            self.record_event(
                EventReason.MIG_LAYOUT_REJECTED,
                self._outcome.mig_mismatch,
                "Configure",
                warning=True,
            )
        elif wanted.profile is not None:
            note = f"profile {wanted.profile}, chosen by the label {wanted.label}"
            self.record_event(EventReason.CONFIG_APPLIED, note, "Configure")
