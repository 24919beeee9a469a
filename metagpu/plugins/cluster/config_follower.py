"""The follower of the cluster's configuration: node labels and ConfigMap."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio
import structlog

from metagpu.core.availability.conflict import orphaned_leases
from metagpu.core.config.profiles import LAST_GOOD, ClusterChoice, ConfigOutcome, has_profile
from metagpu.core.errors import ClusterError
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.events import ConfigRejected
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.event_recorder import EventReason
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
        outcome: returns what has become of the choice by now.
        record_event: records Events of the node.
        decided: set once the cluster's first choice is applied.
        problem: why the present choice cannot be followed, empty without a problem.
    """

    settings: ClusterSettings
    registry: Registry
    follow: Callable[[ClusterChoice], Awaitable[None]]
    outcome: Callable[[], ConfigOutcome]
    record_event: RecordNodeEvent
    decided: anyio.Event = field(default_factory=anyio.Event)
    problem: str = ""
    _followed: ClusterChoice | None = None
    _logged: LogOnce = field(default_factory=LogOnce)

    @property
    def followed(self) -> ClusterChoice | None:
        """The choice that was applied last, `None` before the first."""
        return self._followed

    def mig_state(self) -> str | None:
        """Return the answer to mig-manager's label, `None` for no answer."""
        return mig_state(self._followed, self.outcome(), self.registry.snapshot)

    def report(self) -> Mapping[str, Any]:
        """Return the choice that is followed and its outcome: fields of a report."""
        followed = self._followed or ClusterChoice()
        return {
            "label": followed.label or None,
            "profile": followed.profile,
            "mig_config": followed.mig_config,
            "refusal": self.outcome().rejection if self._followed else None,
        }

    async def wait_for_choice(self, within: float) -> None:
        """Wait until the cluster's first choice is applied, for `within` seconds at most."""
        if Feature.CONFIG not in self.settings.features or self.decided.is_set():
            return
        with anyio.move_on_after(within) as waiting:
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
        if held is not None and had_profiles and not (held.object or {}).get("data"):
            self._reject(f"{place} is {'gone' if held.object is None else 'empty'}")
            return False

        labels = node.object["metadata"].get("labels") or {}
        content = held.object or {} if held is not None else None
        wanted = read_choice(labels, content, place)
        changed = wanted != self._followed
        if changed:
            await self.follow(wanted)
            self._followed = wanted
            self._record_outcome(wanted)
        self.problem = ""
        self._logged.clear(self)
        self.decided.set()
        return changed

    def _reject(self, reason: str) -> None:
        self.problem = f"{reason}; {LAST_GOOD}"
        if self._logged.is_new(self, self.problem):
            log.error("configuration rejected", error=self.problem)
            self.registry.events.publish(ConfigRejected(reason, time.time(), LAST_GOOD))

    def _record_outcome(self, wanted: ClusterChoice) -> None:
        outcome = self.outcome()
        if (refusal := outcome.rejection) is not None:
            self.registry.events.publish(ConfigRejected(refusal, time.time(), outcome.effect))
        elif outcome.mig_mismatch:
            self.record_event(
                EventReason.MIG_LAYOUT_REJECTED,
                outcome.mig_mismatch,
                "Configure",
                warning=True,
            )
        elif wanted.profile is not None:
            note = f"profile {wanted.profile}, chosen by the label {wanted.label}"
            self.record_event(EventReason.CONFIG_APPLIED, note, "Configure")


CONFIG_LABEL: Final = "metagpu.io/config"
PLUGIN_LABEL: Final = "nvidia.com/device-plugin.config"
MIG_CONFIG_LABEL: Final = "nvidia.com/mig.config"
MIG_STATE_LABEL: Final = "nvidia.com/mig.config.state"
MIG_MANAGER_LABEL: Final = "nvidia.com/gpu.deploy.mig-manager"


def runs_mig_manager(labels: Mapping[str, str]) -> bool:
    """Return whether the GPU operator runs its MIG manager on a node."""
    return labels.get(MIG_MANAGER_LABEL) == "true"


def read_choice(
    labels: Mapping[str, str],
    config_map: Mapping[str, Any] | None = None,
    place: str = "",
) -> ClusterChoice:
    """Return the configuration that the cluster chooses for this node.

    Our own label has precedence over that of NVIDIA's plugin. mig-manager's label chooses a layout
    of `mig-configs`; it chooses a profile too, if one has its name and no other label chooses one.

    Args:
        labels: the node's labels; an empty value counts as absent.
        config_map: the object with the profiles, `None` without one.
        place: the name of that object in messages.
    """
    data: Mapping[str, str] | None = None
    if config_map is not None:
        data = dict(config_map.get("data") or {})

    mig, managed = labels.get(MIG_CONFIG_LABEL) or None, runs_mig_manager(labels)
    candidates = [CONFIG_LABEL, PLUGIN_LABEL]
    if mig is not None and data is not None and has_profile(data, mig):
        candidates.append(MIG_CONFIG_LABEL)

    for label in candidates:
        if profile := labels.get(label):
            return ClusterChoice(profile, label, mig, place, data, managed)
    return ClusterChoice(None, "", mig, place, data, managed)


def mig_state(
    wanted: ClusterChoice | None, outcome: ConfigOutcome, snapshot: Snapshot
) -> str | None:
    """Return the answer to mig-manager's label, `None` for no answer."""
    if wanted is None or wanted.mig_config is None:
        return None
    ours = outcome.has_mig_layouts or wanted.profile == wanted.mig_config
    if outcome.rejection is not None:
        return "failed" if ours or wanted.mig_config in outcome.rejection else None
    if not ours:
        return None
    if outcome.mig_mismatch:
        return "failed"
    waits = not snapshot.offers or any(map(_is_pending, snapshot.gpus.values()))
    return "pending" if waits else "success"


def _is_pending(state: GpuState) -> bool:
    """Return whether a GPU does not match the configuration yet."""
    blocked = any(
        provisioned_state.blocked or provisioned_state.paused
        for provisioned_state in state.provisioned.values()
    )
    return bool(orphaned_leases(state.shares, state.leases) or state.suspended or blocked)
