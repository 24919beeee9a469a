"""Our values and errors in the kubelet's words; nobody else builds its messages."""

from typing import Final, NamedTuple

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.encoding.base import CodecBase

from metagpu.core.errors import ConfigError, MetagpuError, RequestError, UnknownShare
from metagpu.core.gpu import GpuId
from metagpu.core.layout import Layout
from metagpu.core.model import ResourceName, Share, ShareId
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import hot
from metagpu.plugins.pb import v1beta1

log = structlog.get_logger()

VERSION: Final = "v1beta1"
LIST_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of one ListAndWatchResponse; a larger one ends the stream (grpc-go's default limit)."""


class Part(NamedTuple):
    """What one GPU's part of a list depends on."""

    shares: tuple[Share, ...]
    healthy: bool
    shut: frozenset[ShareId]
    numa_node: int | None


View = tuple[Part, ...]
"""What a list depends on."""


class RawCodec(CodecBase):
    """Hands message bytes through: this module and `hot` know what is in them."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Give the bytes as they are."""
        return message

    def decode(self, data: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Give the bytes as they are."""
        return data


def options(*, pre_start: bool) -> bytes:
    """Encode what our plugin can do: it always has a preference."""
    return bytes(
        v1beta1.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=True
        )
    )


def register_request(resource: str, endpoint: str, *, pre_start: bool) -> v1beta1.RegisterRequest:
    """Build the request that offers a resource; `endpoint` names a file in the kubelet's folder."""
    return v1beta1.RegisterRequest(
        version=VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=v1beta1.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=True
        ),
    )


class DeviceList:
    """Turns snapshots into ListAndWatchResponses of one resource.

    A message with a repeated field is the concatenation of its elements' encodings, so the list is
    joined from one block for each GPU, and a block is made anew only when its GPU changed.
    """

    def __init__(self, resource: ResourceName) -> None:
        self._resource = resource
        self._blocks = dict[GpuId, tuple[Part, bytes]]()

    def view(self, snapshot: Snapshot) -> View:
        """Pick what the list depends on; equal views make equal lists."""
        offer = snapshot.offers.get(self._resource)
        if offer is None:
            return ()

        parts = []
        for gpu, shares in offer.by_gpu.items():
            state = snapshot.gpus[gpu]
            parts.append(Part(shares, state.verdict.healthy, state.shut, state.gpu.numa_node))
        return tuple(parts)

    def encode(self, view: View) -> bytes:
        """Encode the list: the kubelet replaces all it knew by it."""
        return b"".join(map(self._block, view))

    def _block(self, part: Part) -> bytes:
        gpu = part.shares[0].gpu
        known = self._blocks.get(gpu)

        if known is None or known[0] != part:
            block = b"".join(
                hot.device(
                    share.id,
                    healthy=part.healthy and share.id not in part.shut,
                    numa_node=part.numa_node,
                )
                for share in part.shares
            )
            known = self._blocks[gpu] = (part, block)
        return known[1]


def check_size(layout: Layout, file: str) -> None:
    """Refuse a layout whose list the kubelet could not receive.

    Raises:
        ConfigError: with the number of bytes, shares, and the limit.
    """
    numa = {assignment.gpu.id: assignment.gpu.numa_node for assignment in layout.assignments}
    sizes: dict[str, tuple[int, int]] = {}

    for share in layout.shares:
        # Unhealthy is the longer word: a list that fits when all is well must fit when it is not.
        size = len(hot.device(share.id, healthy=False, numa_node=numa[share.gpu]))
        total, count = sizes.get(share.resource, (0, 0))
        sizes[share.resource] = (total + size, count + 1)

    for resource, (total, count) in sizes.items():
        if total >= LIST_LIMIT:
            raise ConfigError(
                f"{resource} would have {count} shares, {total} bytes as a list; the kubelet takes "
                f"less than {LIST_LIMIT}. Cut each GPU into fewer shares, or the node into several "
                "resources",
                file=file,
            )


def as_status(error: Exception) -> GRPCError:
    """Turn an error, ours or not, into a gRPC status whose text reaches the pod."""
    match error:
        case UnknownShare():
            return GRPCError(Status.NOT_FOUND, str(error))
        case RequestError():
            return GRPCError(Status.FAILED_PRECONDITION, str(error))
        case MetagpuError():
            return GRPCError(Status.UNAVAILABLE, str(error))
        case _:
            # Without this a pod would read "Internal Server Error" and nobody would know why.
            log.error("a call failed for a reason of our own", exc_info=error)
            text = f"metagpu failed ({type(error).__name__}: {error}); its log has the details"
            return GRPCError(Status.INTERNAL, text)
