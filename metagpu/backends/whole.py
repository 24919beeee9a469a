"""Whole GPUs: a pod that asks for several gets those that are best connected with each other."""

from collections.abc import Sequence
from typing import ClassVar

from metagpu.backends.whole_placement import best_connected
from metagpu.core.backend import Backend, Guard, Options
from metagpu.core.injection import Injection
from metagpu.core.model import Gpu, Grant, ResourceName, Share, ShareId, Snapshot

_SLOT = "whole"


class WholeOptions(Options, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool may say to whole GPUs; the resource is that of NVIDIA's device plugin."""

    resource: str = "nvidia.com/gpu"


class WholeBackend(Backend):
    """Gives GPUs as they are. A share's id is the GPU's: `GPU-<uuid>`."""

    name: ClassVar[str] = "whole"
    options_type: ClassVar[type[Options]] = WholeOptions
    guard: ClassVar[Guard] = Guard.ALONE

    def __init__(self, options: WholeOptions, injection: Injection) -> None:
        self._injection = injection
        self._resource = ResourceName(options.resource)

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> "WholeBackend":
        """Make it from a pool's options."""
        if not isinstance(options, WholeOptions):
            raise TypeError(f"whole cannot read {type(options).__name__}")
        return cls(options, injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource name of this pool's GPUs."""
        return (self._resource,)

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Leave a GPU in one piece; one in MIG mode is not given: CUDA sees its instances only."""
        if gpu.mig_enabled:
            return ()

        return [
            Share(
                id=ShareId(gpu.id),
                gpu=gpu.id,
                resource=self._resource,
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
            if gpu in shares
            and (gpu in must or (state.verdict.healthy and state.owner in (None, self.name)))
        ]
        chosen = [shares[gpu.id] for gpu in best_connected(size, sound, must, snapshot.topology)]

        return list(dict.fromkeys([*chosen, *required, *available]))[:size]

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give the GPUs, and say how much memory they have."""
        return self._injection.grant_shares(shares, snapshot)
