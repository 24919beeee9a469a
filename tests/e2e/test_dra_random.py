"""Random ResourceClaims: the real scheduler allocates, and the node's own code prepares."""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from metagpu.core.devices.slices import slices_of
from metagpu.core.grants.injection import Injection
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.dra.prepared_claim import ClaimFiles
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.kubelet.granting import no_cdi
from metagpu.sim.machine.spec import build_node
from metagpu.testing.node import BackendRig, report_no_leases, run_backends
from tests.e2e.cluster import NAMESPACE
from tests.e2e.fake_node import (
    DRIVER,
    NODE,
    Allocation,
    FakeNode,
    allocations_of,
    capacity,
    exactly,
    fake_node,
)
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.rigs.build import BACKENDS

PROFILES = {"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 4, "7g.80gb": 8}
"""Memory slices of an H100, by profile."""
CONFIGURATION = f"""\
version: metagpu/v1
pools:
  - name: mig
    gpus: {{index: 0-1}}
    api: dra
    backends: [{{backend: mig, profiles: [{", ".join(PROFILES)}], enableMig: true}}]
  - name: shared
    api: dra
    backends:
      - {{backend: whole}}
      - {{backend: fraction}}
      - {{backend: timeslice, replicas: 4}}
      - {{backend: mps}}
"""
GPUS = """\
gpus:
  - {model: h100-80gb, count: 2, provisioning: {duration: 20ms, computeDuration: 10ms}}
  - {model: a100-40gb, count: 4}
"""
LIMITS = {"fraction": 100, "mps": 100, "timeslice": 4}
"""The parts of a GPU that all claims together may have, by the kind of the device."""
BATCH, STAYING = 10, 8
DEVICE = re.compile(r"gpu-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}-?(?P<rest>.*)")


@pytest.fixture(scope="module")
def fake(node: Node) -> Iterator[FakeNode]:
    """Create a Node without a kubelet, and the classes of the devices."""
    with fake_node(node) as fake:
        yield fake


@pytest.mark.parametrize(
    "arrivals", [100, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_random_claims_hold_nothing_twice(fake: FakeNode, arrivals: int, tmp_path: Path) -> None:
    """Claims of five backends come and go: nothing is held twice, and all are prepared."""
    (tmp_path / "node.yaml").write_text(GPUS)
    fake.clear()  # the devices of another test
    anyio.run(come_and_go, fake, arrivals, tmp_path)


async def come_and_go(fake: FakeNode, arrivals: int, folder: Path) -> None:
    """Create claims by tens, prepare what was allocated, and end some at random."""
    chance = random.Random(14)  # noqa: S311 - the same claims every time
    node = build_node(str(folder / "node.yaml"))
    injection = Injection().by_own_cdi
    async with run_backends(CONFIGURATION, BACKENDS, node=node, injection=injection) as rig:
        report_no_leases(rig)
        crowd = Crowd(fake, rig, folder)
        await crowd.publish()
        # Claims of a kind keep its GPU: a kind that finds none idle at first might get none at all.
        await crowd.arrive({f"first-{kind}": random_request(chance, kind) for kind in KINDS})
        for number in range(0, arrivals, BATCH):
            names = [f"claim-{n}" for n in range(number, number + BATCH)]
            await crowd.arrive({name: random_request(chance) for name in names})
            crowd.check()
            waiting = sorted(crowd.claims.keys() - crowd.prepared.keys())
            ending = chance.sample(sorted(crowd.prepared), max(0, len(crowd.prepared) - STAYING))
            await crowd.end(*ending, *waiting[BATCH // 2 :])
        await crowd.end(*crowd.claims)
        crowd.check()
        print(f"{arrivals} claims: {dict(crowd.served)} were prepared, {crowd.refused} refused")
        assert crowd.refused == []
        assert len(crowd.served) == len(KINDS)
        assert crowd.served.total() > arrivals / 2


@dataclass
class Crowd:
    """Claims of a node: what the scheduler allocated, and what the node prepared."""

    fake: FakeNode
    rig: BackendRig
    folder: Path
    claims: dict[str, Document] = field(default_factory=dict)
    prepared: dict[str, ResourceClaimRef] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.rig.apply(CONFIGURATION)
        self.preparer = ClaimPreparer(
            self.rig.registry,
            DRIVER,
            read_claim=self._read,
            backend=layout.backends.__getitem__,
            files=ClaimFiles(self.folder),
            ensure_cdi_names=no_cdi,
            ensure_monitored=no_cdi,
        )

    async def _read(self, ref: ResourceClaimRef) -> Mapping[str, Any]:
        return self.claims[ref.name]

    async def publish(self) -> None:
        """Write the ResourceSlices of all GPUs, once every backend is set up."""
        ready = await self.rig.wait_until(
            lambda now: not any(gpu.suspended for gpu in now.gpus.values())
        )
        found = slices_of(ready, NODE, DRIVER)
        specs = [spec for of_pool in found.values() for spec in of_pool]
        await to_thread.run_sync(self.fake.publish, specs)

    async def arrive(self, requests: Mapping[str, Document]) -> None:
        """Create claims, and prepare all that the scheduler allocates."""

        def settle() -> None:
            for name, request in requests.items():
                self.fake.ask(name, request)
            for name in requests:
                self.fake.settled(name)
            self.claims = self.fake.claims()

        await to_thread.run_sync(settle)
        async with anyio.create_task_group() as group:
            for name in self.held.keys() - self.prepared.keys():
                group.start_soon(self._prepare, name)

    async def _prepare(self, name: str) -> None:
        ref = ResourceClaimRef(NAMESPACE, name, self.claims[name]["metadata"]["uid"])
        try:
            await self.preparer.prepare(ref)
        except Exception as error:  # noqa: BLE001 - all are counted
            self.refused.append(f"{name}: {error}")
        else:
            (allocation,) = self.held[name]
            self.served[kind_of(allocation)] += 1
        self.prepared[name] = ref

    async def end(self, *names: str) -> None:
        """End claims in the kubelet's order: unprepared first, and then deallocated."""
        for name in names:
            if name in self.prepared:
                await self.preparer.unprepare(self.prepared.pop(name))
        await to_thread.run_sync(self.fake.end, *names)
        for name in names:
            self.claims.pop(name, None)

    @property
    def held(self) -> Mapping[str, Sequence[Allocation]]:
        """The devices of every claim that has some."""
        found = {name: allocations_of(document) for name, document in self.claims.items()}
        return {name: devices for name, devices in found.items() if devices}

    def check(self) -> None:
        """Compare the claims with each other, and with the leases."""
        assert list(doubled(self.held)) == []
        wanted = sum(amount_of(allocation) for found in self.held.values() for allocation in found)
        leases = [lease for gpu in self.rig.registry.snapshot.gpus.values() for lease in gpu.leases]
        assert len(leases) == wanted or self.refused


KINDS: Mapping[str, Document] = {
    "fraction": exactly("gpu", "fraction.metagpu.io"),
    "mig": exactly("gpu", "mig.metagpu.io"),
    "mps": exactly("gpu", "mps.metagpu.io"),
    "timeslice": exactly("gpu", "timeslice.metagpu.io"),
    "whole": exactly("gpu", "gpu.metagpu.io"),
}


def random_request(chance: random.Random, kind: str = "") -> Document:
    """Return a request of a backend, any of them by default."""
    kind = kind or chance.choices(sorted(KINDS), (6, 6, 4, 4, 2))[0]
    request = KINDS[kind]
    if kind == "mig":
        profile = chance.choices(sorted(PROFILES), (8, 6, 4, 2))[0]
        cel = f"device.attributes['{DRIVER}'].profile == '{profile}'"
        return {
            **request,
            "exactly": {**request["exactly"], "selectors": [{"cel": {"expression": cel}}]},
        }
    if kind in ("fraction", "mps"):
        amount = capacity(shares=chance.choice((1, 10, 25, 40, 70)))
        return {**request, "exactly": {**request["exactly"], "capacity": amount}}
    return request


def kind_of(allocation: Allocation) -> str:
    """Return the kind of a device, by its name alone."""
    return _rest(allocation).partition("-")[0]


def amount_of(allocation: Allocation) -> int:
    """Return the number of shares that a claim has of a device."""
    return sum(map(int, allocation.consumed.values())) if allocation.consumed else 1


def doubled(held: Mapping[str, Sequence[Allocation]]) -> Iterator[str]:
    """Yield each GPU of which claims hold a part twice, by the names of the devices alone."""
    parts = defaultdict[str, Counter[str]](Counter)
    limits = Counter[str]()
    for allocation in (other for found in held.values() for other in found):
        kind = kind_of(allocation)
        limits[kind] = LIMITS.get(kind, 1)
        for part in _parts(allocation):
            parts[allocation.gpu][part] += amount_of(allocation)
    for gpu, amounts in parts.items():
        kinds = {part.split()[0] for part in amounts}
        if len(kinds) > 1 or max(amounts.values()) > limits[min(kinds)]:
            yield f"{gpu}: {dict(amounts)}"


def _parts(allocation: Allocation) -> Sequence[str]:
    kind = kind_of(allocation)
    if kind != "mig":
        return (kind,)
    _, profile, start = _rest(allocation).split("-")
    (size,) = [size for name, size in PROFILES.items() if name.replace(".", "") == profile]
    return [f"mig {slot}" for slot in range(int(start), int(start) + size)]


def _rest(allocation: Allocation) -> str:
    """Return what follows the GPU in the name of a device; `whole` for the GPU itself."""
    found = DEVICE.fullmatch(allocation.device)
    assert found, allocation
    return found["rest"] or "whole"
