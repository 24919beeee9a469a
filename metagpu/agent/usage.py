"""The usage service, built for this node."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from anyio import to_thread

from metagpu.agent.layout_manager import LayoutManager
from metagpu.core.contracts.backend import InstalledBackends
from metagpu.core.contracts.capabilities import Guard, guard_of
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host
from metagpu.core.grants.injection import Injection
from metagpu.core.model.shares import Holder
from metagpu.core.usage.absent_containers import RunningHolders
from metagpu.core.usage.timing import UsageTiming
from metagpu.core.usage.usage_service import UsageService, enforcement_settings
from metagpu.plugins.kubelet import checkpoint


class _Guards(Mapping[str, Guard]):
    """The guard of each backend that was ever configured, by the backend's name."""

    def __init__(self, backends: InstalledBackends) -> None:
        self._backends = backends

    def __getitem__(self, name: str) -> Guard:
        return guard_of(self._backends.loaded[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends.loaded)

    def __len__(self) -> int:
        return len(self._backends.loaded)


async def running_holders(host: Host, holders: Collection[Holder]) -> Collection[Holder]:
    """Return those of some holders whose containers are seen to run."""
    return {it.holder for it in await host.cgroups(holders) if it.populated}


def build_usage_service(
    driver: Driver,
    host: Host,
    layout_manager: LayoutManager,
    backends: InstalledBackends,
    *,
    running: RunningHolders,
    timing: UsageTiming,
) -> UsageService:
    """Build the usage service; it follows the configuration in force."""
    return UsageService(
        driver,
        host,
        layout_manager.registry,
        lambda gpu: enforcement_settings(layout_manager.config, layout_manager.layout, gpu),
        _Guards(backends),
        running=running,
        read_allocated=partial(
            to_thread.run_sync,
            checkpoint.read_allocated_devices,
            layout_manager.paths.kubelet_dir,
        ),
        shows_one_answer=lambda: layout_manager.config.root.injection(Injection()).shows_one_answer,
        timing=timing,
    )
