"""The commands of `metagpu sim`: changes of a simulated node while it runs.

A command is a value that any connection carries as JSON (`AnySimCommand`); `apply_command` carries
it out.
"""

import time
from typing import Literal, TypeAlias

import msgspec

from metagpu.sim.commands.view import NodeView, view_node
from metagpu.sim.machine import foreign_instances
from metagpu.sim.machine.bounds import (
    MAX_ERRORS,
    MAX_FAILURES,
    MAX_PID,
    MAX_XID,
    check_duration,
    check_instance,
    check_range,
)
from metagpu.sim.machine.containers import cgroup_of
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.mig_driver import set_mode
from metagpu.sim.machine.mig_state import SimProvisioning
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import find_model, find_recovery_action

__all__ = ["AnySimCommand", "SimReply", "apply_command"]


class SimCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do"):
    """One change of a node; a `gpu` is an index or UUID, an amount of memory in bytes."""

    def apply(self, node: SimNode) -> str:
        """Change the node; return one line for the user.

        Raises:
            SimError: the node has no such GPU or process, or not enough memory.
            ConfigError: no such GPU model or recovery action exists.
        """
        raise NotImplementedError


class XidCommand(SimCommand, frozen=True, tag="xid"):
    """Report an XID of a GPU, or of one of its MIG instances."""

    gpu: str
    code: int
    gi: int | None = None
    ci: int | None = None

    def apply(self, node: SimNode) -> str:
        check_range("the XID", self.code, 1, MAX_XID)
        check_instance(self.gi, self.ci)
        gpu = node.gpu(self.gpu)
        node.raise_xid(gpu, self.code, self.gi, self.ci)
        return f"XID {self.code} on GPU {self.gpu}{_instance_suffix(gpu, self.gi)}"


class LoseCommand(SimCommand, frozen=True, tag="lose"):
    """Drop a GPU off the bus without an event."""

    gpu: str

    def apply(self, node: SimNode) -> str:
        node.lose_gpu(node.gpu(self.gpu))
        return f"GPU {self.gpu} is lost"


class RecoveryActionCommand(SimCommand, frozen=True, tag="recovery-action"):
    """Set the recovery action that a GPU requires, such as gpu-reset."""

    gpu: str
    action: str

    def apply(self, node: SimNode) -> str:
        action = find_recovery_action(self.action)
        node.set_recovery_action(node.gpu(self.gpu), action)
        return f"GPU {self.gpu} requires: {action}"


class ResetCommand(SimCommand, frozen=True, tag="reset"):
    """Reset a GPU: it answers again and requires no recovery action."""

    gpu: str

    def apply(self, node: SimNode) -> str:
        node.reset_gpu(node.gpu(self.gpu))
        return f"GPU {self.gpu} was reset"


class ProcessCommand(SimCommand, frozen=True, tag="process"):
    """Start or end a process on a GPU; its memory may be unknown to NVML."""

    change: Literal["start", "end"]
    gpu: str
    pid: int
    memory: int | None = None
    gi: int | None = None
    ci: int | None = None
    load: int = 0

    def apply(self, node: SimNode) -> str:
        gpu = node.gpu(self.gpu)
        if self.change == "end":
            node.end_process(gpu, self.pid)
            return f"process {self.pid} on GPU {self.gpu} has ended"

        check_range("the pid", self.pid, 1, MAX_PID)
        check_range("--load", self.load, 0, 100)
        check_instance(self.gi, self.ci)
        cgroup = cgroup_of(self.pid)
        node.start_process(
            gpu, SimProcess(self.pid, self.memory, self.gi, self.ci, sm=self.load, cgroup=cgroup)
        )
        return f"process {self.pid} runs on GPU {self.gpu}{_instance_suffix(gpu, self.gi)}"


class MigCommand(SimCommand, frozen=True, tag="mig"):
    """Turn MIG mode on or off, as nvidia-smi does; before Hopper after a reset."""

    change: Literal["on", "off"]
    gpu: str

    def apply(self, node: SimNode) -> str:
        enabled = self.change == "on"
        with node.changed:
            gpu = node.gpu(self.gpu)
            if not gpu.model.has_mig:
                raise SimError(f"GPU {self.gpu} is a {gpu.model.key}, which has no MIG")
            set_mode(gpu, enabled=enabled)
            if gpu.mig.enabled != enabled:
                return f"MIG mode of GPU {self.gpu} will be {self.change} after a reset"
        return f"MIG mode of GPU {self.gpu} is {self.change}"


class InstanceCommand(SimCommand, frozen=True, tag="instance"):
    """Create or destroy a MIG instance, as an administrator or another plugin does."""

    change: Literal["create", "destroy"]
    gpu: str
    placement: str

    def apply(self, node: SimNode) -> str:
        gpu = node.gpu(self.gpu)
        if self.change == "create":
            number = foreign_instances.create_instance(node, gpu, self.placement)
            return f"GPU instance {number} on GPU {self.gpu} is {self.placement}"
        foreign_instances.destroy_instance(node, gpu, self.placement)
        return f"{self.placement} on GPU {self.gpu} is destroyed"


