"""What can be done to a simulated node while it runs: the commands of `metagpu sim`.

A command is a value that goes over any wire as JSON (`AnyCommand`); `steer` does it.
"""

import time
from typing import Literal, TypeAlias

import msgspec

from metagpu.sim import cutting, foreign, instances
from metagpu.sim.bounds import (
    MOST_ERRORS,
    MOST_FAILURES,
    MOST_PIDS,
    MOST_XIDS,
    check_instance,
    check_time,
    within,
)
from metagpu.sim.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.host import cgroup_of
from metagpu.sim.node import SimNode
from metagpu.sim.spec import board, recovery_action
from metagpu.sim.view import NodeView, describe

__all__ = ["AnyCommand", "Reply", "steer"]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do"):
    """Something to do; a `gpu` is an index or a uuid, an amount of memory is in bytes."""

    def apply(self, node: SimNode) -> str:
        """Do it, and say in a line what was done.

        Raises:
            SimError: if the node has no such GPU or process, or no memory for it.
            ConfigError: if there is no such board or recovery action.
        """
        raise NotImplementedError


class Xid(Command, frozen=True, tag="xid"):
    """Have the driver report an XID, inside a MIG instance if one is named."""

    gpu: str
    code: int
    gi: int | None = None
    ci: int | None = None

    def apply(self, node: SimNode) -> str:
        within("the XID", self.code, 1, MOST_XIDS)
        check_instance(self.gi, self.ci)
        gpu = node.gpu(self.gpu)
        node.raise_xid(gpu, self.code, self.gi, self.ci)
        return f"XID {self.code} on GPU {self.gpu}{_inside(gpu, self.gi)}"


class Lose(Command, frozen=True, tag="lose"):
    """Let a GPU fall off the bus, without a word."""

    gpu: str

    def apply(self, node: SimNode) -> str:
        node.lose(node.gpu(self.gpu))
        return f"GPU {self.gpu} is lost"


class Need(Command, frozen=True, tag="need"):
    """Have a GPU want a recovery action, such as gpu-reset."""

    gpu: str
    action: str

    def apply(self, node: SimNode) -> str:
        action = recovery_action(self.action)
        node.need(node.gpu(self.gpu), action)
        return f"GPU {self.gpu} needs: {action}"


class Recover(Command, frozen=True, tag="recover"):
    """Reset a GPU: it answers again and needs nothing."""

    gpu: str

    def apply(self, node: SimNode) -> str:
        node.recover(node.gpu(self.gpu))
        return f"GPU {self.gpu} was reset and is well"


class Process(Command, frozen=True, tag="process"):
    """Start or end a process on a GPU; without an amount, the driver does not say how large."""

    change: Literal["add", "end"]
    gpu: str
    pid: int
    memory: int | None = None
    gi: int | None = None
    ci: int | None = None
    sm: int = 0

    def apply(self, node: SimNode) -> str:
        gpu = node.gpu(self.gpu)
        if self.change == "end":
            node.end_process(gpu, self.pid)
            return f"process {self.pid} is off GPU {self.gpu}"

        within("the pid", self.pid, 1, MOST_PIDS)
        within("--sm", self.sm, 0, 100)
        check_instance(self.gi, self.ci)
        cgroup = cgroup_of(self.pid)
        node.add_process(
            gpu, SimProcess(self.pid, self.memory, self.gi, self.ci, sm=self.sm, cgroup=cgroup)
        )
        return f"process {self.pid} is on GPU {self.gpu}{_inside(gpu, self.gi)}"


class Mig(Command, frozen=True, tag="mig"):
    """Turn MIG on or off as nvidia-smi does; before Hopper it waits for a reset."""

    change: Literal["on", "off"]
    gpu: str

    def apply(self, node: SimNode) -> str:
        enabled = self.change == "on"
        with node.changed:
            gpu = node.gpu(self.gpu)
            if not gpu.board.mig:
                raise SimError(f"GPU {self.gpu} is a {gpu.board.key}, which has no MIG")
            cutting.set_mode(gpu, enabled=enabled)
            if gpu.mig.enabled != enabled:
                return f"MIG of GPU {self.gpu} will be {self.change} after a reset"
        return f"MIG of GPU {self.gpu} is {self.change}"


