"""The pure rule of lost devices."""

import pytest

from metagpu.core.model.shares import (
    UNKNOWN_BACKEND,
    Holder,
    Lease,
    ResourceName,
    Share,
    ShareId,
    gpu_of,
)
from metagpu.core.usage.lost_devices import (
    AllocatedDevices,
    LostDevices,
    describe_loss,
    find_lost_devices,
)

ONE, TWO = ShareId("GPU-a::2g.10gb@0"), ShareId("GPU-b::2g.10gb@4")
ALICE = Holder("team", "alice", "main")
GIVEN = AllocatedDevices("u-1", "main", frozenset({ONE, TWO}), frozenset({"MIG-1", "MIG-2"}))
GONE = LostDevices("team", "alice", "main", "u-1", ("MIG-2",))


def leases(*holders: Holder | None) -> dict[ShareId, Lease]:
    """Return leases of the two shares, for the given holders."""
    return {
        share: Lease(
            Share(share, gpu_of(share), ResourceName("x/y"), UNKNOWN_BACKEND, 0, frozenset(), 0),
            1,
            holder,
        )
        for share, holder in zip((ONE, TWO), holders, strict=False)
    }


def test_a_missing_device_is_lost() -> None:
    """Missing devices of a container's grant are named; complete containers lost nothing."""
    assert find_lost_devices([GIVEN], leases(ALICE, ALICE), {"MIG-1"}) == {GONE}
    assert not find_lost_devices([GIVEN], leases(ALICE, ALICE), {"MIG-1", "MIG-2", "MIG-3"})


@pytest.mark.parametrize(
    "held",
    [
        leases(),
        leases(ALICE),
        leases(ALICE, None),
        leases(ALICE, Holder("team", "bob", "main")),
        leases(*[Holder("team", "alice", "side")] * 2),
    ],
    ids=["it has ended", "a part is free", "nobody is told yet", "two pods", "another container"],
)
def test_old_answers_of_other_containers_are_no_loss(held: dict[ShareId, Lease]) -> None:
    """An answer counts only for the container that holds all of its shares now."""
    assert not find_lost_devices([GIVEN], held, set())


def test_a_gpu_that_does_not_answer_is_no_loss() -> None:
    """Devices of a GPU that does not answer are not reported as lost."""
    assert not find_lost_devices([GIVEN], leases(ALICE, ALICE), {"MIG-1"}, {gpu_of(TWO)})


def test_a_loss_is_described_with_its_cause_and_its_fix() -> None:
    """One sentence names container, devices, cause and the command."""
    assert describe_loss("main", ("MIG-1", "MIG-2"), GONE.fix) == (
        "container main holds MIG-1, MIG-2, gone or another's after a reset, a reboot or a change "
        "of the node's GPUs; restarting the container does not help: run kubectl delete pod -n "
        "team alice"
    )
