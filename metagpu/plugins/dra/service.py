"""The services of the DRA driver: prepare, unprepare, and the health of devices.

Each claim of a call has its own answer: the error of one does not fail the others.
"""

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from metagpu.core.devices.devices import GPU_GONE, Device, devices_of, pool_name
from metagpu.core.errors import MetagpuError
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.call_stats import CallOutcome, CallStats, outcome_of
from metagpu.core.state.events import ClaimRefusalEnded, Event, ResourceClaimRefused
from metagpu.core.state.registry import EventBus, Registry
from metagpu.plugins.dra.prepared_claim import PreparedClaims, PreparedDevice
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.kubelet.fast_codec import encode_field, encode_text
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, unary_method
from metagpu.plugins.kubelet.pb import v1alpha1
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1

if TYPE_CHECKING:
    from grpclib.server import Stream

SERVICE: Final = "v1.DRAPlugin"
"""The service's name at registration."""
_PATH: Final = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"

log = structlog.get_logger()


class DraService:
    """The calls of the kubelet, for one driver.

    Args:
        preparer: prepares and unprepares claims.
        events: carries what was refused.
        on_prepared: gets each claim that was prepared.
        stats: counts the preparations.
    """

    def __init__(
        self,
        preparer: ClaimPreparer,
        events: EventBus[Event],
        on_prepared: Callable[[ResourceClaimRef], None] = lambda _: None,
        stats: CallStats | None = None,
    ) -> None:
        self._preparer = preparer
        self._events = events
        self._on_prepared = on_prepared
        self._stats = stats or CallStats()
        self._refusals = LogOnce()

    def methods(self) -> Mapping[str, Method]:
        """Return the service's methods by path."""
        calls = {
            "NodePrepareResources": self._prepare_all,
            "NodeUnprepareResources": self._unprepare_all,
        }
        return {f"{_PATH}{name}": unary_method(call) for name, call in calls.items()}

    async def _prepare_all(self, request: bytes) -> bytes:
        answers: dict[str, PrepareAnswer] = {}

        async def prepare(claim: ResourceClaimRef) -> None:
            began, outcome = perf_counter(), CallOutcome.ABANDONED
            try:
                devices = await self._preparer.prepare(claim)
            except Exception as error:  # noqa: BLE001 - one claim's error is its own
                outcome = outcome_of(error)
                problem = _describe(error)
                if isinstance(error, RequestError):
                    self._events.publish(ResourceClaimRefused(claim, type(error), problem))
                answers[claim.uid] = problem
                if self._refusals.is_new(claim, problem):  # the kubelet repeats the call
                    log.warning("resource claim refused", claim=str(claim), error=problem)
            else:
                outcome = CallOutcome.ANSWERED
                answers[claim.uid] = devices
                self._refusals.clear(claim)
                self._on_prepared(claim)
                self._events.publish(ClaimRefusalEnded(claim))
                lasted = f"{perf_counter() - began:.3f}s"
                log.info("resource claim prepared", claim=str(claim), after=lasted)
            finally:
                self._stats.record(outcome, perf_counter() - began)

        await _for_each(v1.NodePrepareResourcesRequest.parse(request).claims, prepare)
        return encode_prepare_response(answers)

    async def _unprepare_all(self, request: bytes) -> bytes:
        answers: dict[str, v1.NodeUnprepareResourceResponse] = {}

        async def unprepare(claim: ResourceClaimRef) -> None:
            problem = ""
            try:
                await self._preparer.unprepare(claim)
            except Exception as error:  # noqa: BLE001 - one claim's error is its own
                problem = _describe(error)
            else:
                self._refusals.clear(claim)
                self._events.publish(ClaimRefusalEnded(claim))
            answers[claim.uid] = v1.NodeUnprepareResourceResponse(error=problem)
            log.info("resource claim unprepared", claim=str(claim), error=problem or None)

        await _for_each(v1.NodeUnprepareResourcesRequest.parse(request).claims, unprepare)
        return bytes(v1.NodeUnprepareResourcesResponse(claims=answers))


async def _for_each(
    claims: Iterable[v1.Claim], call: Callable[[ResourceClaimRef], Coroutine[Any, Any, None]]
) -> None:
    named = [
        ResourceClaimRef(named_claim.namespace, named_claim.name, named_claim.uid)
        for named_claim in claims
    ]
    if len(named) == 1:  # the kubelet's usual call
        await call(named[0])
        return
    async with anyio.create_task_group() as group:
        for claim in named:
            group.start_soon(call, claim)


def _describe(error: Exception) -> str:
    """Return the text that reaches the pod's events."""
    if isinstance(error, MetagpuError):
        return str(error)
    log.error("resource claim failed", exc_info=error)
    return f"metagpu failed ({type(error).__name__}: {error}); its log has the details"


# Hand-written protobuf of the answer, for which the kubelet waits: the generated messages, with
# which a test compares it, take ten times as long.
_FIELD_1, _FIELD_2, _FIELD_3, _FIELD_4, _FIELD_5 = b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a"

PrepareAnswer = Sequence[PreparedDevice] | str
"""The devices of a claim, or why there are none."""


