"""What is on a simulated GPU in MIG mode, and how making more of it goes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from metagpu.sim.mig_boards import Engines, SimProfile


@dataclass(eq=False, slots=True)
class SimCompute:
    """A compute instance; `handle` stands for it, `device` for the MIG device that it is."""

    number: int
    kind: int
    slices: int
    start: int
    uuid: str
    handle: int
    device: int


@dataclass(eq=False, slots=True)
class SimInstance:
    """A GPU instance at memory slice `start`."""

    number: int
    profile: SimProfile
    start: int
    handle: int
    computes: dict[int, SimCompute] = field(default_factory=dict)

    @property
    def slices(self) -> range:
        """The memory slices it occupies."""
        return range(self.start, self.start + self.profile.size)


@dataclass(slots=True)
class Making:
    """How making instances goes on a GPU.

    Attributes:
        takes: seconds for each GPU instance, `compute_takes` for each compute instance.
        failures: so many GPU instances fail next, `compute_failures` so many compute instances.
        begun: so many GPU instances were asked for.
        in_use_until: until when making and destroying is refused, by `time.monotonic`.
    """

    takes: float = 0.0
    failures: int = 0
    compute_failures: int = 0
    in_use_until: float = 0.0
    begun: int = 0
    compute_takes: float = 0.0


@dataclass(slots=True)
class Instances:
    """Everything MIG on one GPU; the mode is on now, and `pending` after a reset."""

    profiles: tuple[SimProfile, ...]
    enabled: bool = False
    pending: bool = False
    present: dict[int, SimInstance] = field(default_factory=dict)
    making: Making = field(default_factory=Making)

    @property
    def computes(self) -> Iterator[tuple[SimInstance, SimCompute]]:
        """Every compute instance, in the order of NVML's MIG devices."""
        for _, instance in sorted(self.present.items()):
            for _, compute in sorted(instance.computes.items()):
                yield instance, compute

    def free(self, profile: SimProfile, start: int) -> bool:
        """Tell whether the slices from `start` on are free, and the engines that it needs."""
        wanted = range(start, start + profile.size)
        taken = {number for it in self.present.values() for number in it.slices}

        return taken.isdisjoint(wanted) and self.engines_for(profile) > 0

    def engines_for(self, profile: SimProfile) -> int:
        """Count how many more of a profile the engines suffice for."""
        whole = max(self.profiles, key=lambda it: it.size).engines
        used = (
            Engines(*(sum(column) for column in zip(*self._engines(), strict=True)))
            if self.present
            else Engines()
        )

        left = [
            (total - gone) // need
            for total, gone, need in zip(whole, used, profile.engines, strict=True)
            if need
        ]
        return max(0, min(left, default=profile.most))

    def _engines(self) -> list[Engines]:
        return [instance.profile.engines for instance in self.present.values()]

    def reset(self) -> None:
        """Lose all instances, and take on the mode that was pending."""
        self.present.clear()
        self.enabled = self.pending
