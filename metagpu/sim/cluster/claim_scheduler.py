"""The simulated scheduler's plugin that allocates the claims of pods. Pure."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from metagpu.sim.allocation.allocator import allocate, held_devices
from metagpu.sim.allocation.amounts import AllocationError
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.claim_objects import allocated, claims_of, reserved, unmade_claims
from metagpu.sim.cluster.extended_resources import class_of_names, extended_claim, served_names
from metagpu.sim.cluster.pod_objects import Patch

_CANNOT = "cannot allocate all claims"


class ClaimFit(msgspec.Struct, frozen=True):
    """The claims of one pod: how each changes, or why the pod cannot have them.

    Attributes:
        made: the claim for names in `limits`, which is created first.
        status: what the pod's status says of it.
    """

    problem: str = ""
    changes: Mapping[Key, Patch] = {}
    made: Mapping[Key, Object] = {}
    status: Mapping[str, Any] = {}


class ClaimScheduler:
    """One round of decisions; each sees those before it.

    Attributes:
        claims: all ResourceClaims, with the allocations of this round.
    """

    def __init__(self, node: str, objects: Mapping[Key, Object]) -> None:
        def of(collection: str) -> Sequence[Object]:
            return [document for key, document in objects.items() if key[0] == collection]

        self._node = node
        self._slices = of("resourceslices")
        self._classes = {document["metadata"]["name"]: document for document in of("deviceclasses")}
        self._class_of_names = class_of_names(self._classes.values())
        self.claims = {
            key: document for key, document in objects.items() if key[0] == "resourceclaims"
        }

    def served(
        self, requests: Mapping[str, int], allocatable: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the class of each name in `limits` that is served by a claim."""
        return served_names(requests, self._class_of_names, allocatable)

    def fit(self, pod: Object, served: Mapping[str, str] = MappingProxyType({})) -> ClaimFit:
        """Find devices for all claims of a pod, and take them.

        Args:
            pod: waits for a node.
            served: the class of each name in its `limits` that a claim serves.
        """
        extended = extended_claim(pod, served)
        if not pod["spec"].get("resourceClaims") and extended is None:
            return ClaimFit()
        keys = claims_of(pod)
        if problem := self._missing(pod, keys):
            return ClaimFit(problem)
        wanting = [key for key in keys if not _is_allocated(self.claims[key])]
        known = dict(self.claims)
        if extended is not None:
            known[extended.key] = extended.claim
            keys, wanting = [*keys, extended.key], [*wanting, extended.key]
        try:
            found = allocate(
                gather_pools(self._slices, self._node),
                [known[key] for key in wanting],
                self._classes,
                held_devices(self.claims.values()),
            )
        except (AllocationError, AttributeError, KeyError, TypeError, ValueError) as error:
            return ClaimFit(_reason(error))
        if found is None:
            return ClaimFit(_CANNOT)

        changes: dict[Key, Patch] = {}
        for key, results in zip(wanting, found, strict=True):
            changes[key] = allocated(results, known[key], self._classes, self._node)
        for key in keys:
            changes[key] = _joined(changes.get(key, {}), reserved(known[key], pod))
            self.claims[key] = {
                **known[key],
                "status": {**(known[key].get("status") or {}), **changes[key]["status"]},
            }
        made = {} if extended is None else {extended.key: extended.claim}
        return ClaimFit("", changes, made, {} if extended is None else extended.status)

    def _missing(self, pod: Object, keys: Sequence[Key]) -> str:
        if entry := next(iter(unmade_claims(pod)), None):
            return f"the claim {entry['name']} is not made yet"
        missing = [key[2] for key in keys if key not in self.claims]
        return f'resourceclaim "{missing[0]}" not found' if missing else ""


def _reason(error: Exception) -> str:
    """Return the reason of a pod without devices; a claim of any form may be saved."""
    if isinstance(error, AllocationError):
        return str(error)
    return f"the simulator does not read a claim of the pod: {error!r}"


def _is_allocated(claim: Object) -> bool:
    return bool((claim.get("status") or {}).get("allocation"))


def _joined(one: Patch, other: Patch) -> Patch:
    return {"status": {**one.get("status", {}), **other["status"]}}
