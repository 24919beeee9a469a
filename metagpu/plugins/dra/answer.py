"""The devices of a prepared ResourceClaim, as the kubelet keeps them."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.model.claim_device import KIND, ClaimDevice, parse_claim_device
from metagpu.core.model.shares import ShareId
from metagpu.plugins.dra.together import whole_claim_name

EVERY_REQUEST: Final = "*"
"""The request of the answer's last device, which no container can name.

The kubelet gives it to containers that name the whole claim, and to no others.
"""


class PreparedDevice(msgspec.Struct, frozen=True):
    """One device of a prepared claim, as the kubelet keeps it."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_names: tuple[str, ...]
    share_id: str | None = None

    @property
    def claimed(self) -> ClaimDevice | None:
        """The meaning of its CDI names, `None` if no name of ours is among them."""
        return next(filter(None, map(parse_claim_device, self.cdi_names)), None)


def shares_by_request(devices: Sequence[PreparedDevice]) -> Mapping[ShareId, str]:
    """Return the request of each share, nothing where all are of one request."""
    named = [(it.requests[0], own) for it in devices if it.requests and (own := it.claimed)]
    if len({request for request, _ in named}) < 2:  # noqa: PLR2004 - one alone
        return {}
    return {share: request for request, own in named for share in own.share_ids}


def whole_claim_device(uid: str, first: PreparedDevice) -> PreparedDevice:
    """Return the device of all requests together: the first one once more.

    It is the last of an answer. The kubelet shows the health of a device by its first name.
    """
    names = (first.cdi_names[0], f"{KIND}={whole_claim_name(uid)}")
    return replace(first, requests=(EVERY_REQUEST,), cdi_names=names)
