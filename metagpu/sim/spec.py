"""What `--simulate` says, and the node that comes of it.

`a100-40gb:8` is a node with eight GPUs, `a100-40gb:4,t4:2` one with two kinds; anything else is
the path of a YAML file:

    driver: "580.65.06"
    gpus:
      - board: a100-40gb
        count: 3
      - board: a100-40gb
        uuid: GPU-5f2e1a3c-0000-0000-0000-00000000beef
        numa: 1
        pciSwitch: 1
        nvswitchLinks: 0
        recoveryAction: gpu-reset
        processes:
          - {pid: 4242, memory: 8Gi}
      - board: h100-80gb
        mig: true
        instances: [2g.20gb@4]
        making: {takes: 2s, computeTakes: 0s, failures: 1, computeFailures: 0, inUse: 5s}
    nvlinks:
      - {gpus: [0, 1], links: 4}
    keep: /var/tmp/driver.json
"""

import re
import time
from pathlib import Path
from typing import Final

import msgspec
import pynvml

from metagpu.core.document import Document
from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import GpuId
from metagpu.core.spelling import allowed
from metagpu.core.units import Bytes, Duration
from metagpu.sim import foreign
from metagpu.sim.boards import BOARDS, Board
from metagpu.sim.bounds import MOST_PIDS
from metagpu.sim.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.instances import Making
from metagpu.sim.lasting import keep
from metagpu.sim.node import DRIVER, SimNode

_OPTION: Final = "--simulate"
_PART: Final = re.compile(r"([a-z0-9][a-z0-9-]*)(?::(\d+))?")
_UUID: Final = re.compile(r"GPU(-[0-9a-f]{8})(-[0-9a-f]{4}){3}(-[0-9a-f]{12})")
_SUFFIXES: Final = {".yaml", ".yml", ".json"}
MOST_GPUS: Final = 64
_MOST: Final = 1_000_000
"""Of what is merely counted; NVML's numbers have 32 bits."""
_MOST_LINKS: Final = int(pynvml.NVML_NVLINK_MAX_LINKS)

ACTIONS: Final = {action.name.lower().replace("_", "-"): action for action in RecoveryAction}
"""Recovery actions as people write them: `gpu-reset`, `node-reboot`."""


class ProcessSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that is there from the beginning; without `memory` the driver does not say it."""

    pid: int
    memory: Bytes | None = None
    gi: int | None = None
    ci: int | None = None


class MakingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How making MIG instances goes: how long each takes, how many fail, how long it is refused."""

    takes: Duration = Duration(0)
    compute_takes: Duration = Duration(0)
    failures: int = 0
    compute_failures: int = 0
    in_use: Duration = Duration(0)


class GpuSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Some GPUs of one kind, next to each other."""

    board: str
    count: int = 1
    uuid: str | None = None
    numa: int | None = None
    pci_switch: int | None = None
    nvswitch_links: int | None = None
    processes: tuple[ProcessSpec, ...] = ()
    recovery_action: str = "none"
    mig: bool = False
    instances: tuple[str, ...] = ()
    making: MakingSpec = MakingSpec()


class NvlinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NVLinks between two GPUs, named by their indices."""

    gpus: tuple[int, int]
    links: int


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole node; GPUs get their indices in this order.

    Attributes:
        nvlinks: all that there are between two GPUs, instead of those that the boards have.
        keep: the file in which MIG modes and instances outlive the daemon, as a driver's do.
    """

    gpus: tuple[GpuSpec, ...]
    driver: str = DRIVER
    nvlinks: tuple[NvlinkSpec, ...] | None = None
    keep: str | None = None


def simulated(argument: str) -> SimNode:
    """Make the node that the argument of `--simulate` describes.

    Raises:
        ConfigError: if it cannot be; says what is allowed.
    """
    if Path(argument).suffix in _SUFFIXES or "/" in argument:
        document = _document(argument)
    else:
        text = msgspec.json.encode({"gpus": _inline(argument)}).decode()
        document = Document(text, _OPTION, first_line=0)

    spec = document.decode(NodeSpec)
    _check(document, spec)
    return _build(document, spec)


def board(key: str) -> Board:
    """Find a kind of GPU.

    Raises:
        ConfigError: if there is none of that name; says which there are.
    """
    if key not in BOARDS:
        raise ConfigError(f"no board {key!r}; {allowed(key, BOARDS)}")
    return BOARDS[key]


def recovery_action(name: str) -> RecoveryAction:
    """Find a recovery action by its name, such as `gpu-reset`.

    Raises:
        ConfigError: if there is none of that name; says which there are.
    """
    if name not in ACTIONS:
        raise ConfigError(f"no recovery action {name!r}; {allowed(name, ACTIONS)}")
    return ACTIONS[name]


def _document(path: str) -> Document:
    try:
        return Document(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise ConfigError("cannot be read: not a text in UTF-8", file=path) from error


def _inline(argument: str) -> list[dict[str, object]]:
    parts = []

    for text in argument.split(","):
        found = _PART.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text.strip()!r} is no BOARD:COUNT such as a100-40gb:8, and no path of a YAML "
                f"file; boards: {', '.join(BOARDS)}",
                file=_OPTION,
            )
        parts.append({"board": found[1], "count": int(found[2] or 1)})
    return parts


def _check(document: Document, spec: NodeSpec) -> None:
    """Find what has the right type and still makes no sense."""
    if not re.fullmatch(r"\d{3}(\.\d+)*", spec.driver):
        raise document.error("driver", f"{spec.driver!r} is no driver version such as {DRIVER}")
    for number, gpu in enumerate(spec.gpus):
        if gpu.count < 1:
            raise document.error(f"gpus[{number}].count", "must be at least 1")
    total = sum(gpu.count for gpu in spec.gpus)
    if total > MOST_GPUS:
        raise document.error("gpus", f"{total} GPUs; a node has {MOST_GPUS} at most")

    for number, gpu in enumerate(spec.gpus):
        where = f"gpus[{number}]"
        _check_gpu(document, where, gpu)
        _check_place(document, where, gpu)

    for number, pair in enumerate(spec.nvlinks or ()):
        where = f"nvlinks[{number}]"
        if pair.gpus[0] == pair.gpus[1] or not all(0 <= index < total for index in pair.gpus):
            raise document.error(f"{where}.gpus", f"must be two GPUs of 0 to {total - 1}")
        if not 0 <= pair.links <= _MOST_LINKS:
            raise document.error(f"{where}.links", f"must be 0 to {_MOST_LINKS}")


def _check_gpu(document: Document, where: str, gpu: GpuSpec) -> None:
    for path, find, name in (
        (f"{where}.board", board, gpu.board),
        (f"{where}.recoveryAction", recovery_action, gpu.recovery_action),
    ):
        try:
            find(name)
        except ConfigError as error:
            raise document.error(path, error.problem) from None

    if gpu.uuid is not None and gpu.count != 1:
        raise document.error(f"{where}.uuid", f"stands for one GPU, and count is {gpu.count}")
    if gpu.uuid is not None and not _UUID.fullmatch(gpu.uuid):
        raise document.error(
            f"{where}.uuid", f"{gpu.uuid!r} is no GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
        )


def _check_place(document: Document, where: str, gpu: GpuSpec) -> None:
    for key, value in (
        ("numa", gpu.numa),
        ("pciSwitch", gpu.pci_switch),
        ("nvswitchLinks", gpu.nvswitch_links),
        ("making.failures", gpu.making.failures),
        ("making.computeFailures", gpu.making.compute_failures),
    ):
        if value is not None and value < 0:
            raise document.error(f"{where}.{key}", "must be at least 0")
        if value is not None and value > _MOST:
            raise document.error(f"{where}.{key}", f"must be at most {_MOST}")
    for number, process in enumerate(gpu.processes):
        if not 1 <= process.pid <= MOST_PIDS:
            path = f"{where}.processes[{number}].pid"
            raise document.error(path, f"must be 1 to {MOST_PIDS}")
    if (gpu.nvswitch_links or 0) > _MOST_LINKS:
        raise document.error(f"{where}.nvswitchLinks", f"must be at most {_MOST_LINKS}")


def _build(document: Document, spec: NodeSpec) -> SimNode:
    node = SimNode(spec.driver)

    for number, wanted in enumerate(spec.gpus):
        try:
            for _ in range(wanted.count):
                _add(node, wanted)
        except SimError as error:
            raise document.error(f"gpus[{number}]", str(error)) from None

    if spec.nvlinks is not None:
        node.direct_links = {frozenset(pair.gpus): pair.links for pair in spec.nvlinks}
    if spec.keep is not None:
        keep(node, Path(spec.keep))
    return node


def _add(node: SimNode, wanted: GpuSpec) -> None:
    gpu = node.add_gpu(
        board(wanted.board),
        gpu_id=None if wanted.uuid is None else GpuId(wanted.uuid),
        numa=wanted.numa,
        pci_switch=wanted.pci_switch,
        nvswitch_links=wanted.nvswitch_links,
    )
    node.need(gpu, recovery_action(wanted.recovery_action))
    _cut(node, gpu, wanted)
    for it in wanted.processes:
        node.add_process(gpu, SimProcess(it.pid, it.memory, it.gi, it.ci))


def _cut(node: SimNode, gpu: SimGpu, wanted: GpuSpec) -> None:
    """Bring a GPU into the MIG mode that the file says, with these instances on it."""
    if wanted.mig and not gpu.board.mig:
        raise SimError(f"{gpu.board.key} has no MIG")

    gpu.mig.enabled = gpu.mig.pending = wanted.mig
    for place in wanted.instances:
        foreign.make(node, gpu, place)
    making = wanted.making
    gpu.mig.making = Making(
        *(float(making.takes), making.failures, making.compute_failures),
        in_use_until=time.monotonic() + float(making.in_use),
        compute_takes=float(making.compute_takes),
    )
