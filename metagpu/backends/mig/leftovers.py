"""MIG instances that an earlier agent made.

The rule is that of the inventory, without its wait, which is for pods that were admitted while no
agent ran. Here the kubelet has listed its pods, and nobody grants any more.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from metagpu.backends.mig.inventory import InstanceInventory, InstanceSettings
from metagpu.core.contracts.leftovers import AbandonedNode, Leftover
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import Gpu


async def find_instances(
    node: AbandonedNode, gpu: Gpu, settings: InstanceSettings, backend: str
) -> Sequence[Leftover]:
    """Find the instances of a GPU that are metagpu's; those in use stay."""
    if settings.keeps_existing:
        return ()
    state, mig = node.snapshot.gpus[gpu.id], node.driver.mig
    timing = replace(settings.timing, grace=0.0)
    inventory = InstanceInventory(replace(settings, layout=None, timing=timing), backend)
    try:
        inventory.update_instances(state, await mig.instances(gpu.id), time.monotonic())
        if not inventory.unleased(state) and not inventory.owned:
            return ()
        processes = await node.driver.processes(gpu.id)
    except DriverError as error:
        return [Leftover("MIG instances", f"GPU {gpu}", stays=str(error))]

    pids: dict[int | None, list[int]] = {}
    for process in processes:
        pids.setdefault(process.gpu_instance, []).append(process.pid)
    ours = inventory.unleased(state) + [it for it in inventory.present if inventory.is_owned(it)]
    inventory.update_processes(state, pids, time.monotonic())
    return [
        Leftover(
            "MIG instance",
            f"{slot} of GPU {gpu}",
            partial(mig.destroy, gpu.id, inventory.present[slot].number),
            _reason_to_stay(node, inventory, slot),
        )
        for slot in sorted(set(ours))
        if slot in inventory.unclaimed or inventory.is_owned(slot)
    ]


def _reason_to_stay(node: AbandonedNode, inventory: InstanceInventory, slot: str) -> str:
    """Return who uses an instance, or may; empty if nobody does."""
    processes: Mapping[str, str] = inventory.processes
    if slot in processes:
        return f"used by {processes[slot]}"
    return "" if slot in inventory.idle else node.used_by or "it may be in use"
