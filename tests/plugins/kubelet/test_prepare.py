"""Backends' work before a container starts: cases 36 and 37 of the contract."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.contracts.capabilities import PreparesContainers
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.sim.kubelet.kubelet import ContainerStartError
from tests.plugins.kubelet.rig import METAGPU, node, pod, simulated_kubelet
from tests.rigs.waiting import skip


class Preparing(FractionBackend, PreparesContainers):
    """Fractions that are called before a container starts."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.prepared: list[list[str]] = []
        self.refusal: RequestError | None = None
        self.begin: Callable[[], None] = lambda: None
        self.wait = anyio.Event()
        self.wait.set()

    async def prepare(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Record the call."""
        del snapshot
        self.begin()
        await self.wait.wait()
        self.prepared.append([share.id for share in shares])
        if self.refusal is not None:
            raise self.refusal


def preparing(monkeypatch: pytest.MonkeyPatch) -> list[Preparing]:
    """Make `fraction` prepare; return the backends created."""
    made: list[Preparing] = []

    def configured(options: object, injection: object) -> Preparing:
        made.append(Preparing(options, injection))
        return made[-1]

    monkeypatch.setattr(FractionBackend, "configured", staticmethod(configured))
    return made


async def test_prepare_is_called_with_the_pods_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that prepares is called at each start with exactly the pod's ids (case 36)."""
    made = preparing(monkeypatch)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        running = pod("train", 2)
        await live_node.kubelet.admit(running)
        await live_node.kubelet.start_container(running, "main")
        await live_node.kubelet.start_container(running, "main")

        nothing = pod("nothing", 0)
        await live_node.kubelet.admit(nothing)
        await live_node.kubelet.start_container(nothing, "main")

        held = sorted(live_node.kubelet.devices(running)["main"][METAGPU])
        assert [sorted(call) for call in made[-1].prepared] == [held, held]


async def test_prepare_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that takes too long or is refused fails with our text; the next works (case 37)."""
    made = preparing(monkeypatch)
    kubelet = simulated_kubelet(tmp_path)

    async with node(tmp_path, kubelet=kubelet) as live_node, kubelet.running():
        await live_node.until(20, 20)
        running = pod("train", 2)
        await kubelet.admit(running)

        made[-1].wait, made[-1].begin = anyio.Event(), lambda: skip(30)
        with pytest.raises(ContainerStartError):
            await kubelet.start_container(running, "main")
        made[-1].wait.set()
        made[-1].begin = lambda: None

        made[-1].refusal = RequestError("the GPU is being cleaned")
        with pytest.raises(ContainerStartError, match="the GPU is being cleaned"):
            await kubelet.start_container(running, "main")

        made[-1].refusal = None
        await kubelet.start_container(running, "main")
