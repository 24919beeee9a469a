"""ResourceClaims: their CDI names, and how their containers share a whole GPU.

A name says which shares a claim holds of a GPU. The kubelet keeps the names that it got and
reports them, also after a restart of the daemon and of the node. So a name alone tells the leases
of a claim: there is no state file. An example is
`metagpu.io/claim=5d1c….GPU-5f2e….fraction.m00-m49`, with parameters `….mps:50-10240.p00-p99`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Self

import msgspec

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import SharingUnavailable
from metagpu.core.model.shares import ShareId

KIND: Final = "metagpu.io/claim"
"""Vendor and class of the names."""

_SETTINGS: Final = ":"
"""Between the backend and what a claim asks of it; no backend's name has it."""
_WHOLE: Final = "whole"
"""Written for a share without a slot: its id is the GPU's."""
_JOINT: Final = ".."
_NUMBERED: Final = re.compile(r"([a-z])(\d+)")
_RANGE: Final = re.compile(r"([a-z])(\d+)-([a-z])(\d+)")
_IN_NAMES: Final = str.maketrans({"@": ":", "+": "_"})
_IN_SLOTS: Final = str.maketrans({":": "@", "_": "+"})
"""Characters of slots that CDI names may not have, and back; no slot has `:` or `_`."""


class ClaimDevice(msgspec.Struct, frozen=True):
    """The shares of one GPU that a claim holds by one result of its allocation.

    Attributes:
        claim: the uid of the ResourceClaim.
        slots: what follows the GPU in the ids of the shares; empty for a share of a whole GPU.
        settings: what the claim's parameters ask of the backend, mostly nothing.
        pool: the driver and pool of the allocated device; no part of the name.
    """

    claim: str
    gpu: GpuId
    backend: str
    slots: tuple[str, ...]
    settings: str = ""
    pool: str = ""

    @classmethod
    def of_shares(
        cls, claim: str, gpu: GpuId, backend: str, shares: Iterable[ShareId], settings: str = ""
    ) -> "ClaimDevice":
        """Return the device of a claim that holds these shares of a GPU."""
        return cls(
            claim, gpu, backend, tuple(share.partition("::")[2] for share in shares), settings
        )

    @property
    def share_ids(self) -> tuple[ShareId, ...]:
        """The ids of the shares."""
        return tuple(ShareId(f"{self.gpu}::{slot}" if slot else self.gpu) for slot in self.slots)

    @property
    def ranges(self) -> tuple[str, ...]:
        """The slots, runs of numbered ones as `m00-m49`."""
        return tuple(slot.translate(_IN_SLOTS) for slot in _shortened(self.slots))

    @property
    def name(self) -> str:
        """The CDI name, without its kind."""
        slots = _JOINT.join(_shortened(self.slots))
        backend = _SETTINGS.join(filter(None, (self.backend, self.settings)))
        return f"{self.claim}.{self.gpu}.{backend}.{slots}"

    @property
    def qualified_name(self) -> str:
        """The CDI name, as the kubelet gets it."""
        return f"{KIND}={self.name}"


@lru_cache(maxsize=256)  # claims of a node: each round of their statuses asks for all
def parse_claim_device(qualified_name: str) -> ClaimDevice | None:
    """Return what a CDI name stands for, `None` for a name of another kind."""
    kind, _, name = qualified_name.partition("=")
    parts = name.split(".", 3)
    if kind != KIND or len(parts) != len(("claim", "gpu", "backend", "slots")):
        return None
    claim, gpu, backend, slots = parts
    found = (slot for part in slots.split(_JOINT) for slot in _expanded(part))
    backend, _, settings = backend.partition(_SETTINGS)
    return ClaimDevice(claim, GpuId(gpu), backend, tuple(found), settings)


def _shortened(slots: Iterable[str]) -> Iterator[str]:
    """Yield slots, and runs of numbered ones as `m00-m49`."""
    run: list[str] = []
    for slot in slots:
        if run and slot != _next(run[-1], len(run[0]) - 1):
            yield _written(run)
            run = []
        run.append(slot)
    if run:
        yield _written(run)


def _next(slot: str, width: int) -> str | None:
    found = _NUMBERED.fullmatch(slot)
    return found and f"{found[1]}{int(found[2]) + 1:0{width}d}"


def _written(run: list[str]) -> str:
    if len(run) > 1:
        return f"{run[0]}-{run[-1]}"
    return run[0].translate(_IN_NAMES) or _WHOLE


def _expanded(part: str) -> Iterator[str]:
    if (found := _RANGE.fullmatch(part)) is not None:
        width = len(found[2])
        for number in range(int(found[2]), int(found[4]) + 1):
            yield f"{found[1]}{number:0{width}d}"
    else:
        yield "" if part == _WHOLE else part.translate(_IN_SLOTS)


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
        return "-".join("" if number is None else str(number) for number in given).rstrip("-")

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
