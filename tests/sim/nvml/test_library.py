"""NVML's functions in Python, through the real pynvml and at the C interface."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pynvml
import pytest

from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.load import SAMPLE_PERIOD
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimNode]:
    """Run pynvml on a simulated library of two models, initialised."""
    made = build_node("a100-40gb:4,t4:2")
    monkeypatch.setattr(pynvml, "nvmlLib", SimLibrary(made))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    yield made
    pynvml.nvmlShutdown()


def handle(index: int) -> object:
    """Return the handle of a GPU."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code_of(function: object, *args: object) -> int:
    """Call a function of pynvml that must fail; return NVML's code."""
    assert callable(function)
    with pytest.raises(pynvml.NVMLError) as caught:
        function(*args)
    return int(caught.value.value)


@pytest.mark.usefixtures("node")
def test_versions_belong_together() -> None:
    """The versions of the driver, the library and CUDA belong together."""
    assert pynvml.nvmlSystemGetDriverVersion() == "580.65.06"
    assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.65.06"
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000


def test_a_gpu_has_one_handle_however_it_is_found(node: SimNode) -> None:
    """Index, uuid and PCI address lead to the same handle and back."""
    uuid = node.gpu(1).id
    found = [
        handle(1),
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:0F:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:0f:00.0"),
    ]

    assert len({ctypes.cast(h, ctypes.c_void_p).value for h in found}) == 1
    assert {pynvml.nvmlDeviceGetIndex(h) for h in found} == {1}
    assert pynvml.nvmlDeviceGetUUID(found[0]) == uuid


@pytest.mark.usefixtures("node")
def test_what_is_not_there_is_not_found() -> None:
    """Wrong indices and handles are invalid arguments, wrong uuids are not found."""
    null = pynvml.c_nvmlDevice_t()

    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 6) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetName, null) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-0") == pynvml.NVML_ERROR_NOT_FOUND
    assert code_of(pynvml.nvmlDeviceGetHandleByPciBusId, "1:2") == pynvml.NVML_ERROR_NOT_FOUND


@pytest.mark.usefixtures("node")
def test_functions_that_are_not_there_say_so() -> None:
    """A missing function looks like one that an older library does not have."""
    code = code_of(pynvml.nvmlDeviceGetFanSpeed, handle(0))

    assert code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_memory_is_counted_in_both_ways(node: SimNode) -> None:
    """The newer query shows reserved memory apart, the older one counts it as used."""
    node.start_process(node.gpu(0), SimProcess(1, 1000 * MIB))
    older = pynvml.nvmlDeviceGetMemoryInfo(handle(0))
    newer = pynvml.nvmlDeviceGetMemoryInfo(handle(0), version=pynvml.nvmlMemory_v2)

    assert older.total == newer.total == 40960 * MIB
    assert older.used == newer.used + newer.reserved == 1620 * MIB
    assert older.free == newer.free
    wrong = code_of(pynvml.nvmlDeviceGetMemoryInfo, handle(0), 1)
    assert wrong == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


@pytest.mark.usefixtures("node")
def test_a_model_is_described() -> None:
    """An A100 and a T4 report their own properties."""
    a100, t4 = handle(0), handle(4)
    pci = pynvml.nvmlDeviceGetPciInfo(a100)

    assert (pci.busId, pci.domain, pci.bus, pci.pciDeviceId, pci.pciSubSystemId) == (
        *("00000000:07:00.0", 0, 7),
        *(0x20B010DE, 0x134F10DE),
    )
    assert pynvml.nvmlDeviceGetName(t4) == "Tesla T4"
    assert pynvml.nvmlDeviceGetMinorNumber(t4) == 4
    assert pynvml.nvmlDeviceGetCudaComputeCapability(t4) == (7, 5)
    assert pynvml.nvmlDeviceGetArchitecture(a100) == pynvml.NVML_DEVICE_ARCH_AMPERE
    assert pynvml.nvmlDeviceGetBrand(a100) == pynvml.NVML_BRAND_NVIDIA
    assert list(pynvml.nvmlDeviceGetMemoryAffinity(t4, 2, 0)) == [2, 0]
    assert pynvml.nvmlDeviceGetMigMode(a100) == [0, 0]
    assert code_of(pynvml.nvmlDeviceGetMigMode, t4) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetRemappedRows, t4) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetRemappedRows(a100) == (0, 0, 0, 0)


@pytest.mark.usefixtures("node")
def test_gpus_meet_on_the_pci_bus() -> None:
    """Two GPUs share a PCI switch, four a NUMA node."""
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor

    assert [level(handle(0), handle(other)) for other in (0, 1, 2, 3, 4)] == [
        *(pynvml.NVML_TOPOLOGY_INTERNAL, pynvml.NVML_TOPOLOGY_SINGLE),
        *(pynvml.NVML_TOPOLOGY_NODE, pynvml.NVML_TOPOLOGY_NODE, pynvml.NVML_TOPOLOGY_SYSTEM),
    ]


