"""The settings of enforcement in a pool: of memory, and of compute."""

from enum import StrEnum
from typing import Final

import msgspec

from metagpu.core.config.units import Bytes, Duration
from metagpu.core.model.gpu import MIB

LIMIT_PREFIX: Final = "gpu-mem-limit."
"""Prefix of the annotation with a pod's own limit; the resource's name follows."""


class EnforcementPolicy(StrEnum):
    """The steps of enforcement; each one includes the step before."""

    OFF = "off"
    REPORT = "report"
    WARN = "warn"
    KILL = "kill"


class ComputePolicy(StrEnum):
    """The steps where a container takes more of a GPU's time than its shares give."""

    OFF = "off"
    REPORT = "report"


class VictimSelection(StrEnum):
    """The processes of a container that are ended to free memory."""

    LARGEST = "largest"
    ALL = "all"


class AnnotationKind(StrEnum):
    """The settings that a pod may change by annotation (`core/usage/annotations`)."""

    LIMIT = "limit"
    POLICY = "policy"


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The lending of GPU memory: containers use more than their shares for a while.

    Attributes:
        limit: bytes of each GPU that a container without an annotation may use; `None` for all.
        reserve: bytes of each GPU to keep free for pods that use less than they have requested;
            `None` for all that they have requested and do not use.
    """

    limit: Bytes | None = None
    reserve: Bytes | None = None

    def __post_init__(self) -> None:
        if self.reserve == 0:
            raise ValueError("reserve must be more than 0: nobody would give memory back")


SHORTEST_PERIOD: Final = 0.01
"""Seconds: a daemon that checks more often does nothing else."""


class MemoryEnforcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The memory enforcement of a pool's GPUs.

    Attributes:
        policy: an `EnforcementPolicy`; YAML reads an unquoted `off` as false, which means `off`.
        headroom: bytes of each GPU that a container may use beyond its shares. CUDA reserves some
            hundred MiB in every process, which a program cannot change.
        grace: seconds above the limit before a process of the container is ended.
        stop_timeout: seconds from SIGTERM to SIGKILL.
        victims: whether as many of the largest processes are ended as cover the excess, or all.
        period: seconds in which the processes are checked once, at a random moment.
        dry_run: whether signals are only logged, and not sent.
        driver_limits: whether the driver's own memory limits are set too, where the driver has
            them and the policy is `kill`.
        allow_annotations: the settings that pods may change.
        burst: how memory is lent; `None` where a container's limit is that of its shares.
    """

    policy: EnforcementPolicy | bool = EnforcementPolicy.WARN
    headroom: Bytes = Bytes(512 * MIB)
    grace: Duration = Duration(0.5)
    stop_timeout: Duration = Duration(0.5)
    victims: VictimSelection = VictimSelection.LARGEST
    period: Duration = Duration(0.5)
    dry_run: bool = False
    driver_limits: bool = True
    allow_annotations: tuple[AnnotationKind, ...] = ()
    burst: Burst | None = None

    def __post_init__(self) -> None:
        _read_policy(self, EnforcementPolicy)
        if self.period < SHORTEST_PERIOD:
            raise ValueError("period must be 10 ms or more")
        if self.burst is not None and self.policy is not EnforcementPolicy.KILL:
            raise ValueError(
                f"burst needs `policy: kill`: with `{self.policy}` nobody gives memory back; write "
                "`policy: kill`, or leave burst out"
            )

    @property
    def needs_watch(self) -> bool:
        """True if processes must be checked all the time."""
        return self.is_active or AnnotationKind.POLICY in self.allow_annotations

    @property
    def is_active(self) -> bool:
        """True if an excess is reported or ended without an annotation."""
        return self.policy in {EnforcementPolicy.WARN, EnforcementPolicy.KILL}

    @property
    def in_force(self) -> str:
        """The policy as it acts: `dry-run` sends no signal, `burst` lends memory."""
        ends_nothing = self.policy is EnforcementPolicy.KILL and self.dry_run
        return "dry-run" if ends_nothing else "burst" if self.burst else str(self.policy)

    @property
    def uses_driver_limits(self) -> bool:
        """True if the driver refuses memory beyond the limit.

        Only where processes may be ended, too.
        """
        return self.policy is EnforcementPolicy.KILL and self.driver_limits and not self.dry_run


class ComputeEnforcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The compute enforcement of a pool's GPUs.

    Attributes:
        policy: a `ComputePolicy`; YAML reads an unquoted `off` as false, which means `off`.
        window: seconds for which a container takes more than its shares give until it is reported.
    """

    policy: ComputePolicy | bool = ComputePolicy.OFF
    window: Duration = Duration(300)

    def __post_init__(self) -> None:
        _read_policy(self, ComputePolicy)
        if self.window <= 0:
            raise ValueError("window must be longer than 0")


def _read_policy(
    settings: MemoryEnforcement | ComputeEnforcement,
    policies: type[EnforcementPolicy] | type[ComputePolicy],
) -> None:
    """Take false for `off`, as YAML reads it.

    Raises:
        ValueError: the policy is true.
    """
    if settings.policy is True:
        raise ValueError(f"policy is no switch; allowed: {', '.join(policies)}")
    if settings.policy is False:
        msgspec.structs.force_setattr(settings, "policy", policies.OFF)
