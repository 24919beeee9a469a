"""MIG on one simulated GPU: mode, instances, and how provisioning goes."""

from collections.abc import Iterator

import msgspec

from metagpu.sim.machine.mig_profiles import MediaEngines, SimProfile


class SimComputeInstance(msgspec.Struct, eq=False):
    """A compute instance; `handle` is its own, `device` that of its MIG device."""

    number: int
    kind: int
    slices: int
    start: int
    uuid: str
    handle: int
    device: int


class SimGpuInstance(msgspec.Struct, eq=False):
    """A GPU instance whose first memory slice is `start`."""

    number: int
    profile: SimProfile
    start: int
    handle: int
    compute_instances: dict[int, SimComputeInstance] = msgspec.field(default_factory=dict)

    @property
    def slices(self) -> range:
        """Return the memory slices of the instance."""
        return range(self.start, self.start + self.profile.memory_slices)


class SimProvisioning(msgspec.Struct):
    """Delays and failures of creating instances on a GPU.

    Attributes:
        duration: seconds per GPU instance; `compute_duration` per compute instance.
        failures: number of GPU instances that fail next; `compute_failures` of compute instances.
        requested: number of GPU instances requested so far.
        removal_failures: number of removals of GPU instances that fail next.
        done: whether what fails is done all the same.
        in_use_until: the time until which the driver refuses changes, by `time.monotonic`.
    """

    duration: float = 0.0
    failures: int = 0
    compute_failures: int = 0
    removal_failures: int = 0
    done: bool = False
    in_use_until: float = 0.0
    requested: int = 0
    compute_duration: float = 0.0


class SimMigState(msgspec.Struct):
    """MIG of one GPU: `enabled` is the mode now, `pending` the mode after a reset."""

    profiles: tuple[SimProfile, ...]
    enabled: bool = False
    pending: bool = False
    instances: dict[int, SimGpuInstance] = msgspec.field(default_factory=dict)
    provisioning: SimProvisioning = msgspec.field(default_factory=SimProvisioning)

    @property
    def compute_instances(self) -> Iterator[tuple[SimGpuInstance, SimComputeInstance]]:
        """Yield every compute instance, in the order of NVML's MIG devices."""
        for _, instance in sorted(self.instances.items()):
            for _, compute in sorted(instance.compute_instances.items()):
                yield instance, compute

    def is_free(self, profile: SimProfile, start: int) -> bool:
        """Return whether a profile's slices from `start` on and its engines are free."""
        wanted = range(start, start + profile.memory_slices)
        taken = {number for instance in self.instances.values() for number in instance.slices}

        return taken.isdisjoint(wanted) and self.count_by_engines(profile) > 0

    def count_by_engines(self, profile: SimProfile) -> int:
        """Return the number of further instances for which the media engines suffice."""
        whole = max(self.profiles, key=lambda sim_profile: sim_profile.memory_slices).engines
        used = (
            MediaEngines(*(sum(column) for column in zip(*self._engines(), strict=True)))
            if self.instances
            else MediaEngines()
        )

        left = [
            (total - gone) // need
            for total, gone, need in zip(whole, used, profile.engines, strict=True)
            if need
        ]
        return max(0, min(left, default=profile.max_count))

    def _engines(self) -> list[MediaEngines]:
        return [instance.profile.engines for instance in self.instances.values()]

    def reset(self) -> None:
        """Remove all instances and apply the pending mode."""
        self.instances.clear()
        self.enabled = self.pending
