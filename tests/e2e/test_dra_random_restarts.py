"""Pods with ResourceClaims of four backends come and go, while everything restarts at random."""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e.claims import shares
from tests.e2e.cluster import RESOURCE, Cluster
from tests.e2e.fake_node import DRIVER, capacity, dra_objects, exactly
from tests.e2e.instances import MigNode, mig_node
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.device_files import make_mig_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_both_fronts import (
    MPS,
    SETTLED_S,
    SLICED,
    STARTING,
    WHOLE,
    FrontsCrowd,
    Wanted,
)

ARRIVALS = int(os.environ.get("ARRIVALS") or 120)
"""500 by hand; 120 take a few minutes."""
PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
SHARED = f"""\
      - {{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100}}
      - {{backend: whole, resource: {WHOLE}}}
      - {{backend: timeslice, resource: {SLICED}, replicas: 4}}
"""
CLAIMS_ALONE = f"""\
version: metagpu/v1
pools:
  - name: mig
    gpus: {{index: 4}}
    fronts: [dra]
    backends: [{{backend: mig, profiles: [{", ".join(PROFILES)}], keepWarm: 1s}}]
  - name: shared
    fronts: [dra]
    backends:
{SHARED}"""
BOTH_FRONTS = f"""\
version: metagpu/v1
pools:
  - name: shared
    fronts: [device-plugin, dra]
    backends:
{SHARED}      - {{backend: mps, resource: {MPS}}}
"""
"""MIG devices have one front."""
GPUS = {
    CLAIMS_ALONE: "{model: a100-40gb, count: 4}, "
    "{model: a100-40gb, mig: true, provisioning: {duration: 100ms, computeDuration: 50ms}}",
    BOTH_FRONTS: "{model: a100-40gb, count: 4}",
}
MIG_GPU = 4
MAY_LOSE = 1 / 4
"""The part of pods with `limits` that a kubelet without a plugin may refuse: 11 of 57 were."""
BETWEEN = 10
"""Arrivals between two restarts, about."""
LONGEST_S = 240.0
"""For pods to settle after a restart: the kubelet asks again within 90 s at the latest."""


@pytest.fixture
def shared_node(
    node: Node, daemon: Daemon, account: tuple[str, ...], request: pytest.FixtureRequest
) -> Iterator[MigNode]:
    """Run the daemon with ResourceClaims alone or with both fronts."""
    cluster = Cluster(node, daemon)
    cluster.clear()
    make_mig_device_files(daemon.device_root, [MIG_GPU])
    try:
        with (
            dra_objects(cluster.kubectl),
            # The account's options have GPUs too, and the last ones count.
            mig_node(
                cluster,
                request.param,
                GPUS[request.param],
                *(*account, *daemon.simulate("")),
                driver=driver_of(cluster),
            ) as it,
        ):
            await_registered(cluster)
            yield it
            leave_nothing(cluster)
    finally:
        shutil.rmtree(daemon.device_root / "proc")
        shutil.rmtree(daemon.device_root / "dev" / "nvidia-caps")


def driver_of(cluster: Cluster) -> Path:
    """Return the file in which MIG devices outlive the daemon, and not a reboot."""
    return cluster.node.paths.home / "random-claims-driver.json"


def leave_nothing(cluster: Cluster) -> None:
    """Delete pods and claims while a daemon runs, after a failed test too.

    Without one the kubelet keeps a pod with a claim, and no later test could begin.
    """
    if not cluster.daemon.alive:
        with suppress(RigError):
            cluster.daemon.start_again()
    cluster.clear()
    cluster.kubectl("delete", "resourceclaims", "--all", "--all-namespaces")


def await_registered(cluster: Cluster) -> None:
    """Wait until the kubelet has the driver."""
    wait_for(
        "the driver to be registered",
        lambda: (cluster.daemon.status()["dra"] or {}).get("registered") is True,
        within_s=SETTLED_S,
    )


def restart_daemon(cluster: Cluster, end: str) -> None:
    """End the daemon by a signal, and start it again."""
    getattr(cluster.daemon, end)()
    cluster.daemon.start_again()


RESTARTS: dict[str, Callable[[Cluster], None]] = {
    "daemon, SIGTERM": lambda it: restart_daemon(it, "stop"),
    "daemon, SIGKILL": lambda it: restart_daemon(it, "kill"),
    "kubelet": lambda it: it.node.restart_kubelet(),
}


def restart_both(cluster: Cluster) -> None:
    """Kill the daemon, restart the kubelet meanwhile, and start the daemon again."""
    cluster.daemon.kill()
    cluster.node.restart_kubelet()
    cluster.daemon.start_again()


RESTARTS["both"] = restart_both


