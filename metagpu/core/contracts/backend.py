"""The contract of a backend: one way of sharing GPUs, as one pool configured it.

A backend is a class that a package registers under the entry-point group `metagpu.backends`. The
entry point's name is the backend's `name`, and the value of `backend:` in a pool. The built-in
backends are found through the same group. docs/development/your-own-backend.md walks through one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Final, Generic, Protocol, Self, TypeVar, cast

import msgspec

from metagpu.core.contracts.driver import ComputeMode, GpuProcess, MigDriver
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ProvisionedState, ResourceName, Share, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot

GROUP: Final = "metagpu.backends"
"""The entry-point group."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The keys of one entry under `backends:` of a pool; each backend adds its own."""

    backend: str


class Backend(ABC):
    """One way of sharing GPUs.

    Optional abilities are classes of `core.contracts.capabilities`.

    Attributes:
        name: the name in the configuration.
        options_type: the type of the options; `configured` receives an instance of this type.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]

    @classmethod
    @abstractmethod
    def configured(cls, options: Options, injection: Injection) -> "Backend":
        """Create the backend from a pool's options.

        Raises:
            ValueError: if the options contradict each other; says which, and what is allowed.
        """

    @property
    @abstractmethod
    def resources(self) -> tuple[ResourceName, ...]:
        """The resource names of the backend, also while the node has no GPU for it."""

    @abstractmethod
    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Return all shares of one GPU.

        Pure: the same GPU and options give the same shares, with the same ids.
        """

    @abstractmethod
    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Return the answer to Allocate for a container that holds exactly these shares.

        The same shares give the same grant. The backend answers from memory, unless hardware has
        to change.

        Raises:
            RequestError: if the shares cannot be granted; the pod's owner reads the text.
        """

    def check(  # noqa: B027 - optional: most backends accept every set of shares
        self, shares: Sequence[Share], snapshot: Snapshot
    ) -> None:
        """Refuse a set of shares, chosen by the kubelet, that may not be granted together.

        Raises:
            RequestError: with the reason, and the sets that would be possible.
        """

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,  # noqa: ARG002 - for backends that compare GPUs
    ) -> Sequence[Share]:
        """Choose `size` of the available shares, all required ones among them.

        Never fails: with fewer than `size` shares available, the answer has all of them.
        """
        chosen = dict.fromkeys([*required, *available])
        return list(chosen)[:size]


class OneResourceOptions(
    Options, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The options of a backend with one resource name; a subclass sets its default."""

    resource: str


OptionsT = TypeVar("OptionsT", bound=OneResourceOptions)


