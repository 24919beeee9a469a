"""MPS: containers compute on one GPU at the same time, each within its own part of it.

NVIDIA's Multi-Process Service has a control daemon for each GPU; a container becomes its client
through a folder that they share, and the container's environment says how much it may have.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

import structlog

from metagpu.backends.mps.keeping import keep
from metagpu.backends.mps_daemon import parts
from metagpu.backends.mps_daemon.control import Folders
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.backends.placement import Placement, Seat, placed_or_gathered
from metagpu.core.backend import Guard, OneResourceBackend, OneResourceOptions, Options
from metagpu.core.errors import OneDeviceOnly, TooManyClients
from metagpu.core.figures import Figure, FigureKind
from metagpu.core.gpu import MIB, Gpu, GpuId
from metagpu.core.grant import Grant
from metagpu.core.model import Share, ShareId, by_gpu
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.core.units import Bytes

UP: Final = FigureKind(
    "mps_control_daemon_up",
    "Whether the MPS control daemon of the GPU answers and takes clients, 1 or 0.",
)
log = structlog.get_logger()


class MpsOptions(
    OneResourceOptions, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say to MPS.

    Attributes:
        units_per_gpu: how many units each GPU has, 100 unless `replicas` is given; a container may
            take several, of one GPU.
        replicas: how many equal parts each GPU has instead; no more than the clients that it
            serves.
        placement: which GPU to take when several would do.
        max_clients: how many containers a GPU serves at once; as its architecture allows when not
            given.
        server_memory: what the MPS server keeps for itself, so that all parts fit.
    """

    resource: str = "nvidia.com/gpu.mps"
    units_per_gpu: int | None = None
    replicas: int | None = None
    placement: Placement = Placement.BINPACK
    max_clients: int | None = None
    server_memory: Bytes = parts.SERVER_MEMORY

    def __post_init__(self) -> None:
        if self.units_per_gpu is not None and self.replicas is not None:
            raise ValueError("unitsPerGpu and replicas contradict each other; give one of them")
        parts.check_number("unitsPerGpu", self.units_per_gpu, parts.MOST_UNITS)
        parts.check_number("replicas", self.replicas, parts.MOST_CLIENTS)
        parts.check_number("maxClients", self.max_clients, parts.MOST_CLIENTS)


class MpsBackend(OneResourceBackend[MpsOptions]):
    """Cuts a GPU into units of threads and memory. Ids are `GPU-<uuid>::p12`."""

    name: ClassVar[str] = "mps"
    options_type: ClassVar[type[Options]] = MpsOptions
    readies: ClassVar[bool] = True
    cleans: ClassVar[bool] = True
    guard: ClassVar[Guard] = Guard.MPS
    tells: ClassVar[tuple[FigureKind, ...]] = (UP,)
    timing: ClassVar[Timing] = Timing()

    def figures(self, states: Sequence[GpuState]) -> Iterable[Figure]:
        """Tell whether control daemons serve: the backend is suspended while one does not."""
        return [Figure(UP, it.gpu.id, self.name not in it.suspended) for it in states]

    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Cut what the MPS server leaves of a GPU; one in MIG mode has no share.

        A GPU has no more replicas than it serves clients.
        """
        units, replicas = self.options.units_per_gpu or parts.UNITS, self.options.replicas
        count = units if replicas is None else min(replicas, self.clients(gpu))
        memory = self._usable(gpu) // count
        if gpu.mig_enabled or memory < MIB:
            return ()

        return self.equal(gpu, (f"p{number:02d}" for number in range(count)), memory)

    def clients(self, gpu: Gpu) -> int:
        """Say how many containers a GPU serves at once; one process of each, that is."""
        return parts.clients_of(gpu, self.options.max_clients)

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,
    ) -> Sequence[Share]:
        """Choose units of one GPU that takes another client; others come last."""
        must = by_gpu(required)
        seats = [
            Seat(
                snapshot.gpus[gpu].gpu,
                len(snapshot.offers[self.resource].by_gpu[gpu]),
                free,
                frozenset(must.get(gpu, ())),
            )
            for gpu, free in by_gpu([*available, *required]).items()
        ]
        sound = [it for it in seats if it.required or self._takes_more(snapshot.gpus[it.gpu.id])]
        return placed_or_gathered(size, sound, seats, self.options.placement, largest=size)

    def check(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Refuse units of several GPUs, and one container more than a GPU serves.

        Raises:
            OneDeviceOnly: saying what is free where.
            TooManyClients: saying how many there are.
        """
        taken = by_gpu(shares)
        if len(taken) > 1:
            on_offer = snapshot.offers[self.resource].by_gpu
            chosen = {snapshot.gpus[gpu].gpu.index: len(those) for gpu, those in taken.items()}
            free = {
                state.gpu.index: state.free(self.resource)
                for state in snapshot.gpus.values()
                if state.gpu.id in on_offer
            }
            raise OneDeviceOnly(self.resource, len(shares), _told(chosen), _told(free))

        for gpu, those in taken.items():
            state = snapshot.gpus[gpu]
            # What an init container had is handed on, and not one container more.
            others = state.leases.keys() - {share.id for share in those}
            if self._clients_now(state, others) >= self.clients(state.gpu):
                raise TooManyClients(self.resource, f"GPU {state.gpu}", self.clients(state.gpu))

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give the GPU, the way to its control daemon, and the part of it that the units are."""
        base = self.injection.grant_shares(shares, snapshot)
        [(gpu, held)] = by_gpu(shares).items()
        # Another pool may have cut it, under the same name.
        units = len(snapshot.offers[self.resource].by_gpu[gpu])
        return parts.as_client(base, self._folders(gpu), held, units)

    async def serve(self, served: ServedGpu) -> None:
        """Keep a control daemon for the GPU, as long as there are clients or a pool wants it."""
        most = self.clients(served.gpu)
        if most < (self.options.replicas or 0):
            log.warning(
                "a GPU serves fewer clients than the pool has replicas; so many are offered",
                gpu=str(served.gpu),
                offered=most,
                replicas=self.options.replicas,
            )
        await keep(served, self._folders(served.gpu.id), self.timing)

    def _usable(self, gpu: Gpu) -> int:
        return parts.usable(gpu.memory - (gpu.reserved or 0), self.options.server_memory)

    def _folders(self, gpu: GpuId) -> Folders:
        return Folders.of(self.injection.run_dir, gpu)

    def _takes_more(self, state: GpuState) -> bool:
        now = self._clients_now(state, state.leases.keys())
        return state.open_to(self.name) and now < self.clients(state.gpu)

    def _clients_now(self, state: GpuState, ids: Iterable[ShareId]) -> int:
        """Count the containers that hold these shares, of those that are ours."""
        leases = [state.leases[share_id] for share_id in ids]
        return parts.containers(it for it in leases if it.share.backend == self.name)


def _told(by_index: Mapping[int, int]) -> str:
    return ", ".join(f"GPU {index}: {count}" for index, count in sorted(by_index.items()))