class Instance(Command, frozen=True, tag="instance"):
    """Make or destroy a MIG instance as somebody else would; a place is PROFILE@START."""

    change: Literal["make", "end"]
    gpu: str
    place: str

    def apply(self, node: SimNode) -> str:
        gpu = node.gpu(self.gpu)
        if self.change == "make":
            number = foreign.make(node, gpu, self.place)
            return f"GPU instance {number} is {self.place} on GPU {self.gpu}"
        foreign.end(node, gpu, self.place)
        return f"{self.place} is gone from GPU {self.gpu}"


class Making(Command, frozen=True, tag="making"):
    """Say how making MIG instances goes on a GPU from now on; what is left out goes well."""

    gpu: str
    takes: float = 0.0
    compute_takes: float = 0.0
    failures: int = 0
    compute_failures: int = 0
    in_use: float = 0.0

    def apply(self, node: SimNode) -> str:
        within("--failures", self.failures, 0, MOST_FAILURES)
        within("--compute-failures", self.compute_failures, 0, MOST_FAILURES)
        for seconds in (self.takes, self.compute_takes, self.in_use):
            check_time(seconds)
        with node.changed:
            node.gpu(self.gpu).mig.making = instances.Making(
                self.takes,
                self.failures,
                self.compute_failures,
                time.monotonic() + self.in_use,
                compute_takes=self.compute_takes,
            )
        return (
            f"GPU {self.gpu}: an instance takes {self.takes:g} s and {self.compute_takes:g} s, "
            f"{self.failures} GPU and {self.compute_failures} compute instances fail, "
            f"in use for {self.in_use:g} s"
        )


class Reboot(Command, frozen=True, tag="reboot"):
    """Start the node again: no processes, no MIG instances, every GPU reset."""

    def apply(self, node: SimNode) -> str:
        node.reboot()
        return "the node was rebooted"


class Ecc(Command, frozen=True, tag="ecc"):
    """Count memory errors: corrected ones, unless they are said to be double-bit."""

    gpu: str
    double_bit: bool = False
    count: int = 1

    def apply(self, node: SimNode) -> str:
        within("--count", self.count, 1, MOST_ERRORS)
        node.ecc(node.gpu(self.gpu), double_bit=self.double_bit, count=self.count)
        kind = "uncorrected" if self.double_bit else "corrected"
        return f"{self.count} {kind} memory errors on GPU {self.gpu}"


class Hang(Command, frozen=True, tag="hang"):
    """Let every call about a GPU block for some seconds."""

    gpu: str
    seconds: float

    def apply(self, node: SimNode) -> str:
        check_time(self.seconds)
        node.hang(node.gpu(self.gpu), self.seconds)
        return f"GPU {self.gpu} hangs for {self.seconds:.12g} s"


class Add(Command, frozen=True, tag="add"):
    """Put one more GPU into the node."""

    board: str

    def apply(self, node: SimNode) -> str:
        gpu = node.add_gpu(board(self.board))
        return f"GPU {node.gpus.index(gpu)} ({gpu.id}) was added"


class Driver(Command, frozen=True, tag="driver"):
    """Take the driver away, or load it again."""

    change: Literal["fail", "restore"]

    def apply(self, node: SimNode) -> str:
        if self.change == "fail":
            node.fail_driver()
            return "the driver is gone"

        node.restore_driver()
        return "the driver is loaded"


class Node(Command, frozen=True, tag="node"):
    """Change nothing, and show the node."""

    def apply(self, node: SimNode) -> str:
        return f"driver {node.driver}, {len(node.gpus)} GPUs"


AnyCommand: TypeAlias = (
    Xid
    | Lose
    | Need
    | Recover
    | Process
    | Mig
    | Instance
    | Making
    | Ecc
    | Hang
    | Add
    | Driver
    | Reboot
    | Node
)
"""What a wire carries: `msgspec.json.decode(data, type=AnyCommand)`."""


class Reply(msgspec.Struct, frozen=True):
    """What was done, in a line, and the node after it."""

    message: str
    node: NodeView


def _inside(gpu: SimGpu, instance: int | None) -> str:
    """Say in which MIG instance something happens, and whether there is such a one."""
    if instance is None:
        return ""
    absent = "" if instance in gpu.mig.present else ", which it does not have"
    return f", in its GPU instance {instance}{absent}"


def steer(node: SimNode, command: AnyCommand) -> Reply:
    """Do one thing to a node; raises as the command's `apply` does."""
    message = command.apply(node)

    return Reply(message, describe(node))
