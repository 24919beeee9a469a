"""The backend `fraction`: half of a GPU's equal shares are half of one GPU."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final

from metagpu.backends.common.packing import (
    PlacementPolicy,
    candidates_of,
    choose_shares_or_fallback,
    is_split,
)
from metagpu.core.availability.reasons import count_free, open_to
from metagpu.core.config.units import Bytes
from metagpu.core.contracts.backend import OneResourceBackend, OneResourceOptions, Options
from metagpu.core.contracts.capabilities import DiagnosesGpu, LimitsRequests
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import memory_mib
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.offers import OfferPolicy, RequestRule
from metagpu.core.model.request_errors import FractionSplit
from metagpu.core.model.shares import Share, by_gpu
from metagpu.core.model.snapshot import Snapshot

DEFAULT_SHARES: Final = 100
_MAX_SHARES: Final = 70_000
"""Of one GPU: a list of 4 MiB, which is the most that the kubelet takes, has about as many."""
_ENV_LIMIT: Final = 120_000
"""Bytes. Linux refuses an environment string of 128 KiB (MAX_ARG_STRLEN), and so the container."""


class SplitPolicy(StrEnum):
    """The answer to a set of shares that spreads one fraction over several GPUs."""

    REFUSE = "refuse"
    ACCEPT = "accept"


class FractionOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of fractions.

    Attributes:
        shares_per_gpu: the number of shares of every GPU, 100 unless `memory_unit` is given.
        memory_unit: the size of one share instead, such as `1Gi`. Larger GPUs then have more
            shares, and the same request means the same memory on every model.
        gpu_memory: the memory of a GPU whose driver reports none, as it uses the machine's.
        placement: the GPU to take when several would do.
        split: the answer when the kubelet's choice spreads one fraction over several GPUs.
        offer: whether free shares are held back that no fraction could take together; where a split
            is accepted there are none.
        metagpu_env: whether containers get MetaGPU's own variables too; without a word the sum of
            memory alone, as the names of the shares take 5 kB of every pod's environment.
    """

    resource: str = "cnvrg.io/metagpu"
    shares_per_gpu: int | None = None
    memory_unit: Bytes | None = None
    gpu_memory: Bytes | None = None
    placement: PlacementPolicy = PlacementPolicy.BINPACK
    split: SplitPolicy = SplitPolicy.REFUSE
    offer: OfferPolicy = OfferPolicy.EXACT
    metagpu_env: bool | None = None

    def __post_init__(self) -> None:
        if self.shares_per_gpu is not None and self.memory_unit is not None:
            raise ValueError("sharesPerGpu and memoryUnit contradict each other; give one of them")
        if self.shares_per_gpu is not None and not 1 <= self.shares_per_gpu <= _MAX_SHARES:
            raise ValueError(f"sharesPerGpu is {self.shares_per_gpu}; allowed: 1 to {_MAX_SHARES}")
        if self.memory_unit is not None and self.memory_unit < MIB:
            raise ValueError("memoryUnit must be 1Mi or more")
        if self.gpu_memory is not None and self.gpu_memory < MIB:
            raise ValueError("gpuMemory must be 1Mi or more")


