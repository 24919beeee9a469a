"""Offers of a resource: their API, and the rule of requests."""

from collections.abc import Mapping
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
