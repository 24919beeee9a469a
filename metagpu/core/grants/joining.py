"""Variables of several grants that one container gets together. Pure.

A runtime gives a container one value of each variable, the last one.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import MEMORY

MEMORY_SUM: Final = "METAGPU_MAX_MEM"
"""The container's memory on all GPUs together, in MiB."""
SHARE_NAMES: Final = "CNVRG_META_GPU_DEVICES"
"""The container's shares, in MetaGPU's form."""


def joined_variables(grants: Iterable[Grant]) -> dict[str, str]:
    """Return the variables of a container with all these grants.

    Memory is added up, by GPU or MIG device, and lists are joined. Of others the last value
    counts, as at the runtime: a CUDA program has one MPS control daemon.
    """
    found: dict[str, str] = {}
    amounts = Counter[str]()
    total, names = 0, list[str]()
    for grant in grants:
        found.update(grant.envs)
        for entry in filter(None, grant.envs.get(MEMORY, "").split(",")):
            device, _, mib = entry.rpartition("=")
            amounts[device] += int(mib)
        total += int(grant.envs.get(MEMORY_SUM, 0))
        names += filter(None, [grant.envs.get(SHARE_NAMES, "")])
    together = {
        MEMORY: ",".join(f"{device}={mib}" for device, mib in amounts.items()),
        MEMORY_SUM: str(total),
        SHARE_NAMES: ",".join(names),
    }
    return {**found, **{name: value for name, value in together.items() if name in found}}