class ProvisioningCommand(SimCommand, frozen=True, tag="provisioning"):
    """Set how long creating MIG instances takes, and how many fail (default: none)."""

    gpu: str
    duration: float = 0.0
    compute_duration: float = 0.0
    failures: int = 0
    compute_failures: int = 0
    removal_failures: int = 0
    done: bool = False
    in_use: float = 0.0

    def apply(self, node: SimNode) -> str:
        check_range("--failures", self.failures, 0, MAX_FAILURES)
        check_range("--compute-failures", self.compute_failures, 0, MAX_FAILURES)
        for seconds in (self.duration, self.compute_duration, self.in_use):
            check_duration(seconds)
        with node.changed:
            node.gpu(self.gpu).mig.provisioning = SimProvisioning(
                self.duration,
                self.failures,
                self.compute_failures,
                self.removal_failures,
                self.done,
                in_use_until=time.monotonic() + self.in_use,
                compute_duration=self.compute_duration,
            )
        return (
            f"GPU {self.gpu}: creating a GPU instance takes {self.duration:g} s, a compute "
            f"instance {self.compute_duration:g} s; the next {self.failures} GPU instances and "
            f"{self.compute_failures} compute instances fail; in use for {self.in_use:g} s"
        )


class RebootCommand(SimCommand, frozen=True, tag="reboot"):
    """Reboot the node: no process and no MIG instance is left, every GPU is reset."""

    def apply(self, node: SimNode) -> str:
        node.reboot()
        return "the node was rebooted"


class EccCommand(SimCommand, frozen=True, tag="ecc"):
    """Add memory errors: corrected ones, or uncorrected ones with --double-bit."""

    gpu: str
    double_bit: bool = False
    count: int = 1

    def apply(self, node: SimNode) -> str:
        check_range("--count", self.count, 1, MAX_ERRORS)
        node.add_ecc_errors(node.gpu(self.gpu), double_bit=self.double_bit, count=self.count)
        kind = "uncorrected" if self.double_bit else "corrected"
        errors = "error" if self.count == 1 else "errors"
        return f"{self.count} {kind} memory {errors} on GPU {self.gpu}"


class HangCommand(SimCommand, frozen=True, tag="hang"):
    """Block every call about a GPU for some time."""

    gpu: str
    seconds: float

    def apply(self, node: SimNode) -> str:
        check_duration(self.seconds)
        node.hang_gpu(node.gpu(self.gpu), self.seconds)
        return f"GPU {self.gpu} hangs for {self.seconds:.12g} s"


class AddGpuCommand(SimCommand, frozen=True, tag="add-gpu"):
    """Add a GPU to the node."""

    model: str

    def apply(self, node: SimNode) -> str:
        gpu = node.add_gpu(find_model(self.model))
        return f"GPU {node.gpus.index(gpu)} ({gpu.id}) was added"


class DriverCommand(SimCommand, frozen=True, tag="driver"):
    """Unload the driver, or load it again."""

    change: Literal["unload", "load"]

    def apply(self, node: SimNode) -> str:
        if self.change == "unload":
            node.unload_driver()
            return "the driver is unloaded"

        node.load_driver()
        return "the driver is loaded"


class ShowCommand(SimCommand, frozen=True, tag="show"):
    """Show the node and its GPUs."""

    def apply(self, node: SimNode) -> str:
        return f"driver {node.driver}, {len(node.gpus)} GPUs"


AnySimCommand: TypeAlias = (
    XidCommand
    | LoseCommand
    | RecoveryActionCommand
    | ResetCommand
    | ProcessCommand
    | MigCommand
    | InstanceCommand
    | ProvisioningCommand
    | EccCommand
    | HangCommand
    | AddGpuCommand
    | DriverCommand
    | RebootCommand
    | ShowCommand
)
"""Any of the commands, for `msgspec.json.decode(data, type=AnySimCommand)`."""


class SimReply(msgspec.Struct, frozen=True):
    """The outcome of a command: one line for the user, and the node after the change."""

    message: str
    node: NodeView


def _instance_suffix(gpu: SimGpu, instance: int | None) -> str:
    """Return the MIG instance of a command as text, and note one that does not exist."""
    if instance is None:
        return ""
    absent = "" if instance in gpu.mig.instances else ", which does not exist"
    return f", in GPU instance {instance}{absent}"


def apply_command(node: SimNode, command: AnySimCommand) -> SimReply:
    """Apply a command to a node; raise the errors of the command's `apply`."""
    message = command.apply(node)

    return SimReply(message, view_node(node))
