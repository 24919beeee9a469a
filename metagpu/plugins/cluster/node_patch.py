"""Patches of our Node: the only two requests that write it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from metagpu.plugins.cluster.node_object import FIELD_MANAGER, KubeObject
from metagpu.plugins.cluster.watch import WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

CONFLICT: Final = 409
"""The API server's answer where another client was faster, or manages a field."""
APPLY_PATCH: Final = "application/apply-patch+yaml"
MERGE_PATCH: Final = "application/merge-patch+json"


class NodePatcher(msgspec.Struct, frozen=True):
    """Writes the given fields of the Node, and no others."""

    client: "KubeClient"
    node: WatchedObject

    async def patch(self, subresource: str, body: KubeObject) -> None:
        """Merge fields into the Node, or into a subresource such as `/status`.

        Raises:
            ClusterError: the API server refuses the patch, or does not answer in time.
        """
        await self.client.call("PATCH", self._path + subresource, body=body, content=MERGE_PATCH)

    async def apply(
        self, subresource: str, fields: Mapping[str, Any], *, force: bool = False
    ) -> None:
        """Apply fields as our field manager.

        A field of an earlier apply that is left out now is removed.

        Raises:
            ClusterError: as `patch`; status 409 and `fields` where others manage the fields.
        """
        metadata = {"name": self.node.name, **fields.get("metadata", {})}
        if self.node.object is not None:
            # Without the uid, the API server would create a Node that is missing.
            metadata["uid"] = self.node.object["metadata"].get("uid")
        body = {"apiVersion": "v1", "kind": "Node", **fields, "metadata": metadata}
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        await self.client.call(
            "PATCH", self._path + subresource, query=query, body=body, content=APPLY_PATCH
        )

    @property
    def _path(self) -> str:
        return f"{self.node.path}/{self.node.name}"
