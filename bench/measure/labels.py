"""From a label of the node to its allocatable shares."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final

import anyio
from anyio import to_thread

from bench import daemon, kubelets
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet

_NODE: Final = "bench"
_PLACE: Final = ("kube-system", "metagpu")
_LABEL: Final = "metagpu.io/config"
_CALM: Final = 0.3
"""Seconds between two changes: what the daemon writes to the Node has been written then."""
_TIMEOUT: Final = 30.0
_PROFILE: Final = """\
version: metagpu/v1
pools:
  - name: all
    backends: [{{backend: fraction, resource: {resource}, sharesPerGpu: {shares}}}]
"""


@dataclass(frozen=True)
class Profile:
    """A profile for the node's 8 GPUs, and its shares."""

    name: str
    resource: str
    shares: int

    @property
    def text(self) -> str:
        """Return the text of the profile in the ConfigMap."""
        return _PROFILE.format(resource=self.resource, shares=self.shares)

    def offered(self, kubelet: SimKubelet) -> bool:
        """Return whether a kubelet counts exactly this."""
        return kubelet.allocatable().get(self.resource) == 8 * self.shares


CHANGES: Final[Mapping[str, tuple[Profile, Profile]]] = {
    "label change to the new list, 8 x 100": (
        Profile("tens", daemon.RESOURCE, 10),
        Profile("hundreds", daemon.RESOURCE, 100),
    ),
    "label change to another resource, 8 x 100": (
        Profile("one", "example.com/one", 100),
        Profile("other", "example.com/other", 100),
    ),
}


def labels(plan: Plan) -> list[Figure]:
    """Alternate the label between the two profiles."""
    figures = []
    for name, profiles in CHANGES.items():
        samples = anyio.run(_labels, plan, name, profiles)
        figures += [samples.figure(name, target=1000), samples.worst(f"{name}, worst")]
    return figures


async def _labels(plan: Plan, name: str, profiles: tuple[Profile, Profile]) -> Samples:
    samples = Samples()
    server = SimApiServer()
    server.add_node(_NODE)
    server.configure(*_PLACE, {other.name: other.text for other in profiles})

    async with server.running(), _joined(server) as kubelet:
        for number, profile in zip(range(-3, plan.count(100, 5)), cycle(profiles), strict=False):
            if number % 50 == 0:
                plan.report(f"labels: {name}: {number}")
            began = time.perf_counter()
            server.label(_NODE, {_LABEL: profile.name})
            await kubelet.wait_for(partial(profile.offered, kubelet), within=_TIMEOUT)
            if number >= 0:
                samples.seconds.append(time.perf_counter() - began)
            await anyio.sleep(_CALM)
    return samples


@asynccontextmanager
async def _joined(server: SimApiServer) -> AsyncIterator[SimKubelet]:
    """Run a daemon with this API server; yield its kubelet."""
    with daemon.folder() as folder:
        joins = {
            "--node-name": _NODE,
            "--config-map": "/".join(_PLACE),
            "--kubeconfig": server.kubeconfig(folder),
        }
        async with kubelets.simulated(folder / "kubelet") as kubelet:
            config = daemon.POOL.format(shares=1)
            subject = daemon.start(folder, config=config, kubelet=False, further=joins)
            try:
                await kubelet.wait_for(
                    lambda: kubelet.allocatable().get(daemon.RESOURCE) == 8, within=_TIMEOUT
                )
                yield kubelet
            except TimeoutError as error:
                error.add_note(subject.log_tail)
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(subject.stop)
