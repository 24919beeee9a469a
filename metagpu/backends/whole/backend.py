"""The backend `whole`: GPUs in one piece, the best connected ones for each pod."""

from collections.abc import Sequence
from typing import ClassVar

from metagpu.backends.whole.placement import best_connected
from metagpu.core.contracts.backend import OneResourceBackend, OneResourceOptions, Options
from metagpu.core.contracts.capabilities import DeclaresSharing, Guard
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Share, ShareId
from metagpu.core.model.snapshot import Snapshot

_SLOT = "whole"


class WholeOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of whole GPUs, with the resource name of NVIDIA's device plugin."""

    resource: str = "nvidia.com/gpu"


class WholeBackend(OneResourceBackend[WholeOptions], DeclaresSharing):
    """A backend of whole GPUs. A share's id is the GPU's: `GPU-<uuid>`."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = WholeOptions
    guard: ClassVar[Guard] = Guard.EXCLUSIVE

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return the one share of a GPU; none in MIG mode, where CUDA sees instances only."""
        if gpu.mig_enabled:
            return ()

        return [
            Share(
                id=ShareId(gpu.id),
                gpu=gpu.id,
                resource=self.resource,
                backend=self.name,
                number=0,
                footprint=frozenset((_SLOT,)),
                memory=gpu.memory or 0,
            )
        ]

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose the best connected GPUs; for one GPU, the worst connected one.

        GPUs that are faulty or owned by another backend come last.
        """
        shares = {share.gpu: share for share in (*available, *required)}
        must = {share.gpu for share in required}
        candidates = [
            state.gpu
            for gpu, state in snapshot.gpus.items()
            # The kubelet may not have received yet that another backend owns the GPU.
            if gpu in shares and (gpu in must or state.open_to(self.name))
        ]
        gpus = best_connected(size, candidates, must, snapshot.topology)
        chosen = [shares[gpu.id] for gpu in gpus]

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]
