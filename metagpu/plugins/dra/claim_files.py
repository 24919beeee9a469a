"""CDI specifications of prepared ResourceClaims, one file for each claim.

A file is written before the kubelet gets its names, and removed when the claim is unprepared. It
stays while no daemon runs: containers restart then too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from anyio import to_thread

from metagpu.core.errors import CdiError
from metagpu.core.grants import cdi
from metagpu.core.grants.grant import Grant
from metagpu.core.runtime.files import replace_text

_PREFIX: Final = "metagpu.io-claim-"

log = structlog.get_logger()


@dataclass(frozen=True)
class ClaimFiles:
    """The files of all claims, in the folder of CDI specifications."""

    folder: Path

    async def write(self, uid: str, devices: Mapping[str, Grant]) -> None:
        """Write the file of a claim: what containers get by each of its CDI names.

        Raises:
            CdiError: the file cannot be written; the text names it.
        """
        path, text = self._path(uid), cdi.build_claim_spec(devices)
        try:
            await to_thread.run_sync(replace_text, path, text)
        except OSError as error:
            raise CdiError(f"{path} cannot be written: {error.strerror or error}") from error

    async def exists(self, uid: str) -> bool:
        """Return whether a claim has its file."""
        return await to_thread.run_sync(self._path(uid).exists)

    async def remove(self, uid: str) -> None:
        """Remove the file of a claim, if there is one."""
        await to_thread.run_sync(_unlink, self._path(uid))

    async def remove_others(self, uids: Collection[str]) -> None:
        """Remove the files of all claims but these."""
        await to_thread.run_sync(self._remove_others, frozenset(self._path(it) for it in uids))

    def _remove_others(self, kept: frozenset[Path]) -> None:
        for path in self.folder.glob(f"{_PREFIX}*.json"):
            if path not in kept:
                _unlink(path)

    def _path(self, uid: str) -> Path:
        return self.folder / f"{_PREFIX}{uid}.json"


def _unlink(path: Path) -> None:
    """Remove a file.

    One that stays harms nobody: no container names its devices any more.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cdi specification not removed", file=str(path), error=str(error))
