"""Exact offers: the free shares of each GPU that are held back.

The scheduler counts the shares of a node; it does not know on which GPU they are. Where 30 shares
are free on each of two GPUs, it would send a request of 40 that no GPU can take. Pure.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from metagpu.core.model.gpu import GpuId


class Api(StrEnum):
    """The API of Kubernetes by which pods get the shares of a pool.

    - device-plugin: extended resources, counted by the kubelet.
    - dra: ResourceClaims, allocated by the scheduler from ResourceSlices.
    """

    DEVICE_PLUGIN = "device-plugin"
    DRA = "dra"


class OfferPolicy(StrEnum):
    """The configured answer to free shares that no request could take together.

    - exact: hold back the smaller parts, so that a request that counts as free can be placed.
    - all: offer every free share; a request that fits on no GPU is refused.
    """

    EXACT = "exact"
    ALL = "all"


class RequestRule(StrEnum):
    """The sets of shares that one request may take.

    - any: free shares of any GPUs.
    - one_gpu: shares of one GPU. Requests above the largest GPU never fit.
    - whole_gpus: shares of one GPU; a request above the largest GPU takes whole GPUs and a part of
      at most one more.
    """

    ANY = "any"
    ONE_GPU = "one_gpu"
    WHOLE_GPUS = "whole_gpus"


class OfferRule(msgspec.Struct, frozen=True):
    """The rule by which free shares of one resource are held back.

    Attributes:
        requests: the sets of shares that one request may take.
        max_containers: the most containers that a GPU serves at once; without an entry there is no
            limit.
    """

    requests: RequestRule = RequestRule.ANY
    max_containers: Mapping[GpuId, int] = msgspec.field(default_factory=dict)


class FreePart(msgspec.Struct, frozen=True):
    """The part of one GPU that is free.

    Attributes:
        total: the shares of the resource on the GPU, free or not.
        free: the shares that could be granted now.
        full: whether the GPU serves as many containers as it can: nobody gets its free shares.
    """

    gpu: GpuId
    total: int
    free: int
    full: bool = False

    @property
    def usable(self) -> int:
        """The shares that the next request could take."""
        return 0 if self.full else self.free


def held_back_gpus(rule: RequestRule, parts: Sequence[FreePart]) -> frozenset[GpuId]:
    """Return the GPUs whose free shares are held back, of one resource.

    Of what is left, each request up to the sum can be placed, under `ONE_GPU` each request that a
    GPU could ever take. No larger sum has this property: the GPUs left are those that a request of
    the whole sum would need.

    Args:
        rule: the sets of shares that one request may take.
        parts: every GPU with shares of the resource, by index: of equal parts the first is offered.
    """
    if rule is RequestRule.ANY:
        return frozenset()

    largest = max((part.total for part in parts), default=0)
    fits_largest = any(part.usable == largest for part in parts)
    if rule is RequestRule.ONE_GPU and fits_largest:
        offered = {part.gpu for part in parts if part.usable}
    else:
        offered = {it.gpu for it in parts if fits_largest and it.usable == it.total}
        rest = [part for part in parts if part.gpu not in offered and part.usable]
        if rest:
            offered.add(max(rest, key=lambda part: part.usable).gpu)
    return frozenset(part.gpu for part in parts if part.free and part.gpu not in offered)


def largest_request(rule: RequestRule, parts: Sequence[FreePart]) -> int:
    """Return the number of shares of the largest request that could be placed now."""
    if rule is RequestRule.ANY:
        return sum(part.usable for part in parts)

    one_gpu = max((part.usable for part in parts), default=0)
    if rule is RequestRule.ONE_GPU:
        return one_gpu
    whole = sum(part.total for part in parts if part.usable == part.total)
    rest = max((part.usable for part in parts if part.usable != part.total), default=0)
    largest = max((part.total for part in parts), default=0)
    return whole + rest if whole + rest > largest else one_gpu
