"""Timing of the agent and of the parts it builds."""

import msgspec

from metagpu.agent.cdi_file import CdiTiming
from metagpu.agent.config_watch import ConfigWatchTiming
from metagpu.core.health.watch import HealthTiming
from metagpu.core.layout.turns import TurnTiming
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.core.usage.timing import UsageTiming
from metagpu.plugins.http.address import HttpTiming
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.plugins.metrics.sources import MetricsTiming
from metagpu.plugins.pod_api.socket import PodApiTiming


class ExchangeTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        poll: between two attempts of a daemon that is ready to get the node.
        look: between two looks at what keeps a daemon from being ready.
        report: for which it is kept from being ready, before an Event says so.
        alone: for which nobody has the node, before a daemon that is not ready takes it: one that
            has crashed is back before.
        least: from the last pod that was admitted, and from the Node's amounts at 0, to the end,
            where the API server lists pods: the scheduler goes by the old amounts for a while, on
            a busy machine for longer. A kubelet raises them again every 10 s.
        most: the longest time from the withdrawal to the end; a busy kubelet admits after seconds.
    """

    poll: float = 0.02
    look: float = 0.2
    report: float = 3.0
    alone: float = 5.0
    least: float = 1.0
    most: float = 15.0


class AgentTiming(msgspec.Struct, frozen=True):
    """Seconds of the agent and of the parts it owns.

    Attributes:
        first_leases: the longest wait for the kubelet's checkpoint, or its list of leases, before
            the first lists, which offer nothing until then. A kubelet that is up answers at once.
        first_registration: the longest wait for the kubelet's first answer before `mgctl` is served
            in containers.
        device_nodes: between two scans of the host's device nodes. Some come late: nvidia-uvm's
            node comes with the first CUDA program.
        main_tasks: restarts of main tasks that end.
        turns: the turns of backends that share idle GPUs.
        exchange: of the exchange of two daemons.
        config_watch, cdi, kubelet, usage, health, http, metrics, pod_api: timing of the
            agent's parts.
    """

    first_leases: float = 1.0
    first_registration: float = 1.0
    main_tasks: RestartTiming = RestartTiming()
    turns: TurnTiming = TurnTiming()
    exchange: ExchangeTiming = ExchangeTiming()
    device_nodes: float = 10.0
    config_watch: ConfigWatchTiming = ConfigWatchTiming()
    cdi: CdiTiming = CdiTiming()
    kubelet: KubeletTiming = KubeletTiming()
    usage: UsageTiming = UsageTiming()
    health: HealthTiming = HealthTiming()
    http: HttpTiming = HttpTiming()
    metrics: MetricsTiming = MetricsTiming()
    pod_api: PodApiTiming = PodApiTiming()
