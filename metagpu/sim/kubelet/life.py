"""One process of the simulated kubelet, from reading its checkpoint to its sudden death (§2)."""

import random
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from metagpu.sim.kubelet.admission import Admission
from metagpu.sim.kubelet.ledger import Ledger
from metagpu.sim.kubelet.podresources import AlphaLister, Lister, RateLimit, Resources
from metagpu.sim.kubelet.pods import Pod
from metagpu.sim.kubelet.registration import Registration, Tally
from metagpu.sim.kubelet.topology import TopologyPolicy
from metagpu.sim.kubelet.wire import Door

SOCKET = "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same over all lifetimes; `SimKubelet` says what each means."""

    directory: Path
    pod_resources: Path | None
    numa_nodes: Collection[int]
    topology_policy: TopologyPolicy
    stop_grace: float
    dial_timeout: float
    pre_start_timeout: float
    fixed_clashes: bool
    clock: Callable[[], float]
    rng: random.Random


@dataclass(slots=True)
class Life:
    """What is lost when the process dies."""

    ledger: Ledger
    checkpoint: Path
    alive: bool = True
    doors: list[Door] = field(default_factory=list)
    saving: anyio.Lock = field(default_factory=anyio.Lock)
    asked: int = 0
    written: int = 0
    registration: Registration = field(init=False)
    admission: Admission = field(init=False)

    async def save(self) -> None:
        """Write the checkpoint in one piece; after death, do nothing.

        One write serves all who asked before it began.
        """
        self.asked += 1
        mine = self.asked
        async with self.saving:
            if self.alive and self.written < mine:
                covered, text = self.asked, self.ledger.checkpoint()
                await to_thread.run_sync(_replace, self.checkpoint, text)
                self.written = covered

    async def end(self) -> None:
        """Die: no answer, no farewell, files stay."""
        self.alive = False
        for door in self.doors:
            await door.vanish()
        await self.registration.vanish()
        async with self.saving:  # a write under way must not reach into the next life
            pass


async def begin(
    settings: Settings,
    tally: Tally,
    *,
    pods: Mapping[str, Pod],
    started: Collection[tuple[str, str]],
) -> tuple[Life, bool]:
    """Start a kubelet; tell too whether it found nothing of an earlier one.

    `pods` is read throughout the lifetime, `started` are the containers that run by now.

    Raises:
        OSError: a socket cannot be bound.
    """
    ledger = Ledger(clock=settings.clock, stop_grace=settings.stop_grace)
    life = Life(ledger, settings.directory / CHECKPOINT)
    text, is_new = await to_thread.run_sync(_look, settings.directory)
    ledger.restore(text)
    ledger.ready = not pods
    life.admission = Admission(
        ledger,
        save=life.save,
        active=pods.values,
        running=started,
        rng=settings.rng,
        numa_nodes=settings.numa_nodes,
        policy=settings.topology_policy,
        pre_start_timeout=settings.pre_start_timeout,
    )
    life.registration = Registration(
        ledger,
        settings.directory,
        tally,
        save=life.save,
        dial_timeout=settings.dial_timeout,
        fixed_clashes=settings.fixed_clashes,
    )
    try:
        await _open_doors(life, settings, pods)
    except OSError:
        await life.end()
        raise
    return life, is_new


async def _open_doors(life: Life, settings: Settings, pods: Mapping[str, Pod]) -> None:
    if settings.pod_resources is not None:
        resources = Resources(
            life.ledger,
            active=pods.values,
            free=life.admission.free,
            limit=RateLimit(settings.clock),
        )
        lister = Door([Lister(resources), AlphaLister(resources)])
        await lister.open(settings.pod_resources)
        life.doors.append(lister)
    door = Door([life.registration])
    await door.open(settings.directory / SOCKET, wipe=settings.directory)
    life.doors.append(door)


def _look(directory: Path) -> tuple[str, bool]:
    """Read the checkpoint; tell whether the directory holds nothing but sockets."""
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    try:
        text = (directory / CHECKPOINT).read_text()
    except FileNotFoundError:
        text = ""
    return text, all(_is_socket(path) for path in directory.iterdir())


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:  # a plugin took its socket away just now
        return True


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
