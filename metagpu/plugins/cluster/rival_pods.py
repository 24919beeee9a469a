"""Other device plugins for NVIDIA's GPUs, known by the DaemonSets whose pods run on this node.

A socket says that a resource is served, and by that alone we leave it (plugins/rivals); the pod
says by whom, for people.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry

_NVIDIA: Final = "nvidia.com/"
_PROGRAMS: Final = (
    ("HAMi's device plugin", r"(.+-)?hami-device-plugin", (_NVIDIA,)),
    ("NVIDIA's device plugin", r"(.+-)?nvidia-device-plugin(-daemonset|-ds)?", (_NVIDIA,)),
    ("GKE's device plugin", r"nvidia-gpu-device-plugin(-.+)?", (_NVIDIA,)),
    ("cnvrg's MetaGPU", r"(.+-)?metagpu-device-plugin", ("cnvrg.io/",)),
)
"""What they are called, what their DaemonSets are called, and where their resources' names begin.

The names are those of their charts and manifests; the GPU operator's plugin is NVIDIA's.
"""


class RivalPod(msgspec.Struct, frozen=True):
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


def rivals_among(pods: Iterable[KnownPod]) -> tuple[RivalPod, ...]:
    """Find other device plugins among the pods of this node."""
    found = []

    for pod in pods:
        kind, _, owner = pod.owner.partition("/")
        if kind != "DaemonSet" or pod.ended:
            continue
        for program, pattern, prefixes in _PROGRAMS:
            if re.fullmatch(pattern, owner):
                found.append(RivalPod(program, str(pod), prefixes))
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
    """Looks for them among the node's pods, whenever those change.

    Attributes:
        tell: called for each that is new.
        found: those that are there.
    """

    registry: Registry
    tell: Callable[[RivalPod], None]
    found: tuple[RivalPod, ...] = ()

    async def run(self) -> None:
        """Look until cancelled; tell once it is known what is on offer here."""
        told: set[RivalPod] = set()

        async for pods, offered in self.registry.watch(lambda now: (now.pods, bool(now.offers))):
            self.found = rivals_among(pods.by_uid.values())
            for each in self.found if offered else ():
                if each not in told:
                    self.tell(each)
            told = set(self.found) if offered else told

    def report(self, offered: Sequence[str]) -> list[dict[str, Any]]:
        """Say who is there, as plain data."""
        return [
            {"program": it.program, "pod": it.pod, "contested": it.contested(offered)}
            for it in self.found
        ]