class OneResourceBackend(Backend, Generic[OptionsT]):
    """A backend that offers all its shares under one resource name.

    Attributes:
        options: the pool's options.
        injection: how this node gives GPUs to containers.
        resource: the resource name.
    """

    def __init__(self, options: OptionsT, injection: Injection) -> None:
        self.options = options
        self.injection = injection
        self.resource = ResourceName(options.resource)
        self._footprints: dict[str, frozenset[str]] = {}  # the same ones for the shares of all GPUs

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> Self:
        """Create the backend from a pool's options.

        Raises:
            TypeError: if the options are those of another backend.
        """
        if not isinstance(options, cls.options_type):
            raise TypeError(f"{cls.name} cannot read {type(options).__name__}")
        return cls(cast("OptionsT", options), injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource name of this pool's shares."""
        return (self.resource,)

    def count_shares(self, gpu: Gpu) -> int:
        """Count the shares of a GPU; a backend that may have thousands makes none for it."""
        return len(self.shares(gpu))

    def equal_shares(
        self,
        gpu: Gpu,
        slots: Iterable[str],
        memory: int,
        *,
        replica: bool = False,
        by_size: bool = False,
    ) -> list[Share]:
        """Return one share of a GPU for each slot, all of `memory` bytes.

        A share's id ends in its slot, and its footprint is this slot alone; so the shares are
        interchangeable. `replica`, `by_size`: see `Share`.
        """
        return [
            Share(
                id=ShareId(f"{gpu.id}::{slot}"),
                gpu=gpu.id,
                resource=self.resource,
                backend=self.name,
                number=number,
                footprint=self._footprints.get(slot) or self._footprint(slot),
                memory=memory,
                replica=replica,
                interchangeable=True,
                by_size=by_size,
            )
            for number, slot in enumerate(slots)
        ]

    def _footprint(self, slot: str) -> frozenset[str]:
        return self._footprints.setdefault(slot, frozenset((slot,)))

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Grant each GPU of the shares once, with the memory that the shares stand for."""
        return self.injection.grant_shares(shares, snapshot)


class InstalledBackends(Mapping[str, type[Backend]]):
    """All installed backends by name, built-in or not, each loaded at its first use.

    A node that shares by `fraction` loads no other backend.

    Attributes:
        loaded: the backends that were used so far.
    """

    def __init__(self, entries: Iterable[EntryPoint]) -> None:
        self.loaded: dict[str, type[Backend]] = {}
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> type[Backend]:
        """Load a backend.

        Raises:
            TypeError: if its entry point is no Backend, or the backend's name differs.
        """
        if name not in self.loaded:
            self.loaded[name] = self._load(self._entries[name])
        return self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def _load(entry: EntryPoint) -> type[Backend]:
        backend = entry.load()
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            raise TypeError(f"the entry point {entry.value} of {GROUP} is no Backend")
        if backend.name != entry.name:
            raise TypeError(f"{entry.value} calls itself {backend.name}, not {entry.name}")
        return backend


def installed_backends() -> InstalledBackends:
    """Find every installed backend by its entry point."""
    return InstalledBackends(entry_points(group=GROUP))


class GpuContext(Protocol):
    """One GPU, as one backend manages it.

    Reports through a context that another one has replaced, as after a change of options, have no
    effect.
    """

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        ...

    @property
    def backend(self) -> str:
        """The name of the backend."""
        ...

    @property
    def programs(self) -> Programs:
        """Host programs that end by themselves."""
        ...

    @property
    def daemons(self) -> Daemons:
        """Host programs that run for long."""
        ...

    @property
    def state(self) -> GpuState:
        """The present state of the GPU."""
        ...

    @property
    def leased(self) -> bool:
        """True while a container holds, or may hold, a share of this backend.

        The GPU's leases may not be known yet, and that of a share which is on offer no more is of
        an unknown backend.
        """
        ...

    @property
    def cleanup_due_since(self) -> float | None:
        """The end of the backend's last lease while the GPU waits for its cleanup.

        In seconds since the epoch; `None` if no cleanup is due.
        """
        ...

    @property
    def hands_over(self) -> bool:
        """True while another daemon takes the GPU over.

        A `serve` that ends then leaves everything as it is.
        """
        ...

    async def wait_until(self, is_so: Callable[[GpuState], bool]) -> GpuState:
        """Wait for a state of the GPU of which `is_so` is true, and return it.

        Returns at once if the present state is such.
        """
        ...

    def suspend(self, reason: str, *, reset: bool = False) -> None:
        """Suspend the backend on this GPU: its shares are unhealthy and are refused.

        The refusal has the reason. Leases stay, and so do shares that other backends offer of the
        GPU. `reset` means that the suspension lasts until an operator resets the GPU; the cluster
        is informed of that.
        """
        ...

    def resume(self) -> None:
        """End the suspension: the backend's shares of this GPU can be granted."""
        ...

    def cleanup_done(self, since: float) -> bool:
        """Report the end of the cleanup that is due since then; the GPU is free again.

        Returns `False` if no such cleanup is due: a share was granted meanwhile, and the GPU is in
        use again.
        """
        ...

    @property
    def mig(self) -> MigDriver:
        """The MIG calls of NVML."""
        ...

    def report(self, provisioned: ProvisionedState) -> None:
        """Report all that this backend has created on the GPU."""
        ...

    def instance_removed(self, device: str) -> None:
        """Report that a MIG device is gone, and its faults with it."""
        ...

    async def processes(self) -> Sequence[GpuProcess]:
        """List the processes on the GPU (see `Driver.processes`).

        Raises:
            DriverError: if NVML cannot list them.
        """
        ...

    async def stopping_processes(self) -> Collection[int]:
        """Wait until the kubelet is about to kill pods; return their processes on the GPU.

        The pids are the host's. Without an API server nobody knows when: this waits for ever.

        Raises:
            DriverError: if NVML cannot list the processes.
        """
        ...

    async def compute_mode(self) -> ComputeMode | None:
        """Read the compute mode of the GPU; `None` when the driver does not report it.

        Raises:
            DriverError: if NVML cannot read it.
        """
        ...

    async def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set the compute mode, until it is set again or the driver unloads the GPU.

        Raises:
            DriverError: if NVML refuses: without root's rights, or because the GPU cannot.
        """
        ...
