"""Other device plugins for NVIDIA's GPUs, known by the DaemonSets whose pods run on this node.

A socket says that a resource is served, and by that alone we leave it (plugins/rivals); the pod
says by whom, for people.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client

PERIOD: Final = 60.0
"""Seconds between two looks at the node's pods."""
_PODS: Final = "/api/v1/pods"
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NVIDIA: Final = "nvidia.com/"
_PROGRAMS: Final = (
    ("HAMi's device plugin", r"(.+-)?hami-device-plugin", (_NVIDIA,)),
    ("NVIDIA's device plugin", r"(.+-)?nvidia-device-plugin(-daemonset|-ds)?", (_NVIDIA,)),
    ("cnvrg's MetaGPU", r"(.+-)?metagpu-device-plugin", ("cnvrg.io/",)),
)
"""What they are called, what their DaemonSets are called, and where their resources' names begin.

The names are those of their charts and manifests; the GPU operator's plugin is NVIDIA's.
"""


class Pod(Protocol):
    """What has to be known of a pod."""

    @property
    def namespace(self) -> str:
        """Where it is."""

    @property
    def name(self) -> str:
        """What it is called there."""

    @property
    def owner(self) -> str:
        """Kind and name of what made it, as `DaemonSet/hami-device-plugin`."""

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good."""


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod as the API server told it."""

    namespace: str
    name: str
    owner: str
    ended: bool


@dataclass(frozen=True, slots=True)
class RivalPod:
    """A device plugin's pod on this node.

    Attributes:
        program: what people call it.
        prefixes: how the names of its resources begin.
    """

    program: str
    pod: str
    prefixes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program} (pod {self.pod})"

    def contested(self, resources: Iterable[str]) -> list[str]:
        """Give the resources that it may serve too."""
        return sorted(it for it in resources if it.startswith(self.prefixes))


def rivals_among(pods: Iterable[Pod]) -> tuple[RivalPod, ...]:
    """Find other device plugins among the pods of this node."""
    found = []

    for pod in pods:
        kind, _, owner = pod.owner.partition("/")
        if kind != "DaemonSet" or pod.ended:
            continue
        for program, pattern, prefixes in _PROGRAMS:
            if re.fullmatch(pattern, owner):
                found.append(RivalPod(program, f"{pod.namespace}/{pod.name}", prefixes))
                break
    return tuple(sorted(found, key=lambda it: it.pod))


def note_of(rival: RivalPod, offered: Iterable[str]) -> str:
    """Say what a rival means for what is offered here."""
    if contested := rival.contested(offered):
        return (
            f"{rival} runs on this node; it may serve {', '.join(contested)} as we do, and what it "
            "serves is left to it. Take it off this node, or give our resource another name"
        )
    return (
        f"{rival} runs on this node and gives out its GPUs under other names than we do; what it "
        "has given is left alone. Take it off this node"
    )


@dataclass(eq=False)
class RivalPods:
    """Looks for them at the start, and when the Node has changed.

    Attributes:
        tell: called for each that is new.
        found: those that are there.
    """

    client: "Client"
    node: str
    tell: Callable[[RivalPod], None]
    found: tuple[RivalPod, ...] = ()
    _looked: float | None = None

    async def look(self) -> float | None:
        """Look, unless it was just done: then give the seconds until it is worth it.

        Raises:
            ClusterError: if the API server does not answer, or does not allow it.
        """
        now = anyio.current_time()
        if self._looked is not None and now < self._looked + PERIOD:
            return self._looked + PERIOD - now

        answer = await self.client.call(
            "GET", _PODS, query={"fieldSelector": f"spec.nodeName={self.node}"}
        )
        self._looked = now
        found = rivals_among(map(_owned, answer.get("items") or ()))
        for each in found:
            if each not in self.found:
                self.tell(each)
        self.found = found
        return None

    def report(self, offered: Sequence[str]) -> list[dict[str, Any]]:
        """Say who is there, as plain data."""
        return [
            {"program": it.program, "pod": it.pod, "contested": it.contested(offered)}
            for it in self.found
        ]


def _owned(it: "dict[str, Any]") -> OwnedPod:
    metadata = it["metadata"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]

    return OwnedPod(
        str(metadata["namespace"]),
        str(metadata["name"]),
        f"{owners[0]['kind']}/{owners[0]['name']}" if owners else "",
        (it.get("status") or {}).get("phase") in _ENDED,
    )