def reboot(cluster: Cluster) -> None:
    """Cut the node's power: CDI files and MIG devices are gone, the kubelet's account stays."""
    cluster.node.power_off()
    cluster.daemon.kill()
    for file in cluster.node.paths.cdi.iterdir():
        file.unlink()
    driver_of(cluster).unlink(missing_ok=True)
    cluster.daemon.start_again()
    cluster.node.power_on()


RESTARTS["node"] = reboot


def checked(crowd: FrontsCrowd) -> bool:
    """Check that nothing is held twice; a kubelet that has just started may not answer yet."""
    crowd.check()
    return True


class FourCrowd(FrontsCrowd):
    """Pods of both fronts, for four backends."""

    weights: ClassVar[Mapping[str, int]] = {"part": 6, "whole": 2, "time-slice": 4, "mps": 4}

    def draw(self) -> Wanted:
        """Return what the next pod wants of one of the backends."""
        (kind,) = self.chance.choices(list(self.weights), list(self.weights.values()))
        amount = self.chance.randint(10, 100)
        match kind:
            case "whole":
                return Wanted(kind, exactly("gpu", "gpu.metagpu.io"), WHOLE)
            case "time-slice":
                return Wanted(kind, exactly("gpu", "timeslice.metagpu.io"), SLICED)
            case "mps":
                request = exactly("gpu", "mps.metagpu.io", 1, capacity=capacity(shares=amount))
                return Wanted(kind, request, MPS, amount)
            case "mig":
                (profile,) = self.chance.choices(PROFILES, (8, 6, 4, 2))
                cel = f"device.attributes['{DRIVER}'].profile == '{profile}'"
                selectors = [{"cel": {"expression": cel}}]
                request = exactly("gpu", "mig.metagpu.io", 1, selectors=selectors)
                return Wanted(kind, request, "")
            case _:
                return Wanted(kind, shares(amount), RESOURCE, amount)


class ClaimsCrowd(FourCrowd):
    """Pods with ResourceClaims alone."""

    claims_part = 1.0
    weights: ClassVar[Mapping[str, int]] = {"part": 6, "whole": 2, "time-slice": 4, "mig": 6}


@pytest.mark.long
@pytest.mark.timeout(1800 + 15 * ARRIVALS)
@pytest.mark.parametrize(
    ("shared_node", "crowd_class", "kinds"),
    [
        pytest.param(CLAIMS_ALONE, ClaimsCrowd, sorted(RESTARTS), id="claims"),
        pytest.param(BOTH_FRONTS, FourCrowd, sorted(RESTARTS), id="both-fronts"),
        pytest.param(CLAIMS_ALONE, ClaimsCrowd, [], id="nothing-restarts"),
    ],
    indirect=["shared_node"],
)
def test_restarts_amid_random_claims(
    shared_node: MigNode,
    crowd_class: type[FourCrowd],
    kinds: Sequence[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Nothing is held twice, no claim stays refused, and all pods settle after each restart.

    Without a restart no claim is refused at all.
    """
    began, cluster = time.monotonic(), shared_node.cluster
    chance = random.Random(14)  # noqa: S311 - the same pods every time
    made: list[str] = []
    due = chance.randint(1, BETWEEN)
    with cluster.node.api() as api:
        crowd = crowd_class(shared_node, api, chance, log_from=len(cluster.daemon.log))
        crowd.settled_s = LONGEST_S
        while crowd.arrived < ARRIVALS:
            if kinds and crowd.arrived >= due:
                due += chance.randint(1, 2 * BETWEEN)
                how = kinds[len(made) % len(kinds)]  # each of them, however many there are
                made.append(how)
                RESTARTS[how](cluster)
                await_registered(cluster)
            pods = crowd.await_settled(STARTING)
            wait_for("the account", lambda: checked(crowd), within_s=SETTLED_S)
            crowd.change(pods)
        pods = crowd.await_settled()
        crowd.check()
        print(
            f"{crowd.arrived} arrivals and {len(made)} restarts in "
            f"{time.monotonic() - began:.0f} s, {dict(crowd.kinds)}; {len(crowd.waited)} waited; "
            f"refused {dict(crowd.lost)}, {crowd.refused_claims}; {made}"
        )
        record_property("refused", crowd.refused)
        assert set(made) == set(kinds)
        assert kinds or not crowd.refused_claims, crowd.refused_claims
        assert len(crowd.kinds) == len(crowd_class.weights) * (
            2 if crowd_class.claims_part < 1 else 1
        )
        crowd.leave(*pods)
        crowd.await_settled(gone=True)
    wait_for("leases to end", lambda: not cluster.daemon.status()["leases"], within_s=SETTLED_S)
    assert crowd.lost.total() <= MAY_LOSE * (ARRIVALS - len(crowd.claimed)), crowd.lost
