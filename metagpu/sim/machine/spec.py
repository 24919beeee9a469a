"""The argument of `--simulate`, and the node that it describes.

`a100-40gb:8` is a node with eight GPUs, `a100-40gb:4,t4:2` one with two models, and
`driver=535.104.05,t4` one with another driver; anything else is the path of a YAML file:

    driver: "580.65.06"
    gpus:
      - model: a100-40gb
        count: 3
      - model: a100-40gb
        uuid: GPU-5f2e1a3c-0000-0000-0000-00000000beef
        numa: 1
        pciSwitch: 1
        nvswitchLinks: 0
        recoveryAction: gpu-reset
        processes:
          - {pid: 4242, memory: 8Gi}
      - model: h100-80gb
        mig: true
        instances: [2g.20gb@4]
        provisioning: {duration: 2s, failures: 1, inUse: 5s}
    nvlinks:
      - {gpus: [0, 1], links: 4}
    stateFile: /var/tmp/driver.json
"""

import re
import time
from pathlib import Path
from typing import Final

import msgspec
import pynvml

from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason, allowed_values
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.model.gpu import GpuId
from metagpu.sim.machine import foreign_instances
from metagpu.sim.machine.bounds import MAX_PID
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.gpu_models import GPU_MODELS, GpuModel
from metagpu.sim.machine.mig_driver import persist
from metagpu.sim.machine.mig_state import SimProvisioning
from metagpu.sim.machine.node import DRIVER, SimNode

_OPTION: Final = "--simulate"
_DRIVER: Final = "driver="
_PART: Final = re.compile(r"([a-z0-9][a-z0-9-]*)(?::(\d+))?")
_UUID: Final = re.compile(r"GPU(-[0-9a-f]{8})(-[0-9a-f]{4}){3}(-[0-9a-f]{12})")
_SUFFIXES: Final = {".yaml", ".yml", ".json"}
MAX_GPUS: Final = 64
_MOST: Final = 1_000_000
"""Of what is merely counted; NVML's numbers have 32 bits."""
_MOST_LINKS: Final = int(pynvml.NVML_NVLINK_MAX_LINKS)

RECOVERY_ACTIONS: Final = {
    action.name.lower().replace("_", "-"): action for action in RecoveryAction
}
"""Recovery actions as people write them: `gpu-reset`, `node-reboot`."""


class ProcessSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process at the start; NVML does not know its memory if `memory` is left out."""

    pid: int
    memory: Bytes | None = None
    gi: int | None = None
    ci: int | None = None


class ProvisioningSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Delays and failures of creating MIG instances (`metagpu sim provisioning`)."""

    duration: Duration = Duration(0)
    compute_duration: Duration = Duration(0)
    failures: int = 0
    compute_failures: int = 0
    in_use: Duration = Duration(0)


class GpuSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """GPUs of one model, with consecutive indices."""

    model: str
    count: int = 1
    uuid: str | None = None
    numa: int | None = None
    pci_switch: int | None = None
    nvswitch_links: int | None = None
    processes: tuple[ProcessSpec, ...] = ()
    recovery_action: str = "none"
    mig: bool = False
    instances: tuple[str, ...] = ()
    provisioning: ProvisioningSpec = ProvisioningSpec()


class NvlinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NVLinks between two GPUs, named by their indices."""

    gpus: tuple[int, int]
    links: int


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A whole node; GPUs get their indices in this order.

    Attributes:
        nvlinks: all NVLinks between two GPUs, in place of the models' own.
        state_file: the file that keeps MIG modes and instances while no daemon runs.
    """

    gpus: tuple[GpuSpec, ...]
    driver: str = DRIVER
    nvlinks: tuple[NvlinkSpec, ...] | None = None
    state_file: str | None = None


def build_node(argument: str) -> SimNode:
    """Build the node that the argument of `--simulate` describes.

    Raises:
        ConfigError: the description is not valid; the error states what is allowed.
    """
    if Path(argument).suffix in _SUFFIXES or "/" in argument:
        document = _document(argument)
    else:
        text = msgspec.json.encode(_inline(argument)).decode()
        document = Document(text, _OPTION, first_line=0)

    spec = document.decode(NodeSpec)
    _check(document, spec)
    return _build(document, spec)


def find_model(key: str) -> GpuModel:
    """Return a GPU model by its key.

    Raises:
        ConfigError: no such model exists; the error lists the models.
    """
    if key not in GPU_MODELS:
        problem = f"no GPU model {key!r}; {allowed_values(key, GPU_MODELS)}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE)
    return GPU_MODELS[key]


def find_recovery_action(name: str) -> RecoveryAction:
    """Return a recovery action by its name, such as `gpu-reset`.

    Raises:
        ConfigError: no such action exists; the error lists the actions.
    """
    if name not in RECOVERY_ACTIONS:
        problem = f"no recovery action {name!r}; {allowed_values(name, RECOVERY_ACTIONS)}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE)
    return RECOVERY_ACTIONS[name]


def _document(path: str) -> Document:
    try:
        return Document(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, ConfigReason.UNREADABLE, file=path) from error
    except UnicodeDecodeError as error:
        problem = "cannot be read: not a text in UTF-8"
        raise ConfigError(problem, ConfigReason.UNREADABLE, file=path) from error


def _inline(argument: str) -> dict[str, object]:
    gpus: list[dict[str, object]] = []
    node: dict[str, object] = {"gpus": gpus}

    for part in argument.split(","):
        text = part.strip()
        if text.startswith(_DRIVER):
            node["driver"] = text.removeprefix(_DRIVER)
            continue
        found = _PART.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{text!r} is not MODEL:COUNT such as a100-40gb:8, nor driver=VERSION, nor a path "
                f"of a YAML file; models: {', '.join(GPU_MODELS)}",
                ConfigReason.INVALID_VALUE,
                file=_OPTION,
            )
        gpus.append({"model": found[1], "count": int(found[2] or 1)})
    return node


