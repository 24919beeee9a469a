"""The simulated node of `metagpu.testing`, with the built-in backends."""

from contextlib import AbstractAsyncContextManager

from metagpu.core.contracts.host import HostProcesses
from metagpu.core.contracts.programs import Daemons, Programs
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.backend_runner import RESTARTS
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.sim.machine.node import SimNode
from metagpu.testing import node as testing_node
from metagpu.testing.node import BackendRig
from tests.rigs.build import BACKENDS

__all__ = ("BackendRig", "run_backends")


def run_backends(
    text: str,
    *,
    gpu_models: str = "a100-40gb:2",
    mig_enabled: bool = False,
    node: SimNode | None = None,
    injection: Injection | None = None,
    programs: Programs | None = None,
    daemons: Daemons | None = None,
    host: HostProcesses | None = None,
    timing: RestartTiming = RESTARTS,
    unread: bool = False,
) -> AbstractAsyncContextManager[BackendRig]:
    """Run built-in backends on a simulated node while the block lasts."""
    return testing_node.run_backends(
        text,
        BACKENDS,
        gpu_models=gpu_models,
        mig_enabled=mig_enabled,
        node=node,
        injection=injection,
        programs=programs,
        daemons=daemons,
        host=host,
        timing=timing,
        unread=unread,
    )
