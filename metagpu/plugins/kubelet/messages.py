"""The kubelet's messages, built from our values and errors, here only."""

from typing import Final

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.encoding.base import CodecBase

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import MetagpuError
from metagpu.core.layout.layout import Layout
from metagpu.core.model.request_errors import RequestError, UnknownShare
from metagpu.plugins.kubelet.fast_codec import encode_device
from metagpu.plugins.kubelet.pb import v1beta1

log = structlog.get_logger()

VERSION: Final = "v1beta1"
LIST_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of one ListAndWatchResponse; a larger one ends the stream (grpc-go's default limit)."""


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
