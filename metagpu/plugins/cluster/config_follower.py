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
        trigger: a function that runs when the node's labels may have to change.
        decided: set once the cluster's first choice is applied.
        node: the Node, `None` before the API server's side runs.
        config_map: the profiles, `None` without profiles in the cluster.
    """

    settings: ClusterSettings
    registry: Registry
    follow: Callable[[ClusterChoice], Awaitable[ConfigOutcome]]
    record_event: RecordNodeEvent
    trigger: Callable[[], None]
    decided: anyio.Event = field(default_factory=anyio.Event)
    node: WatchedObject | None = None
    config_map: WatchedObject | None = None
    _followed: ClusterChoice | None = None
    _outcome: ConfigOutcome = field(default_factory=ConfigOutcome)
    _missing: str = ""
    _logged: LogOnce = field(default_factory=LogOnce)

    @property
    def followed(self) -> ClusterChoice | None:
        """The choice that was applied last, `None` before the first."""
        return self._followed

    @property
    def problem(self) -> str:
        """The reason why the ConfigMap cannot be followed, empty without one."""
        return (self.config_map.problem or self._missing) if self.config_map is not None else ""

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

    async def reconcile(self) -> None:
        """Apply the choice of the node's labels and the ConfigMap, if it has changed.

        Raises:
            ClusterError: there is no such Node.
        """
        node, held = self.node, self.config_map
        if node is None or not node.known or (held is not None and not held.known):
            return
        if node.object is None:
            raise ClusterError(f"there is no Node {self.settings.node}; see --node-name")

        place = "ConfigMap {}/{}".format(*self.settings.config_map or ("", "")) if held else ""
        had_profiles = self._followed is not None and bool(self._followed.profiles)
        if held is not None and held.object is None and had_profiles:
            self._reject(f"{place} is gone")
            return

        labels = node.object["metadata"].get("labels") or {}
        content = held.object or {} if held is not None else None
        wanted = read_choice(labels, content, place)
        if wanted != self._followed:
            self._outcome = await self.follow(wanted)
            self._followed = wanted
            self._record_outcome(wanted)
            self.trigger()
        self._missing = ""
        self._logged.clear(self)
        self.decided.set()

    def _reject(self, reason: str) -> None:
        self._missing = f"{reason}; the last good configuration stays"
        if self._logged.is_new(self, self._missing):
            log.error("configuration rejected", error=self._missing)
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