def test_nvlinks_lead_somewhere(node: SimNode) -> None:
    """An A100's twelve links lead to NVSwitches or to a GPU; a T4 has none."""
    a100, t4 = handle(0), handle(4)
    kind, state = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, pynvml.nvmlDeviceGetNvLinkState

    assert [state(a100, link) for link in range(12)] == [1] * 12
    assert code_of(state, a100, 12) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code_of(state, t4, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert kind(a100, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(a100, 0).busId == "00000000:C4:00.0"

    node.gpus[0].nvswitch_links = 0
    node.direct_links = {frozenset((0, 2)): 1}
    assert [state(a100, link) for link in (0, 1, 11)] == [1, 0, 0]
    assert kind(a100, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(a100, 0).busId == node.gpus[2].bus_id
    assert code_of(kind, a100, 1) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_samples_are_those_with_use_since_a_time(node: SimNode) -> None:
    """Idle moments and processes have no sample; without a newer one there is nothing."""
    node.turn_clock(0)
    gpu, last_seen = node.gpu(0), node.now
    read = pynvml.nvmlDeviceGetProcessUtilization
    assert code_of(read, handle(0), 0) == pynvml.NVML_ERROR_NOT_FOUND
    for process in (SimProcess(1, MIB, sm=30), SimProcess(2, MIB), SimProcess(3, MIB, sm=60)):
        node.start_process(gpu, process)
    node.set_frozen(gpu, 3, frozen=True)
    assert code_of(read, handle(0), last_seen) == pynvml.NVML_ERROR_NOT_FOUND
    assert {(value.pid, value.smUtil) for value in read(handle(0), 0)} == {(1, 30), (3, 60)}

    node.turn_clock(0.4)
    found = [
        (value.pid, value.smUtil, value.timeStamp - last_seen)
        for value in read(handle(0), last_seen)
    ]
    assert found == [(1, 30, 167_000), (1, 30, 334_000)]
    of_gpu, kind = pynvml.nvmlDeviceGetSamples, pynvml.NVML_GPU_UTILIZATION_SAMPLES
    _, own = of_gpu(handle(0), kind, last_seen - SAMPLE_PERIOD)
    assert [sample.sampleValue.uiVal for sample in own] == [90, 30, 30]
    node.set_frozen(gpu, 1, frozen=True)
    node.turn_clock(0.4)
    assert [sample.sampleValue.uiVal for sample in of_gpu(handle(0), kind, last_seen)[1]] == [
        *(30, 30, 0, 0),
    ]
    assert code_of(of_gpu, handle(0), kind, node.now) == pynvml.NVML_ERROR_NOT_FOUND
    gpu.mig.enabled = True
    assert code_of(read, handle(0), 0) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_counters_follow_the_node(node: SimNode) -> None:
    """Memory errors, recovery action and utilization are those of the node."""
    node.add_ecc_errors(node.gpu(0), double_bit=True, count=3)
    node.set_recovery_action(node.gpu(0), RecoveryAction.DRAIN_AND_RESET)
    node.start_process(node.gpu(0), SimProcess(1, 4096 * MIB))
    fields = [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, pynvml.NVML_FI_DEV_ECC_CURRENT]
    action, other = pynvml.nvmlDeviceGetFieldValues(handle(0), fields)
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle(0))

    assert pynvml.nvmlDeviceGetEccMode(handle(0)) == [1, 1]
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle(0), 1, 0) == 3
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle(0), 0, 0) == 0
    assert (action.nvmlReturn, action.value.uiVal) == (pynvml.NVML_SUCCESS, 4)
    assert other.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert (rates.gpu, rates.memory) == (100, 10)


def test_processes_need_room(node: SimNode) -> None:
    """The first call returns the number of processes, the second fills the array."""
    for pid in range(1, 4):
        node.start_process(node.gpu(0), SimProcess(pid, pid * MIB))
    count = ctypes.c_uint(2)
    entries = (pynvml.c_nvmlProcessInfo_v3_t * 2)()
    function = pynvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3
    code = function(handle(0), ctypes.byref(count), entries)

    assert (code, count.value) == (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, 3)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle(0))
    assert [(p.pid, p.usedGpuMemory) for p in listed] == [(n, n * MIB) for n in (1, 2, 3)]
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle(0)) == []


@pytest.mark.usefixtures("node")
def test_a_short_buffer_is_too_short() -> None:
    """A text that does not fit with its zero byte is refused, not truncated."""
    buffer = ctypes.create_string_buffer(8)
    code = pynvml.nvmlLib.nvmlDeviceGetName(handle(4), buffer, ctypes.c_uint(8))

    assert code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE


def test_nothing_works_before_init() -> None:
    """An uninitialised library, or one shut down as often, answers UNINITIALIZED."""
    library = SimLibrary(build_node("t4:1"))
    count = ctypes.c_uint()

    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == pynvml.NVML_ERROR_UNINITIALIZED
    assert library.nvmlShutdown() == pynvml.NVML_ERROR_UNINITIALIZED
    for _ in range(2):
        assert library.nvmlInit_v2() == pynvml.NVML_SUCCESS
    assert library.nvmlShutdown() == pynvml.NVML_SUCCESS
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == pynvml.NVML_SUCCESS
    assert library.nvmlDeviceGetCount_v2(None) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert library.nvmlShutdown() == pynvml.NVML_SUCCESS
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_lost_gpu_has_no_handle(node: SimNode) -> None:
    """Earlier handles answer GPU_IS_LOST too, and the GPU is still counted."""
    before = handle(1)
    node.lose_gpu(node.gpu(1))

    assert code_of(pynvml.nvmlDeviceGetName, before) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of(handle, 1) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetCount() == 6


def test_events_before_registering_are_lost(node: SimNode) -> None:
    """NVML drops events without a registration and delivers the others."""
    node.raise_xid(node.gpu(0), 13)
    events = pynvml.nvmlEventSetCreate()
    types = pynvml.nvmlDeviceGetSupportedEventTypes(handle(0))
    pynvml.nvmlDeviceRegisterEvents(handle(0), types, events)
    node.raise_xid(node.gpu(1), 31)
    node.raise_xid(node.gpu(0), 43, gi=2)
    data = pynvml.nvmlEventSetWait_v2(events, 0)

    assert (data.eventType, data.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 43)
    assert (data.gpuInstanceId, data.computeInstanceId) == (2, 0xFFFFFFFF)
    assert pynvml.nvmlDeviceGetIndex(data.device) == 0
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT
    pynvml.nvmlEventSetFree(events)
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.usefixtures("node")
def test_types_that_are_not_supported_are_refused() -> None:
    """Registering for an unsupported type registers for nothing."""
    events = pynvml.nvmlEventSetCreate()
    register = pynvml.nvmlDeviceRegisterEvents
    mig, nonsense = pynvml.nvmlEventMigConfigChange, 1 << 40

    assert code_of(register, handle(0), mig, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code_of(register, handle(0), nonsense, events) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_wait_is_over_when_something_happens(node: SimNode) -> None:
    """A waiting thread is woken by an event, long before its timeout."""
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle(0), pynvml.nvmlEventTypeXidCriticalError, events)
    began = time.monotonic()
    other = threading.Timer(0.02, node.raise_xid, (node.gpu(0), 31))
    other.start()

    assert pynvml.nvmlEventSetWait_v2(events, 60_000).eventData == 31
    assert time.monotonic() - began < 60
    other.join()


def test_a_wait_is_over_when_it_is_interrupted(node: SimNode) -> None:
    """An interruption ends the present wait, or the next one, as a timeout does."""
    library, events = pynvml.nvmlLib, pynvml.nvmlEventSetCreate()
    other = threading.Timer(0.02, library.interrupt, (events,))
    other.start()
    wait = pynvml.nvmlEventSetWait_v2
    assert code_of(wait, events, 600_000) == pynvml.NVML_ERROR_TIMEOUT
    other.join()

    pynvml.nvmlDeviceRegisterEvents(handle(0), pynvml.nvmlEventTypeXidCriticalError, events)
    library.interrupt(events)
    node.raise_xid(node.gpu(0), 31)
    assert wait(events, 600_000).eventData == 31
    assert code_of(wait, events, 600_000) == pynvml.NVML_ERROR_TIMEOUT
    later = threading.Timer(0.02, node.raise_xid, (node.gpu(0), 43))
    later.start()
    assert wait(events, 600_000).eventData == 43
    later.join()

    pynvml.nvmlEventSetFree(events)
    library.interrupt(events)


def test_a_wait_is_over_when_the_driver_goes(node: SimNode) -> None:
    """A waiting thread gets an error at once when the driver is unloaded."""
    events = pynvml.nvmlEventSetCreate()
    other = threading.Timer(0.02, node.unload_driver)
    other.start()
    code = code_of(pynvml.nvmlEventSetWait_v2, events, 10_000)
    other.join()

    assert code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    node.load_driver()


def test_a_reloaded_driver_wants_a_new_init(node: SimNode) -> None:
    """A user of the old driver is uninitialised after a reload."""
    node.load_driver()

    assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 6


@pytest.mark.usefixtures("node")
def test_errors_have_nvmls_texts() -> None:
    """The error texts are those of the real library."""
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_GPU_IS_LOST) == "GPU is lost"
    assert pynvml.nvmlErrorString(4711) == "Unknown Error"
