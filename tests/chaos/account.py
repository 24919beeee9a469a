"""The checker: who holds what, computed from outside of metagpu.

Sources: the kubelet (its lists, what it gave to which container, what was prepared of claims), the
API server (pods, allocated claims), NVML (the driver's file of MIG instances). The checker asks
metagpu nothing, and imports none of its rules: a share's meaning is its GPU, and its resource in
the tables of `node`.
"""

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.chaos.node import (
    BACKENDS,
    CLAIMED,
    CLAIMS,
    MIG,
    MIG_RESOURCES,
    PROFILES,
)

NOTICED_S: Final = 3.0
"""Seconds after which a lost GPU must be known: it is looked at five times a second."""
BY_HAND: Final = "an administrator"
"""Holds the MIG instances that nobody may touch or offer."""


class Holding(NamedTuple):
    """A part of a GPU that a pod holds.

    Attributes:
        gpu: its index.
        kind: the backend: two kinds exclude each other on a GPU.
        part: what nobody else may hold: a slot, or a MIG placement.
        amount: of the GPU, for claims of a device that several may consume.
    """

    gpu: int
    kind: str
    part: str
    amount: int = 0

    @property
    def slices(self) -> range:
        """The memory slices of a MIG placement, such as `2g.10gb@4`."""
        profile, _, start = self.part.partition("@")
        return range(int(start), int(start) + PROFILES[profile][0])


