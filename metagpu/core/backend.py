"""The contract of a way of cutting GPUs: two things it must say, the rest has a default.

A backend is a class registered under the entry-point group `metagpu.backends`; its entry point's
name is its `name` and what a pool's `backend:` says. Built-in ones come through the same door.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import ClassVar, Generic, Self, TypeVar, cast

import msgspec

from metagpu.core.figures import Figure, FigureKind
from metagpu.core.gpu import Gpu
from metagpu.core.grant import Grant
from metagpu.core.injection import Injection
from metagpu.core.model import ResourceName, Share, ShareId
from metagpu.core.room import Room
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState, Snapshot

GROUP = "metagpu.backends"


class Guard(StrEnum):
    """What keeps a container of a backend within its share of a GPU's memory.

    The enforcer looks after `ENFORCER` alone: what the hardware or MPS refuses needs no second
    judge, and who has a GPU alone can take nobody's memory. Where the driver holds such a container
    to the same limit, its guard is `DRIVER`; no backend says so.
    """

    ENFORCER = "enforcer"
    DRIVER = "driver"
    MPS = "mps"
    MIG = "mig"
    ALONE = "alone"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a pool may say about one of its backends; each backend adds its own keys."""

    backend: str


class Backend(ABC):
    """One way of cutting GPUs, as one pool configured it.

    Attributes:
        name: how the configuration calls it.
        options_type: what a pool may say to it; an instance arrives as `options`.
        prepares: whether the kubelet shall call `prepare` before every container start.
        readies: whether `serve` makes a GPU ready: its shares begin suspended, until it resumes.
        cleans: whether `serve` cleans a GPU after its last lease; nobody else gets it before.
        guard: what keeps its containers within `Share.memory`.
        tells: the kinds of its `figures`.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]
    prepares: ClassVar[bool] = False
    readies: ClassVar[bool] = False
    cleans: ClassVar[bool] = False
    guard: ClassVar[Guard] = Guard.ENFORCER
    tells: ClassVar[tuple[FigureKind, ...]] = ()

    @classmethod
    @abstractmethod
    def configured(cls, options: Options, injection: Injection) -> "Backend":
        """Make the backend from a pool's options.

        Raises:
            ValueError: if the options contradict each other; says which and what is allowed.
        """

    @property
    @abstractmethod
    def resources(self) -> tuple[ResourceName, ...]:
        """The resource names it offers, also while there is no GPU to cut."""

    @property
    def patience(self) -> float | None:
        """How many seconds its shares may take to be made in hardware, `None` if nothing is made.

        Where something is, `serve` makes what is leased and tells it (`served.tell`): `grant` is
        asked once the snapshot has all of it (`GpuState.stocks`), or a container's start waits for
        that (`defers`).
        """
        return None

    @property
    def defers(self) -> bool:
        """Whether containers are told what they get before it is made, and wait at their start.

        `grant` then answers by names that mean it however often it is made anew, and a failure
        keeps a container from starting, not a pod from being admitted. For who has `patience`.
        """
        return False

    def why_none(self, gpu: Gpu) -> str:
        """Say why a GPU has none of its shares."""
        return "MIG mode is on" if gpu.mig_enabled else "too small for its backends"

    def foreseen(
        self,
        gpu: Gpu,  # noqa: ARG002 - for backends whose GPUs have to be in a mode
    ) -> str:
        """Say why nothing of a GPU will be given as it is now, empty if nothing is known of that.

        For those who look at a node that nobody serves: there `serve` says it.
        """
        return ""

    def rooms(
        self,
        states: Sequence[GpuState],  # noqa: ARG002 - for backends whose shares may overlap
    ) -> Sequence[Room]:
        """Say what is left of its GPUs, where that cannot be read from the number of shares."""
        return ()

    def figures(
        self,
        states: Sequence[GpuState],  # noqa: ARG002 - as above
    ) -> Iterable[Figure]:
        """Tell numbers of its GPUs, of the kinds in `tells`, that their shares do not tell. Pure.

        It is called in a thread, each time that monitoring asks.
        """
        return ()

    @abstractmethod
    def shares(self, gpu: Gpu) -> Sequence[Share]:
        """Cut one GPU. Pure: the same GPU and options give the same shares, with the same ids."""

    @abstractmethod
    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Say what a container gets that holds exactly these shares.

        The same shares give the same grant. Answers from memory unless hardware has to change.

        Raises:
            RequestError: if it cannot be; the text reaches the pod.
        """

    def check(  # noqa: B027 - optional: most sets are as good as any other
        self, shares: Sequence[Share], snapshot: Snapshot
    ) -> None:
        """Refuse a set of shares that the kubelet chose and that may not be granted together.

        Raises:
            RequestError: saying why, and what would be possible.
        """

    async def prepare(  # noqa: B027 - optional: called only of those that say so
        self, shares: Sequence[Share], snapshot: Snapshot
    ) -> None:
        """Make ready what a container is about to use; at each of its starts, within 30 s.

        No barrier: a kubelet that has just restarted starts containers without calling.

        Raises:
            RequestError: if the container cannot start; it is tried again.
        """

    async def serve(  # noqa: B027 - optional: most ways of cutting leave the GPU as it is
        self, served: ServedGpu
    ) -> None:
        """Keep one GPU as this backend needs it, from now until cancelled; undo it then.

        Runs once for every GPU that the backend cuts, while the layout that says so is in force. A
        reload that leaves GPU and options as they are leaves it running, on the instance where it
        began: what it learns must not live on `self`. One that changes them cancels it and waits
        for its end before another begins, with the GPU as it was left: leased, being cleaned or
        idle. Shares are on offer meanwhile, suspended ones listed as unhealthy.

        A daemon that was killed may have left the hardware in any state; after a start, leases are
        known only once the kubelet has told them.

        One that `cleans` waits for the GPU to be dirty (`served.since_last_lease`), cleans it, and
        says so by `served.returned`. It is cancelled only when the GPU is not its own any more, or
        another of its kind takes over, or the daemon stops.

        An error is logged, and it is called again after a while. One that `readies` or `cleans`
        does not return.
        """

    def prefer(
        self,
        available: Sequence[Share],
        required: Sequence[Share],
        size: int,
        snapshot: Snapshot,  # noqa: ARG002 - for backends that look at the GPUs
    ) -> Sequence[Share]:
        """Choose `size` of the available shares, all the required ones among them.

        Never fails: with fewer than `size` available it gives what there is.
        """
        chosen = dict.fromkeys([*required, *available])
        return list(chosen)[:size]


