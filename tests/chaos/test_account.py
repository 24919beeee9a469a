"""The checker of random schedules finds what claims hold twice, and nothing else."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.account import Account
from tests.chaos.node import CLAIMED, CLAIMS

GPUS = tuple(f"GPU-{number}" for number in range(5))


@pytest.mark.parametrize("kind", CLAIMED)
def test_claims_hold_a_gpu_twice_when_it_has_less_than_they_consume(
    kind: str, tmp_path: Path
) -> None:
    """Several claims may consume one device, up to what there is of its capacity."""
    capacity, most = CLAIMED[kind]
    account = Account(GPUS, tmp_path / "driver")

    def hold(*amounts: int) -> None:
        results = {
            f"pod-{n}": {
                "device": f"gpu-{CLAIMS}-{kind}",
                "shareID": str(n),
                "consumedCapacity": {capacity: str(amount)},
            }
            for n, amount in enumerate(amounts)
        }
        account.saw(
            {
                name: (name, account.of_claim(claim(name, result)))
                for name, result in results.items()
            }
        )

    hold(most - 1, 1)
    assert not account.broken
    hold(most - 1, 1, 1)
    assert f"more than {most} {capacity}" in account.broken[0]


def claim(name: str, result: Mapping[str, object]) -> Mapping[str, object]:
    """Return a ResourceClaim with one allocated device."""
    allocation = {"devices": {"results": [result]}}
    return {"metadata": {"name": name}, "status": {"allocation": allocation}}
