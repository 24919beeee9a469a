"""Whose MIG devices are no more: the pure rule."""

import pytest

from metagpu.core.lost import Given, Lost, explained, lost
from metagpu.core.model import FOREIGN, Holder, Lease, ResourceName, Share, ShareId, gpu_of

ONE, TWO = ShareId("GPU-a::2g.10gb@0"), ShareId("GPU-b::2g.10gb@4")
ALICE = Holder("team", "alice", "main")
GIVEN = Given("u-1", "main", frozenset({ONE, TWO}), frozenset({"MIG-1", "MIG-2"}))
GONE = Lost("team", "alice", "main", "u-1", ("MIG-2",))


def leases(*holders: Holder | None) -> dict[ShareId, Lease]:
    """Let the two shares be held, as far as holders are given."""
    return {
        share: Lease(
            Share(share, gpu_of(share), ResourceName("x/y"), FOREIGN, 0, frozenset(), 0), 1, holder
        )
        for share, holder in zip((ONE, TWO), holders, strict=False)
    }


def test_a_device_that_is_not_there_is_lost() -> None:
    """Of what a container was told, what is missing is named; whoever has all has lost nothing."""
    assert lost([GIVEN], leases(ALICE, ALICE), {"MIG-1"}) == {GONE}
    assert not lost([GIVEN], leases(ALICE, ALICE), {"MIG-1", "MIG-2", "MIG-3"})


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
def test_what_the_kubelet_keeps_of_others_is_no_loss(held: dict[ShareId, Lease]) -> None:
    """An answer counts only for the container that holds all of its shares now."""
    assert not lost([GIVEN], held, set())


def test_a_gpu_that_does_not_answer_loses_nobody_anything() -> None:
    """What cannot be known is not told."""
    assert not lost([GIVEN], leases(ALICE, ALICE), {"MIG-1"}, {gpu_of(TWO)})


@pytest.mark.parametrize(
    ("devices", "those"),
    [(("MIG-2",), "MIG-2, which is"), (("MIG-1", "MIG-2"), "MIG-1, MIG-2, which are")],
)
def test_it_is_said_with_what_helps(devices: tuple[str, ...], those: str) -> None:
    """One sentence names container, device, cause and the command."""
    assert explained("main", devices, GONE.mend) == (
        f"container main was given {those} no more since its GPU was reset or the node rebooted, "
        "and it is given the same at each start; delete the pod, and one that is made in its place "
        "gets another: kubectl delete pod -n team alice"
    )
