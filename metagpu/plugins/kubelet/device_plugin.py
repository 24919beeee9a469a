"""One resource name's DevicePlugin service: the calls of the kubelet.

All answers come from the registry's snapshot. Hardware that a share needs first, such
as a MIG instance, is awaited in Allocate or at the container's start, and then named in the CDI
specification.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from metagpu.core.availability.reasons import availability_of, refuse
from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import PreparesContainers, Provisions
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import Grant
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import GpuUnhealthy, RequestError
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.call_stats import CallOutcome, KubeletCall, ResourceCallStats
from metagpu.core.state.events import AllocationRefused, CheckpointRequested
from metagpu.core.state.facts import (
    KubeletStarted,
    SharesClaimed,
    SharesPending,
    SharesReleased,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import fast_codec, messages
from metagpu.plugins.kubelet.fast_codec import encode_device
from metagpu.plugins.kubelet.granting import (
    Claim,
    EnsureCdiNames,
    find_shares,
    grant_shares,
    is_provisioned,
    no_cdi,
    wait_reprovisioned,
)
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, unary_method
from metagpu.plugins.kubelet.preference import ShareChooser
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming

if TYPE_CHECKING:
    from grpclib.server import Stream

_SERVICE: Final = "/v1beta1.DevicePlugin/"

log = structlog.get_logger()


class GpuListState(NamedTuple):
    """The state that one GPU's part of a list depends on."""

    shares: tuple[Share, ...]
    unlisted: frozenset[ShareId]
    numa_node: int | None


ListView = tuple[GpuListState, ...]
"""The state that a list depends on; equal views have equal lists."""


class DeviceList:
    """Encodes snapshots as ListAndWatchResponses of one resource.

    A message with a repeated field is the concatenation of its elements' encodings. So a list is
    joined from one block for each GPU, and only blocks of changed GPUs are encoded again.
    """

    def __init__(self, resource: ResourceName) -> None:
        self._resource = resource
        self._blocks = dict[GpuId, tuple[GpuListState, bytes]]()

    def view(self, snapshot: Snapshot) -> ListView:
        """Return the state that the list depends on."""
        offer = snapshot.plugin_offer(self._resource)
        if offer is None:
            return ()

        parts = []
        for gpu, shares in offer.by_gpu.items():
            state = snapshot.gpus[gpu]
            unlisted = availability_of(state).unlisted
            parts.append(GpuListState(shares, unlisted, state.gpu.numa_node))
        return tuple(parts)

    def encode(self, view: ListView) -> bytes:
        """Encode the list, which replaces the kubelet's previous list."""
        self._blocks = {part.shares[0].gpu: (part, self._block(part)) for part in view}
        return b"".join(block for _, block in self._blocks.values())

    def _block(self, part: GpuListState) -> bytes:
        known = self._blocks.get(part.shares[0].gpu)
        if known is not None and known[0] == part:
            return known[1]
        return b"".join(
            encode_device(
                share.id,
                healthy=share.id not in part.unlisted,
                numa_node=part.numa_node,
            )
            for share in part.shares
        )


