"""Every built-in backend passes the contract suite; a backend that breaks it is found out."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mps.backend import MpsBackend
from metagpu.backends.timeslice.backend import TimesliceBackend
from metagpu.backends.whole.backend import WholeBackend
from metagpu.core.contracts.backend import Backend, GpuContext, installed_backends
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.testing.backend_contract import BackendContract

Keys = Mapping[str, Any]


class TestFraction(BackendContract):
    """Fractions keep the contract."""

    backend: ClassVar[type[Backend]] = FractionBackend
    options: ClassVar[Keys] = {"sharesPerGpu": 10}
    refused: ClassVar[Sequence[Keys]] = (
        {"sharesPerGpu": 0},
        {"sharesPerGpu": 10, "memoryUnit": "1Gi"},
    )


class TestTimeslice(BackendContract):
    """Time-slices keep the contract."""

    backend: ClassVar[type[Backend]] = TimesliceBackend
    options: ClassVar[Keys] = {"replicas": 4, "timeSlice": "short"}
    refused: ClassVar[Sequence[Keys]] = ({}, {"replicas": 0}, {"replicas": 4, "timeSlice": "tiny"})


class TestWhole(BackendContract):
    """Whole GPUs keep the contract."""

    backend: ClassVar[type[Backend]] = WholeBackend


class TestMps(BackendContract):
    """MPS keeps the contract."""

    backend: ClassVar[type[Backend]] = MpsBackend
    options: ClassVar[Keys] = {"unitsPerGpu": 10}
    refused: ClassVar[Sequence[Keys]] = ({"unitsPerGpu": 10, "replicas": 4},)


class TestMig(BackendContract):
    """MIG instances keep the contract."""

    backend: ClassVar[type[Backend]] = MigBackend
    options: ClassVar[Keys] = {"profiles": ["1g.5gb", "2g.10gb"]}
    refused: ClassVar[Sequence[Keys]] = ({"profiles": []},)
    mig_enabled: ClassVar[bool] = True


def test_every_installed_backend_is_in_this_module() -> None:
    """No built-in backend is left out above."""
    tested = {
        kind.backend for kind in BackendContract.__subclasses__() if kind.__module__ == __name__
    }
    assert tested == set(installed_backends().values())


class Repeats(WholeBackend):
    """Whole GPUs, each offered twice under one id."""

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return the share twice."""
        return [*super().shares(gpu), *super().shares(gpu)]


class Forgets(WholeBackend):
    """Whole GPUs, of which the preference leaves out the required ones."""

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose anything but the required shares."""
        del snapshot
        return [share for share in available if share not in required][:size]


class Accepts(WholeBackend):
    """Whole GPUs in MIG mode too."""

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return the share whatever the mode."""
        return super().shares(replace(gpu, mig_enabled=None))


class Sets(WholeBackend):
    """Whole GPUs with a setup that nothing would run."""

    async def serve(self, context: GpuContext) -> None:
        """Set the GPU up."""


@pytest.mark.parametrize(
    ("kind", "check", "problem"),
    [
        (Repeats, "test_ids_are_legal_and_unique", "would be offered twice"),
        (Forgets, "test_preferences_are_complete", "shares, not|required"),
        (Accepts, "test_a_gpu_in_mig_mode_is_left_alone", "MIG mode"),
        (Sets, "test_abilities_have_their_classes", "serve needs ManagesGpu"),
        (Accepts, "test_the_entry_point_names_the_backend", "entry point"),
    ],
)
def test_a_backend_that_breaks_the_contract_is_found_out(
    kind: type[Backend], check: str, problem: str
) -> None:
    """The suite fails for a backend with a fault, and names the fault."""
    suite = BackendContract()
    suite.backend = kind  # type: ignore[misc]

    with pytest.raises(Exception, match=problem):
        getattr(suite, check)()
