"""The steps and the judgement that are the same beside a simulated and a real kubelet.

`rig` has the simulated one, `tests/e2e/chaos.py` the real one.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

import anyio
from anyio import to_thread

from metagpu.core.errors import MetagpuError
from metagpu.plugins.control.client import send_request
from metagpu.sim.apiserver.objects import Object
from tests.chaos.account import BY_HAND, Account, Holding
from tests.chaos.node import BACKENDS, CLAIMS, CLASSES, CONFIGURATIONS, MIG, MISSING
from tests.chaos.steps import FATAL_XIDS, Step

SERVED_S: Final = 90.0
"""Seconds in which a quiet node has all on offer: what docs/leases.md lets leases last, on a busy
machine."""


@dataclass(kw_only=True)
class Chaos(ABC):
    """A node, and what befalls it.

    Attributes:
        run_folder: of the daemons.
        unsure: GPUs of which no daemon has acknowledged whether they are cordoned.
        by_hand: placements of the MIG instances of an administrator.
        forgotten: pods of which the kubelet has lost what they hold.
        probe_s: seconds in which a pod that fits runs, and a pod that is deleted has gone.
        log: what happened.
    """

    account: Account
    run_folder: Path
    configuration: str = "all"
    unsure: set[int] = field(default_factory=set)
    by_hand: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    number: int = 0
    probe_s: float = 30.0
    log: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    # ---- what differs ------------------------------------------------------------------------

    @abstractmethod
    async def see(self) -> None:
        """Take over what is seen now, after a short pause."""

    @abstractmethod
    def pods(self) -> Collection[Object]:
        """Return the pods that the API server has."""

    @abstractmethod
    def allocatable(self) -> Mapping[str, int]:
        """Return how many healthy devices of each resource the kubelet has."""

    @abstractmethod
    async def create(self, kind: str, name: str, content: Object) -> None:
        """Create a pod or a ResourceClaim."""

    @abstractmethod
    async def end(self, pod: Object) -> None:
        """Delete a pod."""

    @abstractmethod
    async def configure(self, text: str) -> None:
        """Write a configuration and have it read."""

    @abstractmethod
    async def rest(self) -> None:
        """Bring up all that is down, and `calm` the node."""

    # ---- steps -------------------------------------------------------------------------------

    async def run(self, steps: Iterable[Step]) -> None:
        """Make the steps, and judge the node at rest after the last one."""
        await self.until(lambda: self._amounts(()) == self.expected(()), SERVED_S)
        for step in steps:
            self.note(f"> {step}")
            await getattr(self, f"do_{step.what}")(**step.given)
            await anyio.sleep(step.pause)
            await self.see()
            if self.account.broken:
                return
        self.note("> quiet, with all pods")
        await self.do_quiet()
        if not self.account.broken:
            self.note("> quiet, after the last pod")
            for pod in list(self.pods()):
                await self.end(pod)
            await self.do_quiet()

    async def do_pod(self, resource: str, size: int, shape: str) -> None:
        """Create a pod; the scheduler binds it when it fits by the Node's amounts."""
        half = max(1, size // 2)
        shapes = {
            "one": ((), (size,)),
            "two": ((), (half, half)),
            "init": ((("once", half),), (size,)),
            "sidecar": ((("Always", half),), (half,)),
            "many": ((("Always", half), ("once", half), ("Always", half)), (half, half)),
        }
        first, main = shapes[shape]
        await self._create_pod(self._name(), resource, first, main)

    async def _create_pod(
        self, name: str, resource: str, first: Iterable[tuple[str, int]], main: Iterable[int]
    ) -> None:
        def container(name: str, count: int) -> Object:
            counts = {resource: str(count)}
            return {"name": name, "resources": {"limits": counts, "requests": counts}}

        before = [
            {**container(f"init-{n}", count), "restartPolicy": policy}
            for n, (policy, count) in enumerate(first)
        ]
        after = [container(f"main-{n}", count) for n, count in enumerate(main)]
        spec = {"initContainers": before, "containers": after}
        await self.create("pods", name, {"spec": spec, "status": {"phase": "Pending"}})

    async def do_claim(self, kind: str, size: int) -> None:
        """Create a ResourceClaim and its pod."""
        name = self._name()
        request: Object = {"deviceClassName": CLASSES[kind], "count": 1}
        if kind == "fraction":
            request["capacity"] = {"requests": {"shares": str(size)}}
        devices = {"requests": [{"name": "gpu", "exactly": request}]}
        await self.create("resourceclaims", name, {"spec": {"devices": devices}, "status": {}})
        containers = [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}]
        used = [{"name": "gpu", "resourceClaimName": name}]
        spec = {"resourceClaims": used, "containers": containers}
        await self.create("pods", name, {"spec": spec, "status": {"phase": "Pending"}})

    def _name(self) -> str:
        self.number += 1
        return f"pod-{self.number}"

    async def do_end(self, number: int) -> None:
        """Delete a pod; its kubelet ends it when it runs."""
        if pods := list(self.pods()):
            await self.end(pods[number % len(pods)])

    async def do_reload(self, to: str) -> None:
        """Write a configuration and have it read."""
        await self.configure(CONFIGURATIONS[to])
        if to != "wrong":
            self.configuration = to

    async def do_cordon(self, gpu: int) -> None:
        """Cordon a GPU; it counts once the daemon has said so."""
        if await self.ask({"command": "cordon", "gpu": str(gpu), "reason": "chaos"}):
            self.account.cordoned.add(gpu)
        else:
            self.unsure.add(gpu)

    async def do_uncordon(self, gpu: int) -> None:
        """End the cordon of a GPU."""
        self.account.cordoned.discard(gpu)
        if not await self.ask({"command": "uncordon", "gpu": str(gpu)}):
            self.unsure.add(gpu)

    async def do_xid(self, gpu: int, code: int) -> None:
        """Report an XID; after one that is fatal the driver asks for a reset."""
        if await self.sim({"do": "xid", "gpu": str(gpu), "code": code}) and code in FATAL_XIDS:
            self.account.lost[gpu] = time.monotonic()

    async def do_lose(self, gpu: int) -> None:
        """Drop a GPU off the bus, until it is reset or its simulation starts again."""
        if await self.sim({"do": "lose", "gpu": str(gpu)}):
            self.account.lost[gpu] = time.monotonic()

    async def do_reset(self, gpu: int) -> None:
        """Reset a GPU."""
        if await self.sim({"do": "reset", "gpu": str(gpu)}):
            self.account.lost.pop(gpu, None)

    async def do_provisioning(self, **faults: int) -> None:
        """Make the driver fail at its next changes of MIG instances."""
        await self.sim({"do": "provisioning", "gpu": str(MIG), **faults})

    async def do_instance(self, placement: str) -> None:
        """Create a MIG instance as an administrator does, beside a daemon that runs."""
        by_hand = {"do": "instance", "gpu": str(MIG), "placement": placement}
        if self.answers() and await self.sim({**by_hand, "change": "create"}):
            self.by_hand.add(placement)

    # ---- rest --------------------------------------------------------------------------------

    async def do_quiet(self) -> None:
        """Bring everything up, wait for the amounts, and give each resource a pod that fits."""
        await self.rest()
        await self.judge()

    async def judge(self) -> None:
        """Judge the amounts of a node at rest, and what pods get there."""
        if not await self.until(lambda: not self._unsettled(), SERVED_S):
            pods = self._unsettled()
            self.account.add(f"after {SERVED_S:.0f} s of quiet, {pods} neither run nor have ended")
        if self.account.broken:
            return
        missing = MISSING[self.configuration]
        if wrong := await self._wrong_amounts(missing):
            self.account.add(wrong)
            return
        self.note("  the amounts are right")
        if not any(_phase(pod) == "Pending" for pod in self.pods()):
            await self._probe(missing)

    async def calm(self) -> None:
        """Delete what the kubelet forgot, end all faults of GPUs, and wait for every pod."""
        await self.delete_forgotten()
        await self.until(self.answers, 60)
        for gpu in list(self.account.lost):
            await self.do_reset(gpu)
        await self.do_provisioning()
        while self.by_hand:
            by_hand = {"do": "instance", "gpu": str(MIG), "placement": self.by_hand.pop()}
            await self.sim({**by_hand, "change": "destroy"})
        for gpu in list(self.unsure):
            with anyio.move_on_after(self.probe_s):
                while gpu not in self.account.cordoned:  # an end needs a cordon
                    await self.do_cordon(gpu)
                    await anyio.sleep(0.2)
            await self.do_uncordon(gpu)
            self.unsure.discard(gpu)
        await self.until(lambda: not self._unsettled(), SERVED_S)
        self.note("  all that runs has settled")

    def _unsettled(self) -> list[str]:
        """Return the pods that are bound and neither run nor have failed, or that shall end.

        One whose claim is of a GPU that was cordoned since then waits for the end of the cordon.
        """
        return [
            pod["metadata"]["name"]
            for pod in self.pods()
            if "deletionTimestamp" in pod["metadata"]
            or (
                pod["spec"].get("nodeName")
                and _phase(pod) == "Pending"
                and not (claims(pod) and CLAIMS in self.account.cordoned)
            )
        ]

    def _amounts(self, missing: Iterable[str]) -> dict[str, int]:
        amounts = self.allocatable()
        turns = self.configuration == "turns"
        gone = [name for name in missing if amounts.get(name) and not turns]
        return {name: amounts.get(name, 0) for name in (*self.expected(missing), *gone)}

    def expected(self, missing: Iterable[str]) -> dict[str, int]:
        """Compute the amounts that the kubelet must have."""
        return self.account.healthy(frozenset(missing))

    async def _wrong_amounts(self, missing: Collection[str]) -> str:
        """Wait until the kubelet's lists are right; return what is wrong with them."""
        if await self.until(lambda: self._amounts(missing) == self.expected(missing), SERVED_S):
            return ""
        expected, found = self.expected(missing), self._amounts(missing)
        wrong = [
            f"{count} of {name}, not {expected.get(name, 'its removal')}"
            for name, count in found.items()
            if count != expected.get(name)
        ]
        return f"the kubelet has, after {SERVED_S:.0f} s of quiet, {wrong}"

    async def _probe(self, missing: Collection[str]) -> None:
        """Create a pod that fits in each pool, of another resource each time; then end them."""
        fits = {
            name: count
            for name in self.expected(missing)
            if (count := self.account.largest_request(name))
        }
        chosen = dict[object, str]()
        for name in sorted(fits, key=lambda name: (crc32(name.encode()) + self.number) % 9):
            chosen.setdefault(BACKENDS.get(name, (0, MIG))[1], name)
        probes = {}
        for resource in chosen.values():
            name = self._name()
            probes[name] = f"{fits[resource]} {resource}"
            await self._create_pod(name, resource, (), (fits[resource],))
        if count := self.account.claimable():
            await self.do_claim("fraction", count)
            probes[f"pod-{self.number}"] = f"a claim for {count} shares"
        await self.until(lambda: self._settled(probes), self.probe_s)
        for name, what in probes.items():
            pod = self.named()[name]
            if _phase(pod) != "Running":
                self.account.add(f"{name} with {what} fits and is {pod['status']}")
            await self.end(pod)
        await self.until(lambda: self.named().keys().isdisjoint(probes), self.probe_s)
        if wrong := await self._wrong_amounts(missing):
            self.account.add(f"after pods with {list(probes.values())}: {wrong}")

    def _settled(self, names: Iterable[str]) -> bool:
        pods = self.named()
        return all(name in pods and _phase(pods[name]) != "Pending" for name in names)

    def named(self) -> dict[str, Object]:
        """Return the pods that the API server has, by name."""
        return {pod["metadata"]["name"]: pod for pod in self.pods()}

    async def delete_forgotten(self) -> None:
        """Delete the pods that a kubelet forgot, before a daemon may forget them too."""
        for name, pod in self.named().items():
            if name in self.forgotten:
                await self.end(pod)
        await self.until(lambda: self.forgotten.isdisjoint(self.account.names.values()), 60)
        self.forgotten.clear()

    # ---- the account and the daemon ----------------------------------------------------------

    def saw(self, running: Mapping[str, tuple[str, set[Holding]]]) -> None:
        """Add the pods that run to the account, with what they hold, by uid."""
        by_hand = {Holding(MIG, "mig", place) for place in self.by_hand}
        self.account.pods.pop(BY_HAND, None)
        self.account.saw({**running, BY_HAND: (BY_HAND, by_hand)})

    def answers(self) -> bool:
        """Return whether a daemon has its control socket."""
        return (self.run_folder / "metagpu.sock").exists()

    async def sim(self, change: Mapping[str, object]) -> bool:
        """Change the simulated GPUs; return whether it is done."""
        return await self.ask({"command": "sim", "change": change})

    async def ask(self, request: Mapping[str, object]) -> bool:
        """Ask the daemon; return whether it did so."""
        try:
            await to_thread.run_sync(lambda: send_request(self.run_folder, request, 5.0))
        except (MetagpuError, OSError, ValueError):
            return False
        return True

    # ---- waiting -----------------------------------------------------------------------------

    async def until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so; return whether it is."""
        with anyio.move_on_after(seconds):
            await self.see()
            while not (self.account.broken or is_so()):
                await self.see()
            return True
        return False

    def note(self, line: str) -> None:
        """Add a line to the story."""
        self.log.append(f"{time.monotonic() - self.began:6.1f} {line}")


def _phase(pod: Object) -> str:
    return str(pod["status"]["phase"])


def claims(pod: Object) -> bool:
    """Return whether a pod has ResourceClaims."""
    return bool(pod["spec"].get("resourceClaims"))
