"""MIG mode of a GPU whose pool wants none: turned off once nothing uses the GPU."""

import pytest

from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.inventory import MigTiming
from metagpu.core.state.facts import LeasesObserved
from metagpu.sim.machine.spec import build_node
from tests.rigs.gpu_context import run_backends
from tests.rigs.mig import mig_pool
from tests.rigs.waiting import becomes

MODES = (False, False), (True, True), (True, False), (False, True)


@pytest.mark.parametrize(("model", "resets"), [("h100-80gb", False), ("a100-40gb", True)])
@pytest.mark.parametrize(("enabled", "pending"), MODES)
async def test_a_gpu_leaves_mig_mode(
    monkeypatch: pytest.MonkeyPatch, model: str, *, resets: bool, enabled: bool, pending: bool
) -> None:
    """A mode that is on, or comes with the next reset, is turned off; some wait for a reset."""
    monkeypatch.setattr(MigBackend, "timing", MigTiming(scan=0.02, poll=0.02))
    node = build_node(f"{model}:1")
    mig = node.gpus[0].mig
    found_off = not (enabled or pending)  # somebody else turns it off meanwhile
    mig.enabled, mig.pending = enabled or found_off, pending or found_off
    async with run_backends(mig_pool("disableMig: true"), node=node) as care:
        await becomes(lambda: "mig" in care.state().suspended)
        mig.enabled, mig.pending = enabled, pending
        care.registry.apply(LeasesObserved({}, at=0))
        await becomes(lambda: mig.pending is False)
        waits = enabled and (resets or not pending)
        reason = "MIG mode waits for a reset" if waits else "MIG mode is off now"
        await becomes(lambda: reason in care.state().suspended["mig"].reason)
        assert mig.enabled is waits
