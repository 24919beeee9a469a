"""What the kubelet calls for one resource: the DevicePlugin service.

Everything is answered from the registry's snapshot. What has to be made in hardware is awaited in
Allocate, or at the container's start, and then named in the CDI specification.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

import anyio
import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from metagpu.core import cdi
from metagpu.core.backend import Backend
from metagpu.core.errors import GpuUnhealthy, RequestError
from metagpu.core.facts import SharesAwaited, SharesGranted, SharesReleased
from metagpu.core.grant import Grant
from metagpu.core.model import ResourceName, Share
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import hot, wire
from metagpu.plugins.claims import Claim, claimed, refuse_unavailable
from metagpu.plugins.making import is_made, made, made_anew
from metagpu.plugins.record import Call, Outcome, ResourceRecord
from metagpu.plugins.serving import Calls

if TYPE_CHECKING:
    from grpclib.server import Stream

TELL_DEADLINE: Final = 1.0
"""Seconds that a refusal waits for the list it should follow."""

Describe = Callable[[frozenset[str]], Awaitable[None]]
"""Has devices of these CDI names in the specification now, or raises why it has not."""

log = structlog.get_logger()


async def undescribed(_: frozenset[str]) -> None:
    """Where nobody writes a specification, names are somebody else's business."""


class Service:
    """Answers for one resource. `backend` is asked for at each call: a reload may change it.

    Attributes:
        record: counts what the kubelet asks; one of its own unless given.

    Args:
        describe: makes CDI names known to the container runtime.
    """

    def __init__(
        self,
        resource: ResourceName,
        registry: Registry,
        backend: Callable[[ResourceName], Backend],
        clock: Callable[[], float] = time.time,
        *,
        describe: Describe = undescribed,
        record: ResourceRecord | None = None,
    ) -> None:
        self.resource = resource
        self._registry = registry
        self._backend = backend
        self._clock = clock
        self._describe = describe
        self._calls_before_start = False
        self.record = record or ResourceRecord()
        self._list = wire.DeviceList(resource)
        self._tellers: set[Callable[[anyio.Event], None]] = set()
        self._log = log.bind(resource=resource)

    @property
    def pre_start(self) -> bool:
        """Whether the kubelet shall call before every container start."""
        backend = self._backend(self.resource)
        return backend.prepares or backend.defers

    def methods(self, calls: Calls) -> dict[str, Method]:
        """Give the service's methods by gRPC path; lists register with `calls`."""

        async def list_and_watch(stream: "Stream[bytes, bytes]") -> None:
            await stream.recv_message()
            with calls.lasting():
                await self._send_lists(stream)

        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            f"/v1beta1.DevicePlugin/{name}": Method(call, cardinality, bytes, bytes)
            for name, call, cardinality in (
                ("GetDevicePluginOptions", self._answering(self._options), unary),
                ("ListAndWatch", list_and_watch, streaming),
                (Call.PREFERRED, self._counted(Call.PREFERRED, self._preferred), unary),
                (Call.ALLOCATE, self._counted(Call.ALLOCATE, self._allocate), unary),
                (Call.PRE_START, self._counted(Call.PRE_START, self._pre_start), unary),
            )
        }

    @staticmethod
    def _answering(
        answer: Callable[[bytes], Awaitable[bytes]],
    ) -> Callable[["Stream[bytes, bytes]"], Awaitable[None]]:
        async def call(stream: "Stream[bytes, bytes]") -> None:
            request = await stream.recv_message()
            try:
                reply = await answer(request or b"")
            except Exception as error:
                raise wire.as_status(error) from error
            await stream.send_message(reply)

        return call

    def _counted(
        self, call: Call, answer: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[["Stream[bytes, bytes]"], Awaitable[None]]:
        record = self.record.calls[call]

        async def counted(request: bytes) -> bytes:
            began = perf_counter()
            try:
                reply = await answer(request)
            except BaseException as error:
                self.record.note_failure(call, perf_counter() - began, error)
                raise
            record.note(Outcome.ANSWERED, perf_counter() - began)
            return reply

        return self._answering(counted)

    async def _send_lists(self, stream: "Stream[bytes, bytes]") -> None:
        sending = anyio.Lock()

        async def send(done: anyio.Event) -> None:
            async with sending:  # two messages at once would mix on the stream
                view = self._list.view(self._registry.snapshot)
                await stream.send_message(self._list.encode(view))
            self.record.lists += 1
            done.set()

        async with anyio.create_task_group() as group:

            def tell(done: anyio.Event) -> None:
                group.start_soon(send, done)

            self._tellers.add(tell)
            try:
                async for _ in self._registry.watch(self._list.view):
                    await send(anyio.Event())
            finally:
                self._tellers.discard(tell)

    async def _tell(self) -> None:
        """Send the present list on every stream, so that the kubelet hears it before a refusal.

        Waiting for it ends after `TELL_DEADLINE`, sending does not: half a message would spoil all
        that follow on the stream.
        """
        sent = []
        for tell in self._tellers:
            sent.append(anyio.Event())
            tell(sent[-1])

        with anyio.move_on_after(TELL_DEADLINE):
            for done in sent:
                await done.wait()

    async def _options(self, _: bytes) -> bytes:
        self._calls_before_start = self.pre_start  # asked once in a registration
        return wire.options(pre_start=self._calls_before_start)

    async def _pre_start(self, request: bytes) -> bytes:
        snapshot, backend = self._registry.snapshot, self._backend(self.resource)
        shares = claimed(self.resource, hot.pre_start_request(request), snapshot)
        if backend.defers:
            snapshot = await self._begun(shares, backend)
        await backend.prepare(shares, snapshot)
        return b""

    async def _begun(self, shares: Sequence[Share], backend: Backend) -> Snapshot:
        """Have what a container is about to use made, and named; give what is known then.

        Raises:
            RequestError: if it cannot be, or not in time.
        """
        snapshot = self._registry.snapshot
        for share in shares:
            state = snapshot.gpus[share.gpu]
            if not state.verdict.healthy and not is_made(share, snapshot):
                raise GpuUnhealthy(self.resource, str(state.gpu), state.verdict.reason)
        snapshot = await made_anew(self._registry, shares, backend.patience or 0.0, self._clock)
        await self._describe(cdi.names_in(await backend.grant(shares, snapshot)))
        return snapshot

    async def _preferred(self, request: bytes) -> bytes:
        return hot.preferred_response(map(self._choice, hot.preferred_request(request)))

    def _choice(self, asked: hot.Preference) -> Sequence[str]:
        """Choose exactly as many ids as asked for, the required ones among them.

        Never fails: any error here would fail the pod, and a preference is only a wish.
        """
        chosen: list[str] = []
        snapshot = self._registry.snapshot
        offer = snapshot.offers.get(self.resource)

        if offer is not None:
            known = cast("Mapping[str, Share]", offer.shares).get
            available = list(filter(None, map(known, asked.available)))
            required = list(filter(None, map(known, asked.required)))
            try:
                backend = self._backend(self.resource)
                preferred = backend.prefer(available, required, asked.size, snapshot)
                chosen = [share.id for share in preferred]
            except Exception:  # noqa: BLE001 - whatever it is, the pod shall not fail of it
                self._log.exception("no preference could be made; the kubelet's order is used")

        if len(chosen) == asked.size:
            return chosen
        return list(dict.fromkeys([*asked.required, *chosen, *asked.available]))[: asked.size]

    async def _allocate(self, request: bytes) -> bytes:
        """Grant to each container what it asks for, or nothing to any of them."""
        claims: list[Claim] = []

        try:
            requests = hot.allocate_request(request)
            grants = [await self._grant(ids, claims) for ids in requests]
        except BaseException as error:
            if new := tuple(share for claim in claims for share in claim.new):
                self._registry.apply(SharesReleased(new, self._clock()))
            if isinstance(error, RequestError):
                self._log.warning("request refused", error=str(error))
                await self._tell()
            raise
        return hot.allocate_response(grants)

    async def _grant(self, ids: Sequence[str], claims: list[Claim]) -> Grant:
        """Claim the shares, then ask the backend: while it waits, nobody else can have them."""
        snapshot = self._registry.snapshot
        backend = self._backend(self.resource)
        shares = claimed(self.resource, sorted(ids), snapshot)
        refuse_unavailable(shares, snapshot)
        backend.check(shares, snapshot)

        claims.append(Claim(shares, snapshot))
        self._registry.apply(SharesGranted(tuple(shares), self._clock()))
        # A kubelet that was not told to call before a start does not: then all is done here.
        deferred = backend.defers and self._calls_before_start
        if backend.patience is not None and not deferred:
            snapshot = await made(self._registry, shares, backend.patience)
            # It took a while: the kubelet's account is awaited from now on.
            self._registry.apply(SharesGranted(tuple(shares), self._clock()))
        if deferred:  # whoever is told meanwhile as its holder, it is still to be made
            self._registry.apply(SharesAwaited(tuple(shares), self._clock()))
        grant = await backend.grant(shares, snapshot)
        if not deferred and (names := cdi.names_in(grant)):
            await self._describe(names)
        return grant
