"""The settings of memory enforcement in a pool."""

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


class VictimSelection(StrEnum):
    """The processes of a container that are ended to free memory."""

    LARGEST = "largest"
    ALL = "all"


class AnnotationKind(StrEnum):
    """The settings that a pod may change by annotation (`core/usage/annotations`)."""

    LIMIT = "limit"
    POLICY = "policy"


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

    def __post_init__(self) -> None:
        if self.policy is True:
            raise ValueError(f"policy is no switch; allowed: {', '.join(EnforcementPolicy)}")
        if self.policy is False:
            msgspec.structs.force_setattr(self, "policy", EnforcementPolicy.OFF)
        if self.period <= 0:
            raise ValueError("period must be longer than 0")

    @property
    def needs_watch(self) -> bool:
        """True if processes must be checked all the time."""
        return self.is_active or AnnotationKind.POLICY in self.allow_annotations

    @property
    def is_active(self) -> bool:
        """True if an excess is reported or ended without an annotation."""
        return self.policy in {EnforcementPolicy.WARN, EnforcementPolicy.KILL}

    @property
    def uses_driver_limits(self) -> bool:
        """True if the driver refuses memory beyond the limit.

        Only where processes may be ended, too.
        """
        return self.policy is EnforcementPolicy.KILL and self.driver_limits and not self.dry_run