class FractionBackend(OneResourceBackend[FractionOptions], DiagnosesGpu, LimitsRequests):
    """A backend of equal shares of a GPU's memory, with ids `GPU-<uuid>::m07`."""

    name: ClassVar[str] = "fraction"
    options_type: ClassVar[type[Options]] = FractionOptions

    @property
    def request_rule(self) -> RequestRule:
        """One GPU, or whole GPUs and a part of one more; any GPUs with `offer: all`."""
        refuses = self.options.split is SplitPolicy.REFUSE
        exact = self.options.offer is OfferPolicy.EXACT
        return RequestRule.WHOLE_GPUS if refuses and exact else RequestRule.ANY

    def count_shares(self, gpu: Gpu) -> int:
        """Count a GPU's shares: none in MIG mode, below the unit, or of unknown memory."""
        total = gpu.memory or self.options.gpu_memory
        if gpu.mig_enabled or total is None:
            return 0  # CUDA sees MIG instances only, and there may be none
        unit, count = self.options.memory_unit, self.options.shares_per_gpu
        return min(total // unit, _MAX_SHARES + 1) if unit else count or DEFAULT_SHARES

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return a GPU's shares."""
        if not (number_of := self.count_shares(gpu)):
            return ()
        unit = self.options.memory_unit
        memory = unit or (gpu.memory or self.options.gpu_memory or 0) // number_of

        # Two digits at least and never more than needed: an id outlives a change of count.
        slots = (f"m{number:02d}" for number in range(number_of))
        return self.equal_shares(gpu, slots, memory, by_size=unit is not None)

    def misfit_reason(self, gpu: Gpu) -> str:
        """Return why a GPU is too small for one share."""
        total, unit = gpu.memory or self.options.gpu_memory, self.options.memory_unit
        if total is None or unit is None or unit <= total:
            return ""
        return f"a share is {unit // MIB} MiB, and the GPU has {total // MIB}"

    def no_shares_reason(self, gpu: Gpu) -> str:
        """Return why a GPU has no share."""
        if gpu.mig_enabled:
            return super().no_shares_reason(gpu)
        if gpu.memory is None and self.options.gpu_memory is None:
            return (
                "the driver reports no memory for this GPU: set gpuMemory (such as 100Gi) to the "
                "part of the machine's memory that its pods may use"
            )
        return self.misfit_reason(gpu) or super().no_shares_reason(gpu)

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose shares of one GPU, or of whole GPUs and a part of one more.

        GPUs that are faulty, suspended, or owned by another backend come last: the kubelet may
        not have received their new state yet.
        """
        candidates = candidates_of(self.resource, available, required, snapshot)
        open_candidates = [
            candidate
            for candidate in candidates
            if candidate.required or open_to(snapshot.gpus[candidate.gpu.id], self.name)
        ]
        largest = max(map(len, snapshot.offers[self.resource].by_gpu.values()), default=0)
        return choose_shares_or_fallback(
            size, open_candidates, candidates, self.options.placement, largest
        )

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse a set that spreads one fraction over several GPUs, unless accepted.

        Raises:
            FractionSplit: with the free shares of each GPU.
        """
        taken = by_gpu(shares)
        if len(taken) == 1 or self.options.split is SplitPolicy.ACCEPT:
            return

        on_offer = snapshot.offers[self.resource].by_gpu
        counts = [(len(chosen), len(on_offer[gpu])) for gpu, chosen in taken.items()]

        if is_split(counts, max(map(len, on_offer.values()))):
            indices = {snapshot.gpus[gpu].gpu.index: len(chosen) for gpu, chosen in taken.items()}
            raise FractionSplit(
                self.resource, len(shares), _by_index_text(indices), self._free_text(snapshot)
            )

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Grant the GPUs, with the memory of each that the container should stay within."""
        taken = by_gpu(shares)
        gpus = sorted([snapshot.gpus[gpu].gpu for gpu in taken], key=lambda gpu: gpu.index)
        memory = [(gpu, memory_mib(taken[gpu.id])) for gpu in gpus]
        envs: dict[str, str] = {}

        if self.options.metagpu_env is not False:
            envs["METAGPU_MAX_MEM"] = str(sum([mib for _, mib in memory]))
        if self.options.metagpu_env:
            names = _metagpu_names(gpus, taken)
            if len(names) <= _ENV_LIMIT:
                envs["CNVRG_META_GPU_DEVICES"] = names

        return self.injection.grant_memory(memory, envs)

    def _free_text(self, snapshot: Snapshot) -> str:
        free = {
            state.gpu.index: count_free(state, self.resource)
            if state.verdict.healthy
            else "unhealthy"
            for state in snapshot.gpus.values()
            if state.gpu.id in snapshot.offers[self.resource].by_gpu
        }
        return _by_index_text(free)


def _metagpu_names(gpus: Sequence[Gpu], taken: Mapping[GpuId, Sequence[Share]]) -> str:
    """Return the shares' names in MetaGPU's form, for images that read them."""
    names: list[str] = []

    for gpu in gpus:
        head, tail = f"cnvrg-meta-{gpu.index}-", f"-{gpu.id}"
        numbers = sorted([share.number for share in taken[gpu.id]])
        names.append(head + f"{tail},{head}".join(map(str, numbers)) + tail)
    return ",".join(names)


def _by_index_text(by_index: Mapping[int, object]) -> str:
    return ", ".join(f"GPU {index}: {value}" for index, value in sorted(by_index.items()))
