"""The drivers that must keep the contract: the simulator always, a real GPU with `-m gpu`."""

import pytest

from metagpu.core.driver import Driver
from metagpu.nvml import Nvml
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated

NODES = ("a100-40gb:8", "v100-16gb:1,t4:1,l40s:1,a30:1,h100-80gb:1,h200:1,b200:4")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in full what was not held against the contract: a letter is no answer."""
    reasons = {str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")}
    for reason in sorted(reasons):
        terminalreporter.write_line(reason)


@pytest.fixture(params=[*NODES, pytest.param("real", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    """Give a driver with healthy GPUs; tests only read, so a real one stays as it is."""
    if request.param == "real":
        return Nvml()
    return Nvml(Library(simulated(request.param)))
