"""What the API server tells of this node's pods, where it is asked: names, state, wishes."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from metagpu.core.model import Holder

ENDED: Final = frozenset({"Succeeded", "Failed"})
"""The phases of a pod whose containers do not run any more, and never will."""


class KnownPod(msgspec.Struct, frozen=True):
    """A pod as the API server has it.

    Attributes:
        phase: its words for how far it is, as `Running`.
        owner: kind and name of what made it, as in `ReplicaSet/train-7d9f`; empty if nobody did.
        wishes: its annotations that speak of GPU memory (`core/wishes.py`).
    """

    uid: str
    namespace: str
    name: str
    phase: str = ""
    owner: str = ""
    wishes: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in ENDED


class KnownPods(msgspec.Struct, frozen=True):
    """All pods of the node; none where the API server is not asked, or has not answered yet."""

    by_uid: Mapping[str, KnownPod] = msgspec.field(default_factory=dict)
    by_name: Mapping[tuple[str, str], KnownPod] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, pods: Iterable[KnownPod]) -> "KnownPods":
        """Make it of pods; of two of one name the one that still runs is found by it."""
        known = tuple(pods)
        those_that_run_last = sorted(known, key=lambda pod: not pod.ended)
        return cls(
            MappingProxyType({pod.uid: pod for pod in known}),
            MappingProxyType({(pod.namespace, pod.name): pod for pod in those_that_run_last}),
        )

    @property
    def wishing(self) -> tuple[KnownPod, ...]:
        """Those that wish something about GPU memory."""
        return tuple(pod for pod in self.by_uid.values() if pod.wishes)

    def find(self, holder: Holder, uid: str | None) -> KnownPod | None:
        """Find a container's pod: by its uid where that is known, else by its name."""
        if uid is not None:
            return self.by_uid.get(uid)
        return self.by_name.get((holder.namespace, holder.pod))