def _check(document: Document, spec: NodeSpec) -> None:
    """Raise an error for values of the right type that make no sense."""
    if not re.fullmatch(r"\d{3}(\.\d+)*", spec.driver):
        problem = f"{spec.driver!r} is not a driver version such as {DRIVER}"
        raise document.error("driver", problem, ConfigReason.INVALID_VALUE)
    for number, gpu in enumerate(spec.gpus):
        if gpu.count < 1:
            raise document.error(
                f"gpus[{number}].count", "must be at least 1", ConfigReason.INVALID_VALUE
            )
    total = sum(gpu.count for gpu in spec.gpus)
    if total > MAX_GPUS:
        problem = f"{total} GPUs; a node has {MAX_GPUS} at most"
        raise document.error("gpus", problem, ConfigReason.TOO_LARGE)

    for number, gpu in enumerate(spec.gpus):
        where = f"gpus[{number}]"
        _check_gpu(document, where, gpu)
        _check_numbers(document, where, gpu)

    for number, pair in enumerate(spec.nvlinks or ()):
        where = f"nvlinks[{number}]"
        if pair.gpus[0] == pair.gpus[1] or not all(0 <= index < total for index in pair.gpus):
            problem = f"must be two GPUs of 0 to {total - 1}"
            raise document.error(f"{where}.gpus", problem, ConfigReason.INVALID_VALUE)
        if not 0 <= pair.links <= _MOST_LINKS:
            problem = f"must be 0 to {_MOST_LINKS}"
            raise document.error(f"{where}.links", problem, ConfigReason.INVALID_VALUE)


def _check_gpu(document: Document, where: str, gpu: GpuSpec) -> None:
    for path, find, name in (
        (f"{where}.model", find_model, gpu.model),
        (f"{where}.recoveryAction", find_recovery_action, gpu.recovery_action),
    ):
        try:
            find(name)
        except ConfigError as error:
            raise document.error(path, error.problem, error.reason) from None

    if gpu.uuid is not None and gpu.count != 1:
        problem = f"stands for one GPU, and count is {gpu.count}"
        raise document.error(f"{where}.uuid", problem, ConfigReason.CONFLICT)
    if gpu.uuid is not None and not _UUID.fullmatch(gpu.uuid):
        problem = f"{gpu.uuid!r} is not a GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
        raise document.error(f"{where}.uuid", problem, ConfigReason.INVALID_VALUE)


def _check_numbers(document: Document, where: str, gpu: GpuSpec) -> None:
    for key, value in (
        ("numa", gpu.numa),
        ("pciSwitch", gpu.pci_switch),
        ("nvswitchLinks", gpu.nvswitch_links),
        ("provisioning.failures", gpu.provisioning.failures),
        ("provisioning.computeFailures", gpu.provisioning.compute_failures),
    ):
        if value is not None and value < 0:
            raise document.error(f"{where}.{key}", "must be at least 0", ConfigReason.INVALID_VALUE)
        if value is not None and value > _MOST:
            problem = f"must be at most {_MOST}"
            raise document.error(f"{where}.{key}", problem, ConfigReason.INVALID_VALUE)
    for number, process in enumerate(gpu.processes):
        if not 1 <= process.pid <= MAX_PID:
            path = f"{where}.processes[{number}].pid"
            raise document.error(path, f"must be 1 to {MAX_PID}", ConfigReason.INVALID_VALUE)
    if (gpu.nvswitch_links or 0) > _MOST_LINKS:
        problem = f"must be at most {_MOST_LINKS}"
        raise document.error(f"{where}.nvswitchLinks", problem, ConfigReason.INVALID_VALUE)


def _build(document: Document, spec: NodeSpec) -> SimNode:
    node = SimNode(spec.driver)

    for number, wanted in enumerate(spec.gpus):
        try:
            for _ in range(wanted.count):
                _add(node, wanted)
        except SimError as error:
            problem, reason = str(error), ConfigReason.INVALID_VALUE
            raise document.error(f"gpus[{number}]", problem, reason) from None

    if spec.nvlinks is not None:
        node.direct_links = {frozenset(pair.gpus): pair.links for pair in spec.nvlinks}
    if spec.state_file is not None:
        persist(node, Path(spec.state_file))
    return node


def _add(node: SimNode, wanted: GpuSpec) -> None:
    gpu = node.add_gpu(
        find_model(wanted.model),
        gpu_id=None if wanted.uuid is None else GpuId(wanted.uuid),
        numa=wanted.numa,
        pci_switch=wanted.pci_switch,
        nvswitch_links=wanted.nvswitch_links,
    )
    node.set_recovery_action(gpu, find_recovery_action(wanted.recovery_action))
    _set_up_mig(node, gpu, wanted)
    for process in wanted.processes:
        node.start_process(gpu, SimProcess(process.pid, process.memory, process.gi, process.ci))


def _set_up_mig(node: SimNode, gpu: SimGpu, wanted: GpuSpec) -> None:
    """Set the MIG mode and the instances that the file describes."""
    if wanted.mig and not gpu.model.has_mig:
        raise SimError(f"{gpu.model.key} has no MIG")

    gpu.mig.enabled = gpu.mig.pending = wanted.mig
    for place in wanted.instances:
        foreign_instances.create_instance(node, gpu, place)
    provisioning = wanted.provisioning
    gpu.mig.provisioning = SimProvisioning(
        *(float(provisioning.duration), provisioning.failures, provisioning.compute_failures),
        in_use_until=time.monotonic() + float(provisioning.in_use),
        compute_duration=float(provisioning.compute_duration),
    )
