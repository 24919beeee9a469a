"""Whole GPUs: a pod that asks for several gets those that are best connected with each other."""

from collections.abc import Sequence
from typing import ClassVar

from metagpu.backends.whole_placement import best_connected
from metagpu.core.backend import Guard, OneResourceBackend, OneResourceOptions, Options
from metagpu.core.gpu import Gpu
from metagpu.core.model import Share, ShareId
from metagpu.core.snapshot import Snapshot

_SLOT = "whole"


class WholeOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say to whole GPUs; the resource is that of NVIDIA's device plugin."""

    resource: str = "nvidia.com/gpu"


class WholeBackend(OneResourceBackend[WholeOptions]):
    """Gives GPUs as they are. A share's id is the GPU's: `GPU-<uuid>`."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = WholeOptions
    guard: ClassVar[Guard] = Guard.ALONE

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Leave a GPU in one piece; one in MIG mode is not given: CUDA sees its instances only."""
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
                memory=gpu.memory,
            )
        ]

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose the best connected GPUs, for one the loneliest; faulty or taken ones last."""
        shares = {share.gpu: share for share in (*available, *required)}
        must = {share.gpu for share in required}
        sound = [
            state.gpu
            for gpu, state in snapshot.gpus.items()
            # The kubelet may not have heard yet that another backend has the GPU.
            if gpu in shares and (gpu in must or (state.open_to(self.name)))
        ]
        chosen = [shares[gpu.id] for gpu in best_connected(size, sound, must, snapshot.topology)]

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]
