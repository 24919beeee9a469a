"""Fractions: a GPU cut into equal shares; a pod that asks for half of them gets half of one GPU."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final

from metagpu.backends.placement import Placement, Seat, placed_or_gathered, splits
from metagpu.core.backend import OneResourceBackend, OneResourceOptions, Options
from metagpu.core.errors import FractionSplit
from metagpu.core.gpu import MIB, Gpu, GpuId
from metagpu.core.grant import Grant
from metagpu.core.injection import memory_mib
from metagpu.core.model import Share, by_gpu
from metagpu.core.snapshot import Snapshot
from metagpu.core.units import Bytes

DEFAULT_SHARES: Final = 100
_MOST_SHARES: Final = 100_000
"""Of one GPU: more than the kubelet takes in a list, and few enough to be counted in no time."""
_ENV_LIMIT: Final = 120_000
"""Bytes; Linux refuses an environment string of 128 KiB (MAX_ARG_STRLEN), so the container."""


class Split(StrEnum):
    """What to do with a set of shares that spreads one fraction over several GPUs."""

    REFUSE = "refuse"
    ACCEPT = "accept"


class FractionOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say to fractions.

    Attributes:
        shares_per_gpu: how many shares every GPU has, 100 unless `memory_unit` is given.
        memory_unit: size of one share instead, as `1Gi`: larger GPUs have more shares, so the same
            request means the same memory on every model.
        placement: which GPU to take when several would do.
        split: what to do when the kubelet's choice would spread one fraction over several GPUs.
        metagpu_env: whether to set MetaGPU's own variables too.
    """

    resource: str = "cnvrg.io/metagpu"
    shares_per_gpu: int | None = None
    memory_unit: Bytes | None = None
    placement: Placement = Placement.BINPACK
    split: Split = Split.REFUSE
    metagpu_env: bool = True

    def __post_init__(self) -> None:
        if self.shares_per_gpu is not None and self.memory_unit is not None:
            raise ValueError("sharesPerGpu and memoryUnit contradict each other; give one of them")
        if self.shares_per_gpu is not None and not 1 <= self.shares_per_gpu <= _MOST_SHARES:
            raise ValueError(f"sharesPerGpu is {self.shares_per_gpu}; allowed: 1 to {_MOST_SHARES}")
        if self.memory_unit is not None and self.memory_unit < MIB:
            raise ValueError("memoryUnit must be 1Mi or more")


class FractionBackend(OneResourceBackend[FractionOptions]):
    """Cuts a GPU into shares of equal memory. Ids are `GPU-<uuid>::m07`."""

    name: ClassVar[str] = "fraction"
    options_type: ClassVar[type[Options]] = FractionOptions

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Cut a GPU; one that is smaller than the memory unit, or in MIG mode, has no share."""
        if gpu.mig_enabled:
            return ()  # CUDA sees its instances only, and there may be none
        unit, count = self.options.memory_unit, self.options.shares_per_gpu
        number_of = gpu.memory // unit if unit else count or DEFAULT_SHARES
        memory = unit or gpu.memory // number_of

        # Two digits at least and never more than needed: an id outlives a change of count.
        return self.equal(gpu, (f"m{number:02d}" for number in range(number_of)), memory)

    def why_none(self, gpu: Gpu) -> str:
        """Say why a GPU has no share."""
        unit = self.options.memory_unit
        if gpu.mig_enabled or unit is None:
            return super().why_none(gpu)
        return f"a share is {unit // MIB} MiB, and the GPU has {gpu.memory // MIB}"

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose shares of one GPU, or of whole GPUs and one part.

        GPUs that are faulty, paused or in others' hands come last: the kubelet may not have heard
        of it yet.
        """
        seats = self._seats(available, required, snapshot)
        sound = [s for s in seats if s.required or snapshot.gpus[s.gpu.id].open_to(self.name)]

        largest = max(map(len, snapshot.offers[self.resource].by_gpu.values()), default=0)
        return placed_or_gathered(size, sound, seats, self.options.placement, largest)

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse a set that spreads one fraction over several GPUs, unless it is to be accepted.

        Raises:
            FractionSplit: saying what is free where.
        """
        if len({share.gpu for share in shares}) == 1 or self.options.split is Split.ACCEPT:
            return

        taken = by_gpu(shares)
        on_offer = snapshot.offers[self.resource].by_gpu
        counts = [(len(those), len(on_offer[gpu])) for gpu, those in taken.items()]

        if splits(counts, max(map(len, on_offer.values()))):
            chosen = {snapshot.gpus[gpu].gpu.index: len(those) for gpu, those in taken.items()}
            raise FractionSplit(self.resource, len(shares), _told(chosen), self._free(snapshot))

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give the GPUs, and say how much memory of each the container should keep to."""
        taken = by_gpu(shares)
        gpus = sorted([snapshot.gpus[gpu].gpu for gpu in taken], key=lambda gpu: gpu.index)
        memory = [(gpu, memory_mib(taken[gpu.id])) for gpu in gpus]
        envs: dict[str, str] = {}

        if self.options.metagpu_env:
            envs["METAGPU_MAX_MEM"] = str(sum([mib for _, mib in memory]))
            names = _metagpu_names(gpus, taken)
            if len(names) <= _ENV_LIMIT:
                envs["CNVRG_META_GPU_DEVICES"] = names

        return self.injection.grant_memory(memory, envs)

    def _seats(
        self, available: Sequence[Share], required: Sequence[Share], snapshot: Snapshot
    ) -> list[Seat]:
        on_offer = snapshot.offers[self.resource].by_gpu
        must = by_gpu(required)

        return [
            Seat(
                snapshot.gpus[gpu].gpu,
                len(on_offer[gpu]),
                free,
                frozenset(must.get(gpu, ())),
            )
            for gpu, free in by_gpu([*available, *required] if required else available).items()
        ]

    def _free(self, snapshot: Snapshot) -> str:
        free = {
            state.gpu.index: state.free(self.resource) if state.verdict.healthy else "unhealthy"
            for state in snapshot.gpus.values()
            if state.gpu.id in snapshot.offers[self.resource].by_gpu
        }
        return _told(free)


def _metagpu_names(gpus: Sequence[Gpu], taken: Mapping[GpuId, Sequence[Share]]) -> str:
    """Name the shares as MetaGPU did, for images that read them."""
    names: list[str] = []

    for gpu in gpus:
        head, tail = f"cnvrg-meta-{gpu.index}-", f"-{gpu.id}"
        numbers = sorted([share.number for share in taken[gpu.id]])
        names.append(head + f"{tail},{head}".join(map(str, numbers)) + tail)
    return ",".join(names)


def _told(by_index: Mapping[int, object]) -> str:
    return ", ".join(f"GPU {index}: {value}" for index, value in sorted(by_index.items()))
