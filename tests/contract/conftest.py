"""The drivers under the contract: the simulator always, a real GPU with `-m gpu`."""

import pytest

from metagpu.core.contracts.driver import Driver
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE

NODES = ("a100-40gb:8", "v100-16gb:1,t4:1,l40s:1,a30:1,h100-80gb:1,h200:1,b200:4,rtx-pro-6000:1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reason of each skipped test in full."""
    reasons = {str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")}
    for reason in sorted(reasons):
        terminalreporter.write_line(reason)


@pytest.fixture(params=[*NODES, pytest.param("real", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    """Return a driver with healthy GPUs; tests only read, so a real one stays unchanged."""
    if request.param == "real":
        return NvmlDriver()
    return NvmlDriver(SimLibrary(build_node(request.param)), DEADLINE)
