"""Access of viewers by a token, and refusals in Kubernetes' own shape."""

from http import HTTPStatus
from typing import Final, Protocol

import msgspec

from metagpu.plugins.http.messages import HttpRequest, HttpResponse

TOKEN_HEADER: Final = "metagpu-token"  # noqa: S105 - the header's name
"""The header with a viewer's token. The API server keeps `Authorization` to itself."""
JSON: Final = "application/json"


class TokenCheck(Protocol):
    """A check of viewers' tokens."""

    async def run(self) -> None:
        """Hold what the check needs, until cancelled."""

    async def check(self, token: str) -> str:
        """Return why a token gives no access, an empty text for a viewer's.

        Raises:
            ConnectionError: the token could not be checked; the message says why.
        """
        ...


async def refusal_of(tokens: TokenCheck, request: HttpRequest) -> HttpResponse | None:
    """Return the response to a request that is not a viewer's, `None` for a viewer's."""
    try:
        problem = await tokens.check(request.headers.get(TOKEN_HEADER, ""))
    except ConnectionError as error:
        return status_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    # Not 401: the API server's clients would renew their own credentials.
    return status_response(HTTPStatus.FORBIDDEN, problem) if problem else None


def status_response(status: HTTPStatus, message: str) -> HttpResponse:
    """Return an error in the shape of Kubernetes' own, whose clients show the message."""
    body = {"kind": "Status", "apiVersion": "v1", "code": int(status), "message": message}
    return HttpResponse(status, msgspec.json.encode(body), JSON)
