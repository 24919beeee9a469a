"""The API server over one connection, for tests with hundreds of requests."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Self
from urllib.parse import urlsplit

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document

CALL_S = 60.0
NOT_FOUND = 404
REFUSED = 400


class Api:
    """The API server with an administrator's certificate."""

    def __init__(self, url: str, authority: str, certificate: str, key: str) -> None:
        address = urlsplit(url)
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        self._connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, context=context, timeout=CALL_S
        )

    def __enter__(self) -> Self:
        """Return the client; the first call connects."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._connection.close()

    def pods(self, namespace: str) -> dict[str, Document]:
        """Return all pods of a namespace, by name."""
        return self.objects(_pods(namespace))

    def objects(self, path: str) -> dict[str, Document]:
        """Return all objects of a path, such as `/api/v1/nodes`, by name."""
        return {item["metadata"]["name"]: item for item in self.call("GET", path)["items"]}

    def create(self, namespace: str, pod: Mapping[str, object]) -> None:
        """Create a pod."""
        self.call("POST", _pods(namespace), pod)

    def delete(self, namespace: str, name: str, grace_s: int = 1) -> None:
        """Start the deletion of a pod; a missing pod is no error."""
        self.call("DELETE", f"{_pods(namespace)}/{name}", {"gracePeriodSeconds": grace_s})

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of an answer as they come, until its end or `interrupt`."""
        self._connection.timeout = None
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        while line := answer.readline():
            yield line

    def interrupt(self) -> None:
        """End the answer that another thread reads."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Document:
        """Send a request; a missing object is no error of a deletion.

        Raises:
            RigError: the API server does not answer, or refuses; the text is its own.
        """
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request(method, path, content, headers)
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next call connects again
            raise RigError(f"{method} {path}: {error!r}") from error

        if answer.status >= REFUSED and (method, answer.status) != ("DELETE", NOT_FOUND):
            raise RigError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        found: Document = json.loads(text)
        return found


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"
