"""Remarks of a node's report: what is free and cannot be had, and what would help."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class RemarkReason(StrEnum):
    """The kind of a remark, which no release changes; its text is for people.

    - shares_held_back: free shares are held back, as no request could take them too.
    - move_for_request: after the move of a pod a larger request would fit.
    - instances_closed: a GPU grants no MIG instances now, whatever is free.
    - instances_full: no MIG instance fits on a GPU beside those that are there.
    - largest_instance: the largest MIG instance that fits on a GPU.
    - move_for_instance: after the move of a pod a MIG instance would fit that fits nowhere now.
    """

    SHARES_HELD_BACK = "shares_held_back"
    MOVE_FOR_REQUEST = "move_for_request"
    INSTANCES_CLOSED = "instances_closed"
    INSTANCES_FULL = "instances_full"
    LARGEST_INSTANCE = "largest_instance"
    MOVE_FOR_INSTANCE = "move_for_instance"


class Remark(msgspec.Struct, frozen=True):
    """A sentence of the report; `gpu` is the index of the only GPU that it is about."""

    reason: RemarkReason
    text: str
    gpu: int | None = None

    def as_report(self) -> Mapping[str, str | int | None]:
        """Return the remark as JSON values."""
        where = "" if self.gpu is None else f"GPU {self.gpu}: "
        return {"reason": str(self.reason), "gpu": self.gpu, "text": f"{where}{self.text}"}
