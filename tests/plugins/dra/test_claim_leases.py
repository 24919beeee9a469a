"""Claims that cannot be prepared now, and whether another attempt soon is worth it."""

from types import MappingProxyType
from typing import Any

import pytest

from metagpu.core.devices.devices import Device
from metagpu.core.model.shares import (
    CordonSource,
    HardwareDevice,
    Lease,
    Pause,
    ProvisionedState,
    ResourceClaimRef,
    ShareId,
    Verdict,
)
from metagpu.core.model.snapshot import Cleanup, GpuState, Snapshot
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.plugins.dra.claim_leases import becomes_free_soon
from tests.rigs.build import METAGPU, gpu, share

GPU = gpu(0)
SHARES = share(GPU, 0), share(GPU, 1)
DEVICE = Device("gpu-0-fraction", GPU.id, "fraction", "fraction", METAGPU, SHARES)
MINE, OTHER = (ResourceClaimRef("ns", name, name) for name in ("mine", "other"))
FAULTY = Verdict(healthy=False, since=0, reason="XID 79")
FAN = Pause("fan", since=0)
CLEANS = Cleanup(since={"fraction": 1.0})


def made(*, idle: bool = True, delayed: frozenset[ShareId] = frozenset()) -> dict[str, Any]:
    """Return what a backend has created for the first share."""
    devices = {SHARES[0].id: HardwareDevice("MIG-0", 1, 0, idle=idle)}
    return {"mig": ProvisionedState(devices=devices, delayed=delayed)}


def leased(claim: ResourceClaimRef) -> Any:  # noqa: ANN401 - as a field of a state
    """Return a lease of the first share."""
    return MappingProxyType({SHARES[0].id: Lease(SHARES[0], 1, resource_claim=claim)})


@pytest.mark.parametrize(
    ("fields", "soon"),
    [
        ({}, False),
        ({"cleanup": CLEANS}, True),
        ({"cleanup": CLEANS, "verdict": FAULTY}, False),
        ({"cleanup": CLEANS, "cordons": {CordonSource.NODE: FAN}}, False),
        ({"cleanup": CLEANS, "leases": leased(OTHER)}, False),
        ({"cleanup": CLEANS, "leases": leased(MINE)}, True),
        ({"suspended": {"fraction": Pause(NOT_READY, since=0)}}, True),
        ({"suspended": {"fraction": FAN}}, False),
        ({"provisioned": made()}, False),
        ({"provisioned": made(delayed=frozenset({SHARES[1].id}))}, True),
        ({"provisioned": made(idle=False)}, True),
        ({"provisioned": made(idle=False), "leases": leased(MINE)}, False),
    ],
)
def test_a_gpu_that_is_being_made_ready_is_worth_another_attempt(
    fields: dict[str, Any], *, soon: bool
) -> None:
    """Pods of others, a fault or a cordon may last: such a claim does not wait for them."""
    state = GpuState(GPU, fields.pop("verdict", Verdict(healthy=True, since=0)), SHARES, **fields)
    now = Snapshot(gpus=MappingProxyType({GPU.id: state}))

    assert becomes_free_soon(MINE, [(DEVICE, 2)], now) == soon
