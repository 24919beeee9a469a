"""The usage service, built for this node."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from anyio import to_thread

from metagpu.agent.context import NodeContext
from metagpu.core.contracts.backend import InstalledBackends
from metagpu.core.contracts.capabilities import MemoryGuard, guard_of
from metagpu.core.contracts.host import Host
from metagpu.core.grants.injection import Injection
from metagpu.core.model.shares import Holder
from metagpu.core.usage.lease_differences import RunningHolders
from metagpu.core.usage.usage_service import UsageService
from metagpu.plugins.kubelet import checkpoint


class _Guards(Mapping[str, MemoryGuard]):
    """The guard of each backend that was ever configured, by the backend's name."""

    def __init__(self, backends: InstalledBackends) -> None:
        self._backends = backends

    def __getitem__(self, name: str) -> MemoryGuard:
        return guard_of(self._backends.loaded[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends.loaded)

    def __len__(self) -> int:
        return len(self._backends.loaded)


async def running_holders(host: Host, holders: Collection[Holder]) -> Collection[Holder]:
    """Return those of some holders whose containers are seen to run."""
    return {it.holder for it in await host.cgroups(holders) if it.populated}


def build_usage_service(context: NodeContext, running: RunningHolders) -> UsageService:
    """Build the usage service; it follows the configuration in force."""
    return UsageService(
        context.driver,
        context.host,
        context.registry,
        context.memory_enforcement,
        _Guards(context.backends),
        running=running,
        read_allocated=partial(
            to_thread.run_sync, checkpoint.read_allocated_devices, context.paths.kubelet_dir
        ),
        shows_one_answer=lambda: context.config.root.injection(Injection()).shows_one_answer,
        timing=context.timing.usage,
    )
