"""The kubelet's messages, built from our values and errors, here only."""

from typing import Final, NamedTuple

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.encoding.base import CodecBase

from metagpu.core.availability.reasons import availability_of
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import MetagpuError
from metagpu.core.layout.layout import Layout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import RequestError, UnknownShare
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.plugins.kubelet.fast_codec import encode_device
from metagpu.plugins.kubelet.pb import v1beta1

log = structlog.get_logger()

VERSION: Final = "v1beta1"
LIST_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of one ListAndWatchResponse; a larger one ends the stream (grpc-go's default limit)."""


class GpuListState(NamedTuple):
    """The state that one GPU's part of a list depends on."""

    shares: tuple[Share, ...]
    unlisted: frozenset[ShareId]
    numa_node: int | None


ListView = tuple[GpuListState, ...]
"""The state that a list depends on; equal views have equal lists."""


class RawCodec(CodecBase):
    """Passes bytes through: this module and `fast_codec` encode and decode them."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Return the bytes unchanged."""
        return message

    def decode(self, data: bytes, message_type: type) -> bytes:  # noqa: ARG002
        """Return the bytes unchanged."""
        return data


def encode_options(*, pre_start: bool) -> bytes:
    """Encode the options of our plugin: it always has a preferred allocation."""
    return bytes(
        v1beta1.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=True
        )
    )


def build_register_request(
    resource: str, endpoint: str, *, pre_start: bool
) -> v1beta1.RegisterRequest:
    """Build the request that offers a resource; `endpoint` is our socket's file name."""
    return v1beta1.RegisterRequest(
        version=VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=v1beta1.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=True
        ),
    )


class DeviceList:
    """Encodes snapshots as ListAndWatchResponses of one resource.

    A message with a repeated field is the concatenation of its elements' encodings. So a list is
    joined from one block for each GPU, and only blocks of changed GPUs are encoded again.
    """

    def __init__(self, resource: ResourceName) -> None:
        self._resource = resource
        self._blocks = dict[GpuId, tuple[GpuListState, bytes]]()

    def view(self, snapshot: Snapshot) -> ListView:
        """Return the state that the list depends on."""
        offer = snapshot.plugin_offer(self._resource)
        if offer is None:
            return ()

        parts = []
        for gpu, shares in offer.by_gpu.items():
            state = snapshot.gpus[gpu]
            unlisted = availability_of(state).unlisted
            parts.append(GpuListState(shares, unlisted, state.gpu.numa_node))
        return tuple(parts)

    def encode(self, view: ListView) -> bytes:
        """Encode the list, which replaces the kubelet's previous list."""
        return b"".join(map(self._block, view))

    def _block(self, part: GpuListState) -> bytes:
        gpu = part.shares[0].gpu
        known = self._blocks.get(gpu)

        if known is None or known[0] != part:
            block = b"".join(
                encode_device(
                    share.id,
                    healthy=share.id not in part.unlisted,
                    numa_node=part.numa_node,
                )
                for share in part.shares
            )
            known = self._blocks[gpu] = (part, block)
        return known[1]


def check_list_size(layout: Layout, file: str, limit: int = LIST_LIMIT) -> None:
    """Refuse a layout whose list the kubelet could not receive.

    Raises:
        ConfigError: the message has the number of shares, the bytes of their list, and the limit.
    """
    numa = {assignment.gpu.id: assignment.gpu.numa_node for assignment in layout.pool_assignments}
    sizes: dict[str, tuple[int, int]] = {}

    for share in layout.shares:
        # "Unhealthy" is the longer word: a list must also fit when no share is healthy.
        size = len(encode_device(share.id, healthy=False, numa_node=numa[share.gpu]))
        total, count = sizes.get(share.resource, (0, 0))
        sizes[share.resource] = (total + size, count + 1)

    for resource, (total, count) in sizes.items():
        if total >= limit:
            raise ConfigError(
                f"{resource} would have {count} shares, {total} bytes as a list; the kubelet takes "
                f"less than {limit}. Configure fewer shares of each GPU, or several resources",
                ConfigReason.TOO_LARGE,
                file=file,
            )


def to_grpc_error(error: Exception) -> GRPCError:
    """Return the gRPC status of an error, ours or not; its text reaches the pod."""
    match error:
        case UnknownShare():
            return GRPCError(Status.NOT_FOUND, str(error))
        case RequestError():
            return GRPCError(Status.FAILED_PRECONDITION, str(error))
        case MetagpuError():
            return GRPCError(Status.UNAVAILABLE, str(error))
        case _:
            # Without this the pod would get "Internal Server Error", without the reason.
            log.error("kubelet call failed", exc_info=error)
            text = f"metagpu failed ({type(error).__name__}: {error}); its log has the details"
            return GRPCError(Status.INTERNAL, text)
