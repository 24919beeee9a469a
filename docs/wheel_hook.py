"""Adds the manual pages to the wheel, where `make man` has written them."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):  # type: ignore[type-arg]  # of any configuration
    """The hook of the wheel: `man` finds `share/man` beside the programs in the path."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the hook's shape
        """Add the pages, if they are there: an image and an editable installation need none."""
        pages = Path(self.root, "dist", "man")
        if pages.is_dir():
            build_data["shared_data"][str(pages)] = "share/man"
