"""Parts of an agent: each is complete once it is built, and nobody sets anything on it."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Final

import pytest

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ALL_FEATURES, ClusterSettings, Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.agent import agent_at_work
from tests.rigs.waiting import becomes

PACKAGE: Final = Path(__file__).parents[2] / "metagpu"
ANY_PORT: Final = ListenAddress("127.0.0.1", 0)
ADAPTERS: Final = "metagpu.nvml.", "metagpu.host."
"""Packages whose classes keep records in one another: a thread's name, a reading under way."""
ALLOWED: Final[Mapping[str, str]] = {
    "self._bucket.burst": "a bucket of the publisher's own",
    "series.count": "a record of the recorder's own",
    "series.name": "a record of the recorder's own",
    "series.written": "a record of the recorder's own",
    "context.check_hostname": "a TLS context that the same function has made",
    "context.verify_flags": "a TLS context that the same function has made",
    "context.verify_mode": "a TLS context that the same function has made",
    "configuration.disable_strict_ssl_verification": "an object that the same function has made",
}
"""What agent/ and plugins/cluster/ set on other objects than `self`, and why that is no part."""


def full_settings(kubeconfig: Path | None = None) -> ClusterSettings:
    """Return settings with all features."""
    features = ALL_FEATURES | {Feature.JANITOR}
    return ClusterSettings("sim", kubeconfig, features=features, drain_on_driver_upgrade=True)


def full_agent() -> Agent:
    """Return an agent with all of its optional parts."""
    return Agent(
        ConfigSource(()),
        NvmlDriver(SimLibrary(build_node("t4:1"))),
        cluster_settings=full_settings(),
        metrics=ANY_PORT,
        status_address=ANY_PORT,
        web_address=ANY_PORT,
    )


def reachable(root: object) -> Iterator[object]:
    """Yield every object of ours that is reachable from one of them."""
    waiting, seen = [root], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        elif isinstance(found, partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, MethodType):
            waiting.append(found.__self__)
        elif isinstance(found, FunctionType):
            waiting += [cell.cell_contents for cell in found.__closure__ or ()]
        elif type(found).__module__.startswith("metagpu.") and not isinstance(found, type):
            yield found
            names = [*getattr(found, "__struct_fields__", ()), *getattr(found, "__dict__", ())]
            waiting += [getattr(found, name) for name in names]


@pytest.fixture
def set_from_outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of what is set on a part by other code than its own, from now on."""
    found: list[str] = []

    def record(self: object, name: str, value: object) -> None:
        caller = sys._getframe(1)
        if caller.f_locals.get("self") is not self and not name.startswith("__"):
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            found.append(f"{type(self).__name__}.{name} at {place}")
        object.__setattr__(self, name, value)

    for kind in {type(value) for value in reachable(full_agent())}:
        if kind.__module__.startswith(ADAPTERS):
            continue
        if kind.__setattr__ is object.__setattr__:
            monkeypatch.setattr(kind, "__setattr__", record)
    return found


def test_parts_are_found() -> None:
    """The walk reaches what is deep inside, as the parts of a connection to the API server."""
    names = {type(value).__name__ for value in reachable(full_agent())}

    assert {"LayoutManager", "HealthWatch", "EventRecorder", "LeaseFollower"} <= names
    assert len(names) > 60


def test_nothing_is_set_on_a_part_after_it_is_built(set_from_outside: list[str]) -> None:
    """An agent with all of its parts is built in order: each gets what it needs at once."""
    full_agent()

    assert sorted(set(set_from_outside)) == []


async def test_nothing_is_set_on_a_part_of_a_running_agent(
    tmp_path: Path, set_from_outside: list[str]
) -> None:
    """No part of a daemon at work writes an attribute of another one."""
    server = SimApiServer()
    server.add_node("sim")
    async with server.running():
        settings = full_settings(server.kubeconfig(tmp_path))
        async with agent_at_work(
            tmp_path, cluster_settings=settings, metrics=ANY_PORT, web_address=ANY_PORT
        ) as scene:
            await scene.until(20, 20)
            cluster: Any = scene.agent.cluster
            await becomes(lambda: cluster.report().connected)

    assert sorted(set(set_from_outside)) == []


def test_no_code_sets_an_attribute_of_a_part() -> None:
    """The agent and its parts write to `self` alone."""
    found = {
        ast.unparse(node)
        for folder in ("agent", "plugins/cluster")
        for file in (PACKAGE / folder).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }

    assert found == set(ALLOWED)
