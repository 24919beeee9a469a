"""Sharing of a whole GPU by the containers of one ResourceClaim. Pure.

The author of the claim asks for it by opaque parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from metagpu.core.model.request_errors import SharingUnavailable


class OpaqueParameters(msgspec.Struct, frozen=True):
    """One entry of an allocation's `config` for this driver.

    Attributes:
        requests: the requests that it is for, `request` or `request/subrequest`; empty for all.
        from_class: whether it is of a DeviceClass; those of the claim win.
    """

    parameters: Any
    requests: tuple[str, ...] = ()
    from_class: bool = False


class AllocatedPart(msgspec.Struct, frozen=True):
    """One allocated device, as far as parameters depend on it.

    Attributes:
        request: `request` or `request/subrequest`.
        type: its attribute `type`.
        gpu: the uuid of its GPU.
    """

    request: str
    type: str
    gpu: str

    @property
    def main_request(self) -> str:
        """The name by which containers name the request."""
        return self.request.partition("/")[0]


class ClaimSharing(msgspec.Struct, frozen=True):
    """The way in which the containers of a claim share a whole GPU.

    Attributes:
        backend: the backend that shares the GPU; the claim has all its shares.
        field: the claim's field that asks for it, with its value; for messages.
        settings: what is asked of the backend, in digits, lower-case letters and hyphens: a part of
            the claim's CDI name.
        required: whether a GPU without this backend is not as asked for.
    """

    backend: str
    field: str
    settings: str = ""
    required: bool = True


ReadSharing = Callable[
    [Sequence[OpaqueParameters], Sequence[AllocatedPart]], Sequence[ClaimSharing | None]
]
"""Reads the parameters of a claim: for each device how it is shared, `None` for a GPU as it is.

Raises a ConfigError with the path of a field that cannot be followed.
"""


class MpsLimits(msgspec.Struct, frozen=True):
    """The limits of each MPS client of a claim; `None` where there is none.

    Attributes:
        threads: percent of the GPU's threads.
        memory_mib: MiB of the GPU's memory.
    """

    threads: int | None = None
    memory_mib: int | None = None

    @property
    def settings(self) -> str:
        """The limits as a claim's settings: `50-10240`, `50`, `-10240`, or nothing."""
        given = (self.threads, self.memory_mib)
        return "-".join("" if it is None else str(it) for it in given).rstrip("-")

    @classmethod
    def parse(cls, settings: str) -> Self:
        """Return the limits in a claim's settings.

        Raises:
            SharingUnavailable: a newer metagpu wrote the settings.
        """
        threads, _, memory = settings.partition("-")
        try:
            return cls(int(threads) if threads else None, int(memory) if memory else None)
        except ValueError:
            problem = "are not known here; run the version of metagpu that prepared the claim"
            raise SharingUnavailable(f"the settings {settings!r}", problem) from None
