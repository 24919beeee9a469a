"""Asks NVML who is on a GPU, and the host who that is."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import time

import anyio

from metagpu.core.driver import Driver
from metagpu.core.errors import DriverError
from metagpu.core.gpu import GpuId
from metagpu.core.host import Host, Identity, Particulars
from metagpu.core.registry import Registry
from metagpu.core.usage import NOTHING_TOLD, Account, Told, account


@dataclass(slots=True)
class Findings:
    """All GPUs at about one moment, with what people want to know.

    Attributes:
        at: when, in seconds since the epoch.
        accounts: in the order of the GPUs; one that could not be asked has an empty one.
        failures: why a GPU could not be asked.
        busy: of each GPU, how busy its processes keep it in percent, by pid; a GPU that does not
            say is not in it.
        hints: what keeps us from knowing whose processes are whose.
    """

    at: float = 0.0
    accounts: Mapping[GpuId, Account] = field(default_factory=dict)
    failures: dict[GpuId, str] = field(default_factory=dict)
    busy: dict[GpuId, Mapping[int, int]] = field(default_factory=dict)
    particulars: Mapping[Identity, Particulars] = field(default_factory=dict)
    hints: Sequence[str] = ()


class Census:
    """Finds out who is on a GPU.

    Attributes:
        told: what containers that are older than this daemon were told.
    """

    def __init__(self, driver: Driver, host: Host, registry: Registry) -> None:
        self.told: Told = NOTHING_TOLD
        self._driver = driver
        self._host = host
        self._registry = registry

    async def account(self, gpu: GpuId) -> Account:
        """Give everybody who is on a GPU now.

        Raises:
            DriverError: if NVML does not say.
        """
        processes = await self._driver.processes(gpu)
        identities = await self._host.identify({process.pid for process in processes})
        containers = {who.container for who in identities.values() if who.container}
        names = await self._host.holders(containers)
        return account(self._registry.snapshot.gpus[gpu], processes, identities, names, self.told)

    async def take(self) -> Findings:
        """Look at all GPUs at once, and at the particulars of who is there."""
        gpus = tuple(self._registry.snapshot.gpus)
        findings = Findings(at=time(), hints=await self._host.hints())
        accounts = {gpu: Account(gpu) for gpu in gpus}

        async def look(gpu: GpuId) -> None:
            try:
                accounts[gpu] = await self.account(gpu)
                busy = await self._driver.utilisation(gpu)
            except DriverError as error:
                findings.failures[gpu] = str(error)
            else:
                if busy is not None:
                    findings.busy[gpu] = busy

        async with anyio.create_task_group() as group:
            for gpu in gpus:
                group.start_soon(look, gpu)

        findings.accounts = accounts
        findings.particulars = await self._host.describe(_everybody(accounts.values()))
        return findings


class Looks:
    """Gives any number of callers findings of late, by one look at a time.

    Who asks in between waits for that look, or has the last one: so the node's work does not grow
    with the number of callers.

    Args:
        census: looks.
        age: seconds for which findings are of late.
    """

    def __init__(self, census: Census, age: float = 0.9) -> None:
        self._census = census
        self._age = age
        self._findings: Findings | None = None
        self._until = 0.0
        self._looking = anyio.Lock()

    async def latest(self) -> Findings:
        """Give findings that are not older than `age`."""
        async with self._looking:
            if self._findings is None or anyio.current_time() >= self._until:
                self._findings = await self._census.take()
                self._until = anyio.current_time() + self._age
            return self._findings


def _everybody(accounts: Collection[Account]) -> Collection[Identity]:
    housed = (process for it in accounts for usage in it.usages for process in usage.processes)
    strangers = (stranger.process for it in accounts for stranger in it.strangers)
    return {process.who for those in (housed, strangers) for process in those if process.who}
