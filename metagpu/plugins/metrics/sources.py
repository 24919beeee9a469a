"""Where the numbers come from: the parts of the daemon as monitoring sees them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from metagpu.core.census import Findings
from metagpu.core.figures import FigureKind
from metagpu.core.layout import Layout
from metagpu.core.registry import Registry
from metagpu.core.usage_report import Rules
from metagpu.plugins.record import KubeletRecord


class Configuration(msgspec.Struct, frozen=True):
    """The configuration in force, and what came of reading it.

    Attributes:
        forms: of its files.
        notes: how many settings of foreign files have no effect.
        good: whether what was read last is in force.
        taken: how often one was taken, `taken_at` when last, in seconds since the epoch.
        refused: how often one was refused; `refused_at` is 0 if never.
    """

    file: str
    forms: Sequence[str]
    profiles: Sequence[str]
    notes: int
    good: bool
    taken: int
    taken_at: float
    refused: int
    refused_at: float


class Driver(msgspec.Struct, frozen=True):
    """NVML: why it cannot be used, empty if it can; how many questions it never answered."""

    problem: str
    overdue: int


class Sources(msgspec.Struct, frozen=True):
    """What to ask for each page. Only `findings` waits: the rest is in memory.

    Attributes:
        kinds: what installed backends tell.
        findings: who is on the GPUs; callers of one second share a look.
        driver_limits: how many limits of memory the driver keeps.
        cluster: what `Cluster.report` says, `None` where no API server is used.
        ended: the main parts of the daemon that have ended, though it goes on.
    """

    registry: Registry
    kubelet: KubeletRecord
    kinds: Sequence[FigureKind]
    rules: Rules
    layout: Callable[[], Layout]
    findings: Callable[[], Awaitable[Findings]]
    configuration: Callable[[], Configuration]
    driver: Callable[[], Driver]
    driver_limits: Callable[[], int]
    cluster: Callable[[], Mapping[str, Any] | None]
    ended: Callable[[], Sequence[str]]
