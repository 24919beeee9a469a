"""The node of an agent, as its parts share it."""

from collections.abc import Mapping

import anyio
import msgspec

from metagpu.agent.paths import AgentPaths
from metagpu.agent.timing import AgentTiming
from metagpu.core.config.config import Config
from metagpu.core.config.memory import ComputeEnforcement, EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.backend import InstalledBackends
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.host import Host
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.layout.layout import Layout, pool_of
from metagpu.core.model.driver_roots import DriverRoots
from metagpu.core.model.gpu import GpuId
from metagpu.core.runtime.tasks import MainTasks
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
from metagpu.host.device_nodes import DeviceNodes, device_nodes
from metagpu.host.driver_roots import find_roots
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.plugins.http.address import ListenAddress


class ConfigInForce(msgspec.Struct, eq=False):
    """The configuration in force, and the layout that it gives on the present GPUs.

    The layout manager alone replaces them, both at once; all others read.
    """

    config: Config
    layout: Layout = Layout((), {}, ())

    def replace(self, config: Config, layout: Layout) -> None:
        """Put a configuration and its layout in force."""
        self.config, self.layout = config, layout


class Addresses(msgspec.Struct, frozen=True):
    """The addresses that the agent serves, `None` for what is not served."""

    metrics: ListenAddress | None = None
    status_api: ListenAddress | None = None
    page: ListenAddress | None = None

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports, by what they serve."""
        named = {"metrics": self.metrics, "status API": self.status_api, "page": self.page}
        return {name: address.port for name, address in named.items() if address}


class NodeContext(msgspec.Struct, frozen=True, eq=False):
    """The node of an agent: built first, and handed to each part.

    Attributes:
        node: the node's name.
        backends: those that a configuration may name.
        cluster_settings: the uses of the API server, `None` for none.
        main_tasks: keeps the tasks that serve the kubelet, and knows why one has ended.
        call_stats: the kubelet's calls.
        surveyed: set once NVML has been read for the first time.
        taken: set once this daemon has the node.
    """

    node: str
    registry: Registry
    driver: Driver
    host: Host
    programs: Programs
    daemons: Daemons
    paths: AgentPaths
    backends: InstalledBackends
    in_force: ConfigInForce
    cluster_settings: ClusterSettings | None
    addresses: Addresses
    timing: AgentTiming
    main_tasks: MainTasks
    call_stats: KubeletCallStats = msgspec.field(default_factory=KubeletCallStats)
    surveyed: anyio.Event = msgspec.field(default_factory=anyio.Event)
    taken: anyio.Event = msgspec.field(default_factory=anyio.Event)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.in_force.config

    @property
    def layout(self) -> Layout:
        """The layout that the configuration gives on these GPUs."""
        return self.in_force.layout

    def memory_enforcement(self, gpu: GpuId) -> MemoryEnforcement:
        """Return the memory settings of a GPU's pool; policy `off` for a GPU in no pool."""
        pool = pool_of(self.config, self.layout, gpu)
        return pool.memory_enforcement if pool else MemoryEnforcement(policy=EnforcementPolicy.OFF)

    def compute_enforcement(self, gpu: GpuId) -> ComputeEnforcement:
        """Return the compute settings of a GPU's pool; policy `off` for a GPU in no pool."""
        pool = pool_of(self.config, self.layout, gpu)
        return pool.compute_enforcement if pool else ComputeEnforcement()

    def find_roots(self) -> DriverRoots:
        """Look for the driver. Blocks."""
        return find_roots(self.paths.roots)

    def read_device_nodes(self) -> DeviceNodes:
        """Read the host's device nodes. Blocks."""
        return device_nodes(self.find_roots().dev)
