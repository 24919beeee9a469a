"""The table of claims on an idle node: devices, or why there are none."""

from collections.abc import Mapping, Sequence
from typing import Any

from metagpu.display.status import Part, table

Report = Mapping[str, Any]


def claim_fits_parts(claims: Sequence[Report]) -> Sequence[Part]:
    """Return a table of claims, and a line where there is none."""
    if not claims:
        return ["No ResourceClaim in these files."]
    found = table("CLAIM", "POD", "FITS", "DEVICES, OR WHY NOT", whole=("CLAIM", "POD", "FITS"))
    for it in claims:
        found.add(
            it["claim"],
            it["pod"] or "-",
            "yes" if it["fits"] else "no",
            ", ".join(map(_device, it["devices"])) if it["fits"] else _problem(it["problem"]),
            style="" if it["fits"] else "yellow",
        )
    return [found]


def _device(device: Report) -> str:
    parts = ", ".join(f"{amount} {name}" for name, amount in device["consumed"].items())
    part = f" ({parts})" if parts else ""
    return f"{device['request']}: {device['class']}{part} of GPU {device['gpu']}"


def _problem(problem: Report) -> str:
    request = f"request {problem['request']}: " if problem["request"] else ""
    return f"{request}{problem['reason']}"
