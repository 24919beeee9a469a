"""Metrics of the daemon itself."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from metagpu import __version__
from metagpu.core.census import Findings
from metagpu.core.errors import FractionSplit, RequestError
from metagpu.core.facts import DriverRead, GpusFound, RivalMet, SharesOffered
from metagpu.core.gpu import GpuId
from metagpu.core.model import Fault, ResourceName
from metagpu.core.news import MemoryErrorHeard, WishRefused, XidHeard
from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Versions
from metagpu.core.xid import DEFAULT_XIDS
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.counts import Counts
from metagpu.plugins.metrics.daemon import of_daemon, reason_of
from metagpu.plugins.metrics.samples import Kind, Spread
from metagpu.plugins.metrics.sources import Configuration, Driver, Sources
from metagpu.plugins.record import BOUNDS, Call, KubeletRecord, Outcome
from tests.build import METAGPU, gpu, laid_out
from tests.core.test_usage_report import RULES
from tests.plugins.metrics.rig import valued

A = gpu(0)
ON_A, NOWHERE = ("0", A.id), ("", "")
GOOD = Configuration(
    *("metagpu.yaml", (), (), 0),
    good=True,
    taken=1,
    taken_at=5.0,
    refused=0,
    refused_at=0.0,
)


async def nobody() -> Findings:
    """Find nobody."""
    return Findings()


def sources(**changes: Any) -> Sources:  # noqa: ANN401 - of any source
    """Give a node of one GPU, on which nothing has happened."""
    registry = Registry()
    registry.apply(GpusFound((A,), at=0))
    registry.apply(laid_out(A).offered)
    record = KubeletRecord()
    record.of(METAGPU)
    quiet = Sources(
        registry=registry,
        kubelet=record,
        kinds=(),
        rules=RULES,
        layout=lambda: laid_out(A),
        findings=nobody,
        configuration=lambda: GOOD,
        driver=lambda: Driver("", 0),
        driver_limits=lambda: 2,
        cluster=lambda: None,
        ended=list,
    )
    return replace(quiet, **changes)


def measured(
    it: Sources | None = None, counts: Counts | None = None
) -> Mapping[tuple[str, ...], float]:
    """Measure it."""
    return valued(of_daemon(it or sources(), counts or Counts(), 0.25))


def test_every_counter_begins_at_zero() -> None:
    """An increase can be seen only of what was there before it."""
    samples = of_daemon(sources(), Counts(), 0.0)
    there = {it.family for it in samples if it.family.kind is Kind.COUNTER}
    absent = {it for it in f.FAMILIES if it.kind is Kind.COUNTER} - there

    assert absent == {f.EVENTS_DROPPED}  # where no API server is used
    values = measured()
    assert values["metagpu_gpu_xid_errors_total", *ON_A, "79"] == 0
    assert values["metagpu_gpu_faults_total", *ON_A, Fault.DRIVER] == 0
    assert values["metagpu_enforcement_signals_total", *ON_A, "SIGKILL"] == 0
    assert values["metagpu_kubelet_refusals_total", METAGPU, "fraction_split"] == 0
    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "answered"] == 0


def test_version_and_loop() -> None:
    """What this is, and how late its loop was."""
    values = measured()

    assert [name[1] for name in values if name[0] == "metagpu_build_info"] == [__version__]
    assert values["metagpu_event_loop_lag_seconds",] == 0.25


def test_nvml() -> None:
    """Whether it can be used, its versions, and what it never answered."""
    it = sources(driver=lambda: Driver("no driver", 2))
    it.registry.apply(DriverRead(Versions("580.65.06", (13, 0))))
    values = measured(it)

    assert values["metagpu_nvml_up",] == 0
    assert values["metagpu_nvml_calls_overdue",] == 2
    assert values["metagpu_nvml_info", "580.65.06", "13.0"] == 1
    assert measured()["metagpu_nvml_info", "", ""] == 1


def test_configuration() -> None:
    """Its form and profile, and how its readings went."""
    bad = replace(
        GOOD, forms=("HAMi",), profiles=("a", "b"), good=False, refused=3, refused_at=9.0, notes=2
    )
    values = measured(sources(configuration=lambda: bad))

    assert values["metagpu_config_info", "metagpu.yaml", "HAMi", "a, b"] == 1
    assert values["metagpu_config_last_reload_successful",] == 0
    assert values["metagpu_config_last_reload_success_timestamp_seconds",] == 5
    assert values["metagpu_config_last_refusal_timestamp_seconds",] == 9
    assert values["metagpu_config_reloads_total", "taken"] == 1
    assert values["metagpu_config_reloads_total", "refused"] == 3
    assert values["metagpu_config_notes",] == 2
    assert measured()["metagpu_config_info", "metagpu.yaml", "default", ""] == 1


def test_what_was_done_about_memory() -> None:
    """Limits that the driver keeps, and wishes that were not granted."""
    counts = Counts()
    counts.note(WishRefused(KnownPod("uid", "team", "alice"), "too much", at=1))
    values = measured(counts=counts)

    assert values["metagpu_enforcement_driver_limits",] == 2
    assert values["metagpu_enforcement_wishes_refused_total",] == 1


def test_api_server() -> None:
    """Nothing where none is used; else the connection, each use, and Events that were dropped."""
    told = {
        "connected": True,
        "eventsDropped": 4,
        "podEventsDropped": 5,
        "uses": {"labels": "", "taint": "forbidden"},
    }
    values = measured(sources(cluster=lambda: told))

    assert values["metagpu_api_server_connected",] == 1
    assert values["metagpu_api_server_use_working", "labels"] == 1
    assert values["metagpu_api_server_use_working", "taint"] == 0
    assert values["metagpu_api_server_events_dropped_total", "node"] == 4
    assert values["metagpu_api_server_events_dropped_total", "pods"] == 5
    assert not any("api_server" in name[0] for name in measured())


def test_calls_of_the_kubelet() -> None:
    """By outcome, refusals by kind, and how long they took."""
    it = sources()
    record = it.kubelet.of(METAGPU)
    record.calls[Call.ALLOCATE].note(Outcome.ANSWERED, 0.0002)
    record.note_failure(Call.ALLOCATE, 1.5, FractionSplit("r", 1, "c", "f"))
    record.listed, record.registrations, record.lists, it.kubelet.restarts = True, 2, 7, 1
    values = measured(it)

    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "answered"] == 1
    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "refused"] == 1
    assert values["metagpu_kubelet_refusals_total", METAGPU, "fraction_split"] == 1
    assert values["metagpu_resource_registered", METAGPU] == 1
    assert values["metagpu_kubelet_registrations_total", METAGPU] == 2
    assert values["metagpu_kubelet_lists_total", METAGPU] == 7
    assert values["metagpu_kubelet_restarts_total",] == 1

    [spread] = [
        it.value
        for it in of_daemon(it, Counts(), 0.0)
        if it.family is f.DURATION and it.labels == (METAGPU, "Allocate")
    ]
    assert isinstance(spread, Spread)
    assert (sum(spread.counts), spread.bounds, spread.total) == (2, BOUNDS, 1.5002)


def test_a_resource_that_is_on_offer_no_more_keeps_its_counts() -> None:
    """Counters only ever rise; whether it is registered is asked of what is on offer."""
    it = sources()
    it.kubelet.of(METAGPU).registrations = 2
    it.registry.apply(SharesOffered((), ()))
    values = measured(it)

    assert values["metagpu_kubelet_registrations_total", METAGPU] == 2
    assert ("metagpu_resource_registered", METAGPU) not in values


def test_errors_of_the_hardware() -> None:
    """By number, also unknown ones; a GPU that is not known yet has its own series, by its uuid.

    It may become known: what is counted for no GPU at all would go down then.
    """
    counts = Counts()
    for gpu_id, code in ((A.id, 79), (A.id, 9999), (None, 79), (GpuId("GPU-gone"), 79)):
        counts.note(XidHeard(gpu_id, code, at=1))
    counts.note(MemoryErrorHeard(A.id, corrected=False, at=1))
    counts.note(MemoryErrorHeard(None, corrected=True, at=1))
    values = measured(counts=counts)

    xids = {name[1:]: n for name, n in values.items() if name[0] == "metagpu_gpu_xid_errors_total"}
    assert {name: n for name, n in xids.items() if n} == {
        (*ON_A, "79"): 1,
        (*ON_A, "9999"): 1,
        (*NOWHERE, "79"): 1,
        ("", "GPU-gone", "79"): 1,
    }
    assert len(xids) == len(DEFAULT_XIDS) + 3
    assert values["metagpu_gpu_memory_errors_total", *ON_A, "uncorrected"] == 1
    assert values["metagpu_gpu_memory_errors_total", *ON_A, "corrected"] == 0
    assert values["metagpu_gpu_memory_errors_total", *NOWHERE, "corrected"] == 1


def test_news_that_was_lost() -> None:
    """What any listener inside lost, is told."""
    it = sources()
    with it.registry.news.subscribe(depth=1):
        for name in ("a", "b", "c"):
            it.registry.apply(RivalMet(ResourceName(name), "there"))

    assert measured(it)["metagpu_bus_events_lost_total",] == 2


def test_every_kind_of_refusal_has_a_name() -> None:
    """In the words of its class, as labels are written."""
    names = [reason_of(kind) for kind in RequestError.__subclasses__()]

    assert {"unknown_share", "gpu_unhealthy", "not_made", "overlap"} <= set(names)
    assert len(set(names)) == len(names)