@dataclass
class Account:
    """The holdings of all running pods, and what must be on offer beside them.

    Attributes:
        uuids: of the GPUs, in their order.
        driver: the file in which the simulated driver keeps its MIG instances.
        pods: what each running pod holds, by uid: it holds it until it ends, whatever a kubelet
            that was restarted remembers.
        names: of the pods that run.
        cordoned: GPUs whose cordon a daemon has acknowledged.
        lost: GPUs that are off the bus or ask for a reset, each with the time since when.
        broken: what must never be, in sentences.
    """

    uuids: tuple[str, ...]
    driver: Path
    pods: dict[str, set[Holding]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    cordoned: set[int] = field(default_factory=set)
    lost: dict[int, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    # ---- what is seen -----------------------------------------------------------------------

    def saw(self, running: Mapping[str, tuple[str, set[Holding]]]) -> None:
        """Take over what the kubelet's side says: each running pod's name and holdings."""
        for uid in self.pods.keys() - running.keys():
            del self.pods[uid], self.names[uid]
        for uid, (name, holdings) in running.items():
            self.pods.setdefault(uid, set()).update(holdings)
            self.names[uid] = name
        for sentence in (*self._twice(), *self._destroyed()):
            self.add(sentence)

    def add(self, sentence: str) -> None:
        """Note what must not be, once."""
        if sentence not in self.broken:
            self.broken.append(sentence)

    def of_device(self, resource: str, device: str) -> Holding:
        """Return what a device of a resource is a part of, by its id."""
        uuid, _, part = device.partition("::")
        kind = "mig" if resource in MIG_RESOURCES else BACKENDS[resource][0]
        return Holding(self.uuids.index(uuid), kind, part or "all")

    def of_claim(self, claim: Mapping[str, Any]) -> set[Holding]:
        """Return what a claim is a part of, nothing without an allocation."""
        devices = ((claim.get("status") or {}).get("allocation") or {}).get("devices", {})
        results = devices.get("results", ())
        return {self._of_result(claim["metadata"]["name"], result) for result in results}

    def _of_result(self, claim: str, result: Mapping[str, Any]) -> Holding:
        device = str(result["device"])
        [gpu] = [n for n, text in enumerate(self.uuids) if device.startswith(text.lower())]
        kind = device.removeprefix(self.uuids[gpu].lower()).strip("-").split("-")[0]
        consumed = result.get("consumedCapacity") or {}
        amount = int(consumed.get(CLAIMED[kind][0], 0)) if kind in CLAIMED else 0
        return Holding(
            gpu, kind, f"{claim}/{result.get('shareID', '')}" if amount else device, amount
        )

    def instances(self) -> set[str]:
        """Return the placements of the MIG instances that the driver has."""
        try:
            saved = json.loads(self.driver.read_text())["gpus"][self.uuids[MIG]]["instances"]
        except (OSError, KeyError, ValueError):
            return set()
        sizes = {19: "1g.5gb", 14: "2g.10gb", 9: "3g.20gb", 0: "7g.40gb"}
        return {f"{sizes[document['profile']]}@{document['start']}" for document in saved}

    # ---- at every moment ---------------------------------------------------------------------

    def held(self, gpu: int) -> dict[Holding, set[str]]:
        """Return what is held of a GPU, and by whom."""
        found = defaultdict[Holding, set[str]](set)
        for uid, holdings in self.pods.items():
            for holding in holdings:
                if holding.gpu == gpu:
                    found[holding].add(self.names[uid])
        return found

    def _twice(self) -> Iterator[str]:
        """Yield what two pods hold at once."""
        for gpu in range(len(self.uuids)):
            held = self.held(gpu)
            for holding, names in held.items():
                if len(names) > 1:
                    yield f"GPU {gpu}: {holding.part} of {holding.kind} is held by {sorted(names)}"
            if len({candidate.kind for candidate in held}) > 1:
                kinds = {candidate.kind: sorted(names) for candidate, names in held.items()}
                yield f"GPU {gpu} is held in two ways: {kinds}"
            for one, other in combinations(
                sorted(candidate for candidate in held if candidate.kind == "mig"), 2
            ):
                if set(one.slices) & set(other.slices):
                    both = sorted(held[one] | held[other])
                    yield f"GPU {gpu}: {one.part} and {other.part} overlap: {both}"
            for kind, (capacity, most) in CLAIMED.items():
                if sum(candidate.amount for candidate in held if candidate.kind == kind) > most:
                    yield f"GPU {gpu}: claims have more than {most} {capacity}: {sorted(held)}"

    def _destroyed(self) -> Iterator[str]:
        """Yield MIG instances that pods use and the driver has not."""
        there = self.instances()
        for one, names in self.held(MIG).items():
            if one.part not in there:
                yield f"{sorted(names)} run with {one.part}, which the driver has not: {there}"

    def closed(self) -> frozenset[int]:
        """Return the GPUs that give nothing now: cordoned, or lost for as long as is noticed."""
        now = time.monotonic()
        lost = {gpu for gpu, since in self.lost.items() if now - since > NOTICED_S}
        return frozenset(self.cordoned | lost)

    def conflict(self, asked: Holding) -> str:
        """Return why nobody may get a part of a GPU that no pod holds, empty for no reason."""
        held = self.held(asked.gpu)
        if asked in held:
            return ""  # a container that is started again asks for what it has
        if asked.gpu in self.closed():
            return f"GPU {asked.gpu} is cordoned or lost"
        for holding, names in held.items():
            if holding.kind != asked.kind or (
                holding.kind == "mig" and {*holding.slices} & {*asked.slices}
            ):
                return f"{sorted(names)} hold {holding.part} of {holding.kind}"
        return ""

    def granted(self, name: str, holdings: Collection[Holding], closed: Collection[int]) -> None:
        """Judge a grant by what was closed from the pod's arrival to the answer."""
        for holding in holdings:
            if holding.gpu in closed:
                self.add(
                    f"{name} got {holding.part} of GPU {holding.gpu}, which was cordoned or lost"
                )

    # ---- when all is quiet -------------------------------------------------------------------

    def healthy(self, missing: Collection[str] = ()) -> dict[str, int]:
        """Compute how many devices of each resource the kubelet must have as healthy."""
        found = {
            name: sum(self._healthy_shares(gpu, kind, shares) for gpu in gpus)
            for name, (kind, gpus, shares) in BACKENDS.items()
        }
        found |= {name: self._healthy_placements(text) for name, text in MIG_RESOURCES.items()}
        return {name: count for name, count in found.items() if name not in missing}

    def _healthy_shares(self, gpu: int, kind: str, shares: int) -> int:
        held = self.held(gpu)
        ours = len([holding for holding in held if holding.kind == kind])
        if gpu in self.lost:
            return 0
        if gpu in self.cordoned:
            return ours
        return shares if ours == len(held) else ours

    def _healthy_placements(self, profile: str) -> int:
        if MIG in self.lost:
            return 0
        size, starts = PROFILES[profile]
        held = self.held(MIG)
        taken = {number for holding in held for number in holding.slices}
        ours = [holding for holding, names in held.items() if BY_HAND not in names]
        whole = len([holding for holding in ours if holding.part.partition("@")[0] == profile])
        if MIG in self.cordoned:
            return whole
        return whole + sum(taken.isdisjoint(range(start, start + size)) for start in starts)

    def largest_request(self, resource: str) -> int:
        """Compute how many devices of a resource one pod can get now, of one GPU."""
        if resource in MIG_RESOURCES:
            profile = MIG_RESOURCES[resource]
            own = len(
                [holding for holding in self.held(MIG) if holding.part.partition("@")[0] == profile]
            )
            usable = MIG not in {*self.lost, *self.cordoned}
            return int(usable and self._healthy_placements(profile) > own)
        kind, gpus, shares = BACKENDS[resource]
        free = [
            self._healthy_shares(gpu, kind, shares) - len(self.held(gpu))
            for gpu in gpus
            if gpu not in self.cordoned and all(holding.kind == kind for holding in self.held(gpu))
        ]
        return max([0, *free])

    def claimable(self) -> int:
        """Compute how many shares a claim can get now."""
        held = self.held(CLAIMS)
        if CLAIMS in {*self.lost, *self.cordoned} or any(
            holding.kind != "fraction" for holding in held
        ):
            return 0
        return CLAIMED["fraction"][1] - sum(holding.amount for holding in held)
