"""The choice of shares by a preference of GPUs. Pure.

As much of the preference counts as the free shares allow.
The backend chooses among GPUs that the preference does not tell apart, so that each way of sharing
keeps its own rules.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from metagpu.core.availability.reasons import open_to, refuse
from metagpu.core.contracts.backend import Backend
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.gpu_preference import GpuPreference, are_equal_parts, by_fullness
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceName, Share, by_gpu
from metagpu.core.model.snapshot import Snapshot


class SharesRequest(msgspec.Struct, frozen=True):
    """A request for preferred shares, as the kubelet makes it.

    Attributes:
        available: the shares that the kubelet has free.
        required: the shares that must be chosen.
        size: the number of shares to choose, the required ones included.
    """

    available: Sequence[Share]
    required: Sequence[Share]
    size: int


def prefer_by_annotations(
    preference: GpuPreference,
    asked: SharesRequest,
    default: Sequence[Share],
    backend: Backend,
    snapshot: Snapshot,
) -> tuple[Sequence[Share], str]:
    """Choose shares by a preference: as much of it as can be followed.

    Args:
        preference: the preference of the pod's annotations.
        asked: the kubelet's request.
        default: the choice without a preference.
        backend: the backend of the shares, which chooses among equal GPUs.
        snapshot: everything known now.

    Returns:
        The shares, and why the preference is not followed in full; empty where it is.
    """
    choice = _Choice(preference, asked, default, backend, snapshot)
    if len(choice.usable) < asked.size:
        return default, choice.too_few()

    reason = ""
    if preference.parts is not None:
        for shares in (choice.by_default(), choice.in_parts(preference.parts)):
            counts = map(len, by_gpu(shares).values())
            if are_equal_parts(counts, preference.parts):
                if not (refusal := choice.refusal(shares)):
                    return shares, ""
                reason = reason or f"the pool grants no such parts: {refusal}"
        reason = reason or choice.no_parts(preference.parts)
    for shares in (*choice.by_policy(), choice.by_default()):
        if choice.keeps_to(shares) and not choice.refusal(shares):
            return shares, reason
    return default, reason or "the free shares of these GPUs cannot be granted together"


class _Choice:
    """The shares of one request that a preference allows.

    Attributes:
        usable: the shares of GPUs that the preference names and that are open, and required ones.
    """

    def __init__(
        self,
        preference: GpuPreference,
        asked: SharesRequest,
        default: Sequence[Share],
        backend: Backend,
        snapshot: Snapshot,
    ) -> None:
        self._preference = preference
        self._asked = asked
        self._default_gpus = len(by_gpu(default))
        self._backend = backend
        self._snapshot = snapshot
        self._named = {
            gpu
            for gpu, state in snapshot.gpus.items()
            if not preference.misfit(state.gpu) and open_to(state, backend.name)
        }
        possible = (it for it in asked.available if it.gpu in self._named)
        self.usable = list(dict.fromkeys([*asked.required, *possible]))

    def by_default(self) -> Sequence[Share]:
        """Return the backend's own choice among the usable shares."""
        return self._prefer(self.usable, self._asked.required, self._asked.size)

    def by_policy(self) -> Iterator[Sequence[Share]]:
        """Yield choices on equally full GPUs each, the first by the policy first.

        A policy spreads no request over more GPUs than it has without one.
        """
        if self._preference.policy is None or self._asked.required:
            return  # where a share is required, its GPU is chosen
        for gpus in by_fullness(self._fullness(self.usable), self._preference.policy):
            shares = self._prefer(
                [it for it in self.usable if it.gpu in gpus], (), self._asked.size
            )
            if shares and len(by_gpu(shares)) <= self._default_gpus:
                yield shares

    def in_parts(self, parts: int) -> Sequence[Share]:
        """Return equal parts of so many GPUs, each where the policy puts it; or nothing."""
        each, rest = divmod(self._asked.size, parts)
        if rest or not each:
            return ()
        required = by_gpu(self._asked.required)
        left, chosen = self.usable, list[Share]()
        for _ in range(parts):
            must = next((it for gpu, it in required.items() if gpu in {s.gpu for s in left}), ())
            part = self._one_part(left, must, each)
            if len(part) != each:
                return ()
            chosen += part
            left = [it for it in left if it.gpu != part[0].gpu]
        return chosen

    def keeps_to(self, shares: Sequence[Share]) -> bool:
        """Return whether shares are as many as requested, with the required ones."""
        wanted = self._asked
        return len(shares) == wanted.size and set(wanted.required) <= set(shares)

    def refusal(self, shares: Sequence[Share]) -> str:
        """Return why Allocate would refuse these shares; empty where it grants them."""
        if not self.keeps_to(shares):
            return "they are not those that the kubelet requires"
        try:
            refuse(shares, self._snapshot)
            self._backend.check(shares, self._snapshot)
        except RequestError as error:
            return str(error)
        return ""

    def too_few(self) -> str:
        """Return why the usable shares do not suffice."""
        resource = self._backend_resource()
        offer = self._snapshot.offers.get(resource) if resource else None
        gpus = [self._snapshot.gpus[it].gpu for it in offer.by_gpu] if offer else []
        if not [it for it in gpus if not self._preference.misfit(it)]:
            return (
                f"no GPU of this node that offers {resource} is one of them; choose nodes by a "
                "nodeSelector, such as the label nvidia.com/gpu.product"
            )
        return (
            f"they have {len(self.usable)} of {self._asked.size} shares on offer; wait for a pod "
            "to end there, or name more GPUs"
        )

    def no_parts(self, parts: int) -> str:
        """Return why there are no equal parts of so many GPUs."""
        if self._asked.size % parts:
            return f"{self._asked.size} shares have no {parts} equal parts; request a multiple"
        return (
            f"fewer than {parts} of these GPUs have {self._asked.size // parts} shares on offer; "
            "wait for a pod to end there, or request less"
        )

    def _backend_resource(self) -> ResourceName | None:
        shares = (*self._asked.available, *self._asked.required)
        return shares[0].resource if shares else None

    def _one_part(self, left: Sequence[Share], must: Sequence[Share], size: int) -> Sequence[Share]:
        """Return shares of one GPU, the one of the required shares if there are any."""
        enough = {gpu: it for gpu, it in by_gpu(left).items() if len(it) >= size}
        if must:
            enough = {gpu: it for gpu, it in enough.items() if gpu == must[0].gpu}
        if not enough:
            return ()
        policy = self._preference.policy
        if policy is not None:
            first = next(
                by_fullness(self._fullness([s for it in enough.values() for s in it]), policy)
            )
            enough = {gpu: it for gpu, it in enough.items() if gpu in first}
        shares = self._prefer([it for those in enough.values() for it in those], must, size)
        if not shares:
            return ()
        # A backend may take one share from each GPU: ask it again for the first alone.
        gpu = shares[0].gpu
        return shares if len(by_gpu(shares)) == 1 else self._prefer(enough[gpu], must, size)

    def _fullness(self, shares: Sequence[Share]) -> Mapping[GpuId, tuple[int, int]]:
        if not shares:
            return {}
        on_offer = self._snapshot.offers[shares[0].resource].ids
        return {gpu: (len(it), len(on_offer[gpu])) for gpu, it in by_gpu(shares).items()}

    def _prefer(
        self, available: Sequence[Share], required: Sequence[Share], size: int
    ) -> Sequence[Share]:
        return self._backend.prefer(available, required, size, self._snapshot)
