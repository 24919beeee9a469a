"""Competing device plugins, recognized by the DaemonSets of this node's pods.

The socket of a competing plugin alone decides that metagpu does not register a resource
(plugins/kubelet/endpoint); the pod names the plugin for people.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from metagpu.core.model.pods import KnownPod
from metagpu.core.reports.schema import CompetingPodReport
from metagpu.core.state.registry import Registry

_NVIDIA: Final = "nvidia.com/"
_PROGRAMS: Final = (
    ("HAMi's device plugin", r"(.+-)?hami-device-plugin", (_NVIDIA,)),
    ("NVIDIA's device plugin", r"(.+-)?nvidia-device-plugin(-daemonset|-ds)?", (_NVIDIA,)),
    ("GKE's device plugin", r"nvidia-gpu-device-plugin(-.+)?", (_NVIDIA,)),
    ("cnvrg's MetaGPU", r"(.+-)?metagpu-device-plugin", ("cnvrg.io/",)),
)
"""Names of competing plugins, patterns of their DaemonSets, prefixes of their resources.

The patterns follow the plugins' charts and manifests; the GPU operator's plugin is NVIDIA's.
"""


class CompetingPod(msgspec.Struct, frozen=True):
    """A competing device plugin's pod on this node.

    Attributes:
        program: the plugin's name, for people.
        prefixes: the prefixes of its resource names.
    """

    program: str
    pod: str
    prefixes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program} (pod {self.pod})"

    def contested(self, resources: Iterable[str]) -> list[str]:
        """Return the resources of these that the plugin may serve too."""
        return sorted(it for it in resources if it.startswith(self.prefixes))


def find_competing_pods(pods: Iterable[KnownPod]) -> tuple[CompetingPod, ...]:
    """Find competing device plugins among the pods of this node."""
    found = []

    for pod in pods:
        kind, _, owner = pod.owner.partition("/")
        if kind != "DaemonSet" or pod.ended:
            continue
        for program, pattern, prefixes in _PROGRAMS:
            if re.fullmatch(pattern, owner):
                found.append(CompetingPod(program, str(pod), prefixes))
                break
    return tuple(sorted(found, key=lambda it: it.pod))


def describe_competing_pod(pod: CompetingPod, offered: Iterable[str]) -> str:
    """Describe a competing plugin and its effect on our resources, for an Event."""
    if contested := pod.contested(offered):
        return (
            f"{pod} runs on this node; it may serve {', '.join(contested)} as we do, and "
            "metagpu does not register what it serves. Remove it from this node, or give our "
            "resource another name"
        )
    return (
        f"{pod} runs on this node and allocates its GPUs under other names than ours; metagpu "
        "leaves its containers alone. Remove it from this node"
    )


@dataclass(eq=False)
class CompetingPodWatch:
    """Finds competing plugins among the node's pods, whenever the pods change.

    Attributes:
        on_found: a function that receives each new pod.
        found: the competing pods that run now.
    """

    registry: Registry
    on_found: Callable[[CompetingPod], None]
    found: tuple[CompetingPod, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled; report pods once the offered resources are known."""
        reported: set[CompetingPod] = set()

        async for pods, offered in self.registry.watch(lambda now: (now.pods, bool(now.offers))):
            self.found = find_competing_pods(pods.by_uid.values())
            if not offered:
                continue
            for pod in self.found:
                if pod not in reported:
                    self.on_found(pod)
            reported = set(self.found)

    def name_competitor(self, resource: str) -> str:
        """Name the competing plugins that may serve a resource."""
        names = [str(it) for it in self.found if it.contested([resource])]
        return " or ".join(names) or "another device plugin"

    def report(self, offered: Sequence[str]) -> list[CompetingPodReport]:
        """Return the competing pods."""
        return [
            CompetingPodReport(it.program, it.pod, list(it.contested(offered))) for it in self.found
        ]