class DevicePluginService:
    """The DevicePlugin service of one resource.

    Attributes:
        record: counts the kubelet's calls; one of its own unless given.
        chooser: chooses shares before the kubelet asks for them.

    Args:
        resource: the resource's name.
        registry: has the snapshots and receives the facts.
        backend: finds the resource's backend, at each call: a reload may change it.
        clock: returns the event loop's time.
        ensure_cdi_names: makes CDI names known to the container runtime.
        timing: deadlines.
    """

    def __init__(
        self,
        resource: ResourceName,
        registry: Registry,
        backend: Callable[[ResourceName], Backend],
        clock: Callable[[], float] = anyio.current_time,
        *,
        ensure_cdi_names: EnsureCdiNames = no_cdi,
        record: ResourceCallStats | None = None,
        timing: KubeletTiming = TIMING,
    ) -> None:
        self.resource = resource
        self._registry = registry
        self._backend = backend
        self._clock = clock
        self._ensure_cdi_names = ensure_cdi_names
        self._flush_deadline = timing.flush_deadline
        self._calls_before_start = False
        self.record = record or ResourceCallStats()
        self.chooser = ShareChooser(resource, registry, backend, clock, timing)
        self._list = DeviceList(resource)
        # For each open list, how to send it, and its last flush that was late.
        self._list_senders: dict[Callable[[anyio.Event], None], anyio.Event] = {}
        self._log = log.bind(resource=resource)

    @property
    def pre_start(self) -> bool:
        """True if the kubelet must call PreStartContainer before each container start."""
        backend = self._backend(self.resource)
        return isinstance(backend, PreparesContainers) or _provisions_at_start(backend)

    def encode_ahead(self) -> None:
        """Encode the list and the options before a kubelet asks.

        Between a kubelet's registration of us and our first list, it refuses the pods that it
        admits again. The first encoding of a list takes longer than all that follow.
        """
        self._list.encode(self._list.view(self._registry.snapshot))
        messages.encode_options(pre_start=self.pre_start)

    def greet(self, kubelet: tuple[int, int, int]) -> None:
        """Note which kubelet is about to get the shares, by the identity of its socket."""
        self._registry.apply(KubeletStarted(kubelet))

    def methods(self, calls: StreamingCalls) -> dict[str, Method]:
        """Return the service's methods by path; streaming calls register with `calls`."""

        async def list_and_watch(stream: "Stream[bytes, bytes]") -> None:
            await stream.recv_message()
            with calls.track():
                await self._send_lists(stream)

        answers = {
            "GetDevicePluginOptions": self._options,
            KubeletCall.PREFERRED: self._counted(KubeletCall.PREFERRED, self.chooser.answer),
            KubeletCall.ALLOCATE: self._counted(KubeletCall.ALLOCATE, self._allocate),
            KubeletCall.PRE_START: self._counted(KubeletCall.PRE_START, self._pre_start),
        }
        return {
            f"{_SERVICE}ListAndWatch": Method(
                list_and_watch, Cardinality.UNARY_STREAM, bytes, bytes
            ),
            **{f"{_SERVICE}{name}": unary_method(answer) for name, answer in answers.items()},
        }

    def _counted(
        self, call: KubeletCall, answer: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[[bytes], Coroutine[Any, Any, bytes]]:
        record = self.record.calls[call]

        async def counted(request: bytes) -> bytes:
            began = perf_counter()
            self.record.in_flight += 1
            try:
                reply = await answer(request)
            except BaseException as error:
                self.record.record_failure(call, perf_counter() - began, error)
                raise
            finally:
                self.record.in_flight -= 1
            record.record(CallOutcome.ANSWERED, perf_counter() - began)
            return reply

        return counted

    async def _send_lists(self, stream: "Stream[bytes, bytes]") -> None:
        sending = anyio.Lock()

        async def send(done: anyio.Event) -> None:
            async with sending:  # two messages at once would mix on the stream
                view = self._list.view(self._registry.snapshot)
                await stream.send_message(self._list.encode(view))
            self.record.lists += 1
            done.set()

        async with anyio.create_task_group() as group:

            def send_soon(done: anyio.Event) -> None:
                group.start_soon(send, done)

            async def send_when_requested() -> None:
                with self._registry.events.subscribe(CheckpointRequested) as requests:
                    async for _ in requests:
                        await send(anyio.Event())

            group.start_soon(send_when_requested)
            self._list_senders[send_soon] = done = anyio.Event()
            done.set()
            try:
                async for _ in self._registry.watch(self._list.view):
                    await send(anyio.Event())
            finally:
                del self._list_senders[send_soon]
                group.cancel_scope.cancel()

    async def _flush_lists(self) -> None:
        """Send the present list on every stream, before the kubelet gets a refusal.

        The wait ends at the deadline, but sending goes on: half a message would corrupt the rest
        of the stream. A stream whose reader stalls delays one refusal, not each.
        """
        sent = {}
        for send_soon, last in self._list_senders.items():
            if last.is_set():
                sent[send_soon] = anyio.Event()
                send_soon(sent[send_soon])

        with anyio.move_on_after(self._flush_deadline):
            for done in sent.values():
                await done.wait()
        for send_soon in sent.keys() & self._list_senders.keys():
            self._list_senders[send_soon] = sent[send_soon]

    async def _options(self, _: bytes) -> bytes:
        self._calls_before_start = self.pre_start  # the kubelet asks once in a registration
        return messages.encode_options(pre_start=self._calls_before_start)

    async def _pre_start(self, request: bytes) -> bytes:
        snapshot, backend = self._registry.snapshot, self._backend(self.resource)
        shares = find_shares(self.resource, fast_codec.decode_pre_start_request(request), snapshot)
        if isinstance(backend, Provisions) and backend.provisions_at_start:
            snapshot = await self._provisioned_at_start(shares, backend)
        if isinstance(backend, PreparesContainers):
            await backend.prepare(shares, snapshot)
        return b""

    async def _provisioned_at_start(self, shares: Sequence[Share], backend: Provisions) -> Snapshot:
        """Provision shares at their container's start; return the snapshot with devices.

        Raises:
            RequestError: a GPU is unhealthy, or provisioning fails or takes too long.
        """
        snapshot = self._registry.snapshot
        for share in shares:
            state = snapshot.gpus[share.gpu]
            if not state.verdict.healthy and not is_provisioned(share, snapshot):
                raise GpuUnhealthy(self.resource, str(state.gpu), state.verdict.reason)
        snapshot = await wait_reprovisioned(
            self._registry, shares, backend.provision_timeout, self._clock
        )
        await self._ensure_cdi_names(cdi.device_names(await backend.grant(shares, snapshot)))
        return snapshot

    async def _allocate(self, request: bytes) -> bytes:
        """Grant all containers their requested shares, or none of them any."""
        claims: list[Claim] = []

        try:
            requests = fast_codec.decode_allocate_request(request)
            grants = [await self._grant(ids, claims) for ids in requests]
        except BaseException as error:
            self._take_back(claims)
            if isinstance(error, RequestError):
                self._log.warning("allocation refused", error=str(error))
                self._registry.events.publish(AllocationRefused.of(self.resource, error))
                await self._flush_lists()
            raise
        return fast_codec.encode_allocate_response(grants)

    def _take_back(self, claims: Iterable[Claim]) -> None:
        """Release what a failed request has claimed.

        A share that had a lease before keeps it: its earlier holder may still run. The kubelet's
        next lists decide, as about any claim that was answered.
        """
        new = tuple(share for claim in claims for share in claim.newly_claimed)
        held = tuple(share for claim in claims for share in claim.shares if share not in new)
        if new:
            self._registry.apply(SharesReleased(new, self._clock()))
        if held:
            self._registry.apply(SharesClaimed(held, self._clock()))

    async def _grant(self, ids: Sequence[str], claims: list[Claim]) -> Grant:
        """Claim the shares, then ask the backend: meanwhile no other request can get them."""
        snapshot = self._registry.snapshot
        backend = self._backend(self.resource)
        shares = find_shares(self.resource, sorted(ids), snapshot)
        refuse(shares, snapshot)
        backend.check(shares, snapshot)

        claims.append(Claim(shares, snapshot))
        # A kubelet that registered without PreStartContainer does not call it: provision here.
        if not (self._calls_before_start and _provisions_at_start(backend)):
            return await grant_shares(
                shares, backend, self._registry, self._ensure_cdi_names, self._clock
            )
        claimed = tuple(shares)
        self._registry.apply(SharesClaimed(claimed, self._clock()))
        # Also when the kubelet lists a holder meanwhile, it is still to provision.
        self._registry.apply(SharesPending(claimed, self._clock()))
        return await backend.grant(shares, snapshot)


def _provisions_at_start(backend: Backend) -> bool:
    return isinstance(backend, Provisions) and backend.provisions_at_start