def encode_prepare_response(answers: Mapping[str, PrepareAnswer]) -> bytes:
    """Encode a NodePrepareResourcesResponse: each answer by the uid of its claim."""
    return b"".join(
        encode_field(_FIELD_1, encode_text(_FIELD_1, uid) + encode_field(_FIELD_2, _answer(answer)))
        for uid, answer in answers.items()
    )


def _answer(answer: PrepareAnswer) -> bytes:
    if isinstance(answer, str):
        return encode_text(_FIELD_2, answer)
    return b"".join(encode_field(_FIELD_1, _device(device)) for device in answer)


def _device(device: PreparedDevice) -> bytes:
    share = b"" if device.share_id is None else encode_field(_FIELD_5, device.share_id.encode())
    return b"".join(
        (
            *(encode_field(_FIELD_1, request.encode()) for request in device.requests),
            encode_text(_FIELD_2, device.pool),
            encode_text(_FIELD_3, device.device),
            *(encode_field(_FIELD_4, name.encode()) for name in device.cdi_names),
            share,
        )
    )


SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The names of the service at registration; the messages of both are the same."""
_REPEAT: Final = 30.0
"""Seconds to the next list without a change."""
_TIMEOUT: Final = 90
"""Seconds after which the kubelet takes the health of a device for unknown."""
_LONGEST: Final = 1024
"""Bytes of a message."""


class DeviceState(msgspec.Struct, frozen=True):
    """The health of one device, with the reason of a fault."""

    pool: str
    device: str
    healthy: bool
    reason: str = ""


def device_states(
    snapshot: Snapshot, node: str, prepared: PreparedClaims = MappingProxyType({})
) -> tuple[DeviceState, ...]:
    """Return the health of all devices of a node, also by the pools of earlier claims.

    The kubelet looks for a device by the pool in its claim's allocation. A device of a prepared
    claim is out of service when its GPU is gone.
    """
    held = (device for devices in prepared.values() for device in devices)
    gone = {
        DeviceState(device.pool, device.device, healthy=False, reason=GPU_GONE): None
        for device in held
        if (own := device.claimed) is not None and snapshot.lacks(own.gpu)
    }
    here = (
        DeviceState(pool, device.name, not reason, reason)
        for state in snapshot.gpus.values()
        for pools in (sorted({pool_name(node), *_earlier_pools(state)}),)
        for device in devices_of(state)
        for reason in (_fault(state, device),)
        for pool in pools
    )
    return *gone, *here


def _earlier_pools(state: GpuState) -> Iterator[str]:
    for lease in state.leases.values():
        if lease.pool:
            yield lease.pool.partition("/")[2]


def _fault(state: GpuState, device: Device) -> str:
    """Return why a device is out of service, empty if it is not.

    Of a device with several shares, the fault of one is that of all: they are on one MIG instance.
    """
    if not state.verdict.healthy:
        return state.verdict.reason
    faults = filter(None, (state.device_fault(share.id) for share in device.shares))
    return next((fault.reason for fault in faults), "")


class HealthStream:
    """The service of the stream."""

    def __init__(
        self,
        registry: Registry,
        node: str,
        prepared: PreparedClaims = MappingProxyType({}),
        repeat: float = _REPEAT,
    ) -> None:
        self._registry = registry
        self._node = node
        self._prepared = prepared
        self._repeat = repeat

    def methods(self, calls: StreamingCalls) -> Mapping[str, Method]:
        """Return the service's methods by path; streams register with `calls`."""

        async def watch(stream: "Stream[bytes, bytes]") -> None:
            await stream.recv_message()
            with calls.track():
                await self._send_all(stream)

        method = Method(watch, Cardinality.UNARY_STREAM, bytes, bytes)
        return {f"/{service}/NodeWatchResources": method for service in SERVICES}

    async def _send_all(self, stream: "Stream[bytes, bytes]") -> None:
        sending = anyio.Lock()

        async def send() -> None:
            async with sending:  # two messages at once would mix on the stream
                await stream.send_message(_encode(self._view(self._registry.snapshot)))

        async def repeat() -> None:
            while True:
                await anyio.sleep(self._repeat)
                await send()

        async with anyio.create_task_group() as group:
            group.start_soon(repeat)
            async for _ in self._registry.watch(self._view):
                await send()

    def _view(self, snapshot: Snapshot) -> tuple[DeviceState, ...]:
        return device_states(snapshot, self._node, self._prepared)


def _encode(states: tuple[DeviceState, ...]) -> bytes:
    now, status = int(time.time()), v1alpha1.HealthStatus
    return bytes(
        v1alpha1.NodeWatchResourcesResponse(
            devices=[
                v1alpha1.DeviceHealth(
                    device=v1alpha1.DeviceIdentifier(
                        pool_name=state.pool, device_name=state.device
                    ),
                    health=status.HEALTHY if state.healthy else status.UNHEALTHY,
                    last_updated_time=now,
                    health_check_timeout_seconds=_TIMEOUT,
                    message=state.reason.encode()[:_LONGEST].decode(errors="ignore"),
                )
                for state in states
            ]
        )
    )
