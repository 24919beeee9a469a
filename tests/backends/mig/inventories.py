"""Inventories of a GPU, after some facts and scans."""

from collections.abc import Iterable

from metagpu.backends.mig.inventory import InstanceInventory, InstanceSettings
from metagpu.backends.mig.layout_inventory import provisioned_state
from metagpu.core.model.shares import Holder, ProvisionedState, Share
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import Fact, GpusFound, LeasesObserved
from tests.backends.mig.gpus import instance, mig_gpu
from tests.backends.mig.test_backend import backend
from tests.rigs.build import after, offer

GPU = mig_gpu()
SHARES = backend().shares(GPU)
POD = Holder("default", "pod", "main")
TWO = instance(GPU, "2g.10gb@4", 5)
TWO_UUID = TWO.compute_instances[0].uuid
NO_PROCESSES: dict[int | None, list[int]] = {}


def share(slot: str) -> Share:
    """Find a share by its profile and slice."""
    return next(other for other in SHARES if other.id.endswith(f"::{slot}"))


def state(*facts: Fact) -> GpuState:
    """Return the GPU's state after some facts."""
    return after(GpusFound((GPU,), at=0), offer(*SHARES), *facts).gpus[GPU.id]


def observed(*slots: str, others: Iterable[str] = ()) -> LeasesObserved:
    """Report pods that hold these shares, and devices that pods hold of other plugins."""
    held = [share(slot).id for slot in slots] + [
        type(share("1g.5gb@0").id)(other) for other in others
    ]
    return LeasesObserved(dict.fromkeys(held, POD), at=5)


def empty_inventory(
    at: GpuState, *, scanned: bool = True, keep_warm: float = 10
) -> InstanceInventory:
    """Create an inventory, by default after a first scan of an empty GPU."""
    settings = InstanceSettings(frozenset(("1g.5gb", "2g.10gb", "3g.20gb")), keep_warm, 10)
    made = InstanceInventory(settings, "mig")
    if scanned:
        made.update_instances(at, [], 0)
    return made


def add_owned(inventory: InstanceInventory, at: GpuState) -> None:
    """Add an instance of ours."""
    inventory.owned.add(TWO_UUID)
    inventory.update_instances(at, [TWO], 1)


def report(inventory: InstanceInventory, at: GpuState) -> ProvisionedState:
    """Return the reported state, as the reconciler does."""
    inventory.record_leases(at)
    return provisioned_state(inventory, at, exclusive=True)
