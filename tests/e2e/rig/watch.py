"""A watch of one collection of the API server, in a thread: what changed, in which order."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Self

from tests.e2e.rig.api import Api
from tests.e2e.rig.kubectl import Document

Take = Callable[[float, str, Document], None]
"""Takes the time, the kind of a change (`ADDED`, ...), and the object."""


class Watch:
    """Reports the changes of a collection until the block ends.

    The `resourceVersion` of one object says whether it changed before another one of any kind.
    """

    def __init__(self, api: Api, path: str, take: Take) -> None:
        """Store what to watch; a thread calls TAKE."""
        self._api, self._path, self._take = api, path, take
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ended = False

    def __enter__(self) -> Self:
        """Start to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch."""
        self._ended = True
        self._api.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            try:
                for line in self._api.lines(f"{self._path}?watch=true"):
                    event = json.loads(line)
                    if event["type"] in {"ADDED", "MODIFIED", "DELETED"}:
                        self._take(time.time(), event["type"], event["object"])
            except (OSError, http.client.HTTPException, ValueError, AttributeError):
                if not self._ended:
                    raise
