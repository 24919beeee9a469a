"""The simulated scheduler's plugin that allocates the claims of pods. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from metagpu.sim.allocation.allocator import allocate, held_devices
from metagpu.sim.allocation.amounts import AllocationError
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.cluster.claim_objects import allocated, claims_of, reserved, unmade_claims
from metagpu.sim.cluster.pod_objects import Patch

_CANNOT = "cannot allocate all claims"


class ClaimFit(msgspec.Struct, frozen=True):
    """The claims of one pod: how each changes, or why the pod cannot have them."""

    problem: str = ""
    changes: Mapping[Key, Patch] = {}


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
        self.claims = {
            key: document for key, document in objects.items() if key[0] == "resourceclaims"
        }

    def fit(self, pod: Object) -> ClaimFit:
        """Find devices for all claims of a pod, and take them."""
        if not pod["spec"].get("resourceClaims"):
            return ClaimFit()
        if entry := next(iter(unmade_claims(pod)), None):
            return ClaimFit(f"the claim {entry['name']} is not made yet")
        keys = claims_of(pod)
        if missing := [key[2] for key in keys if key not in self.claims]:
            return ClaimFit(f'resourceclaim "{missing[0]}" not found')
        wanting = [key for key in keys if not _is_allocated(self.claims[key])]
        try:
            found = allocate(
                gather_pools(self._slices, self._node),
                [self.claims[key] for key in wanting],
                self._classes,
                held_devices(self.claims.values()),
            )
        except (AllocationError, AttributeError, KeyError, TypeError, ValueError) as error:
            return ClaimFit(_reason(error))
        if found is None:
            return ClaimFit(_CANNOT)

        changes: dict[Key, Patch] = {}
        for key, results in zip(wanting, found, strict=True):
            changes[key] = allocated(results, self.claims[key], self._classes, self._node)
        for key in keys:
            changes[key] = _joined(changes.get(key, {}), reserved(self.claims[key], pod))
            self.claims[key] = {
                **self.claims[key],
                "status": {**(self.claims[key].get("status") or {}), **changes[key]["status"]},
            }
        return ClaimFit(changes=changes)


def _reason(error: Exception) -> str:
    """Return the reason of a pod without devices; a claim of any form may be saved."""
    if isinstance(error, AllocationError):
        return str(error)
    return f"the simulator does not read a claim of the pod: {error!r}"


def _is_allocated(claim: Object) -> bool:
    return bool((claim.get("status") or {}).get("allocation"))


def _joined(one: Patch, other: Patch) -> Patch:
    return {"status": {**one.get("status", {}), **other["status"]}}