class OneResourceOptions(
    Options, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """What a pool may say to a backend that offers one resource; a subclass gives its default."""

    resource: str


OptionsT = TypeVar("OptionsT", bound=OneResourceOptions)


class OneResourceBackend(Backend, Generic[OptionsT]):
    """A backend that offers all its shares under one resource name.

    Attributes:
        options: what the pool said.
        injection: how this node gives GPUs to containers.
        resource: the name.
    """

    def __init__(self, options: OptionsT, injection: Injection) -> None:
        self.options = options
        self.injection = injection
        self.resource = ResourceName(options.resource)

    @classmethod
    def configured(cls, options: Options, injection: Injection) -> Self:
        """Make it from a pool's options."""
        if not isinstance(options, cls.options_type):
            raise TypeError(f"{cls.name} cannot read {type(options).__name__}")
        return cls(cast("OptionsT", options), injection)

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The one resource name of this pool's shares."""
        return (self.resource,)

    def equal(self, gpu: Gpu, slots: Iterable[str], memory: int) -> list[Share]:
        """Cut a GPU into equal shares, one for each slot, of so many bytes; ids are their slots."""
        return [
            Share(
                id=ShareId(f"{gpu.id}::{slot}"),
                gpu=gpu.id,
                resource=self.resource,
                backend=self.name,
                number=number,
                footprint=frozenset((slot,)),
                memory=memory,
            )
            for number, slot in enumerate(slots)
        ]

    async def grant(self, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        """Give each GPU once, and say how much of its memory the shares stand for."""
        return self.injection.grant_shares(shares, snapshot)


def installed_backends() -> Mapping[str, type[Backend]]:
    """Load every backend that is installed, ours and anyone's, by name.

    Raises:
        TypeError: if an entry point under `metagpu.backends` is no Backend, or its name differs.
    """
    found: dict[str, type[Backend]] = {}

    for entry in entry_points(group=GROUP):
        backend = entry.load()
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            raise TypeError(f"the entry point {entry.value} of {GROUP} is no Backend")
        if backend.name != entry.name:
            raise TypeError(f"{entry.value} calls itself {backend.name}, not {entry.name}")
        found[entry.name] = backend

    return found
