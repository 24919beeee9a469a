"""Status and usage of this node as JSON, for viewers of the cluster.

It names pods, so each request carries a viewer's token: the port itself may be open to all pods.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.reports.reading import ReportPart
from metagpu.core.reports.schema.usage import NodeReports
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.messages import HttpRequest, HttpResponse
from metagpu.plugins.http.server import Page, PageServer, SingleFlight
from metagpu.plugins.web.access import JSON, TokenCheck, refusal_of, status_response

STATUS: Final = "/api/v1/status"
USAGE: Final = "/api/v1/usage"


class StatusApi:
    """Serves reports of this node to viewers.

    Attributes:
        server: the HTTP server of the reports.
    """

    def __init__(
        self,
        address: ListenAddress,
        reports: NodeReports,
        tokens: TokenCheck,
        timing: HttpTiming = HttpTiming(),  # noqa: B008 - frozen
    ) -> None:
        self._tokens = tokens
        self._status = SingleFlight[bytes](STATUS, _encoded(reports.status), timing.page_age)
        self._usage = SingleFlight[bytes](USAGE, _encoded(reports.usage), timing.page_age)
        pages = {STATUS: self._page(self._status), USAGE: self._page(self._usage)}
        self.server = PageServer(address, pages, timing, name="status-api")

    async def run(self) -> None:
        """Serve until cancelled; a failure here ends nothing else."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._status.run)
            group.start_soon(self._usage.run)
            group.start_soon(partial(run_with_restart, self._tokens.run, "review of tokens"))
            group.start_soon(partial(run_with_restart, self.server.run, "status API"))

    def _page(self, report: SingleFlight[bytes]) -> Page:
        async def page(request: HttpRequest) -> HttpResponse:
            if (refusal := await refusal_of(self._tokens, request)) is not None:
                return refusal
            body = await report.get()
            if body is None:
                text = "metagpu failed to make the report; its log has the details"
                return status_response(HTTPStatus.INTERNAL_SERVER_ERROR, text)
            return HttpResponse(HTTPStatus.OK, body, JSON)

        return page


def _encoded(report: Callable[[], Awaitable[ReportPart]]) -> Callable[[], Awaitable[bytes]]:
    async def encoded() -> bytes:
        return await to_thread.run_sync(msgspec.json.encode, await report())

    return encoded
