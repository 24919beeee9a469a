"""What we write of our Node: the only two ways."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.node import MANAGER, Object

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client

CONFLICT: Final = 409
"""What the API server answers where somebody else was faster, or manages a field."""
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"


class Writer(msgspec.Struct, frozen=True):
    """Writes the Node, and nothing that it was not told to."""

    client: "Client"
    node: Followed

    async def patch(self, part: str, body: Object) -> None:
        """Merge fields into the Node, or into a part of it such as `/status`.

        Raises:
            ClusterError: if it is refused, or there is no answer in time.
        """
        await self.client.call("PATCH", self._path + part, body=body, content=_MERGE)

    async def apply(self, part: str, said: Mapping[str, Any], *, force: bool = False) -> None:
        """Apply fields in our name: what we applied before and leave out now goes.

        Raises:
            ClusterError: as `patch`; with status 409 and `fields` if others manage some of them.
        """
        metadata = {"name": self.node.name, **said.get("metadata", {})}
        if self.node.object is not None:
            metadata["uid"] = self.node.object["metadata"].get("uid")  # or it would make a Node
        body = {"apiVersion": "v1", "kind": "Node", **said, "metadata": metadata}
        query = {"fieldManager": MANAGER, "force": "true" if force else "false"}
        await self.client.call("PATCH", self._path + part, query=query, body=body, content=_APPLY)

    @property
    def _path(self) -> str:
        return f"{self.node.path}/{self.node.name}"
