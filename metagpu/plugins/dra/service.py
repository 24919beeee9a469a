"""The DRA service of the kubelet: prepare and unprepare ResourceClaims.

Each claim of a call has its own answer: the error of one does not fail the others.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from time import perf_counter
from typing import Any, Final

import anyio
import structlog
from grpclib.const import Handler as Method

from metagpu.core.errors import MetagpuError
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.runtime.event_bus import EventBus
from metagpu.core.state.call_stats import CallOutcome, CallStats, outcome_of
from metagpu.core.state.events import ClaimRefusalEnded, Event, ResourceClaimRefused
from metagpu.plugins.dra.prepare_codec import PrepareAnswer, encode_prepare_response
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.kubelet.grpc_server import unary_method
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1

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
                log.warning("resource claim refused", claim=str(claim), error=problem)
            else:
                outcome = CallOutcome.ANSWERED
                answers[claim.uid] = devices
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
                self._events.publish(ClaimRefusalEnded(claim))
            answers[claim.uid] = v1.NodeUnprepareResourceResponse(error=problem)
            log.info("resource claim unprepared", claim=str(claim), error=problem or None)

        await _for_each(v1.NodeUnprepareResourcesRequest.parse(request).claims, unprepare)
        return bytes(v1.NodeUnprepareResourcesResponse(claims=answers))


async def _for_each(
    claims: Iterable[v1.Claim], call: Callable[[ResourceClaimRef], Coroutine[Any, Any, None]]
) -> None:
    named = [ResourceClaimRef(it.namespace, it.name, it.uid) for it in claims]
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
