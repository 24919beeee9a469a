"""The configuration in force: read, taken if it is good, and replaced by the next good one."""

from collections.abc import Awaitable, Callable
from time import time
from typing import Any

import anyio
import structlog
from anyio import to_thread

from metagpu.core.config import Config
from metagpu.core.errors import ConfigError
from metagpu.core.news import ConfigurationRefused
from metagpu.core.profiles import Instruction
from metagpu.plugins.cluster import Outcome
from metagpu.plugins.config_files import changes
from metagpu.plugins.metrics.sources import Configuration
from metagpu.sources import NOTHING, Backends, Loaded, Source, Text

log = structlog.get_logger()


class Adoption:
    """Reads a source whenever it may say something else; what is wrong leaves all as it is.

    Attributes:
        loaded: what is in force.
        error: why what the source says now is not in force, `None` if it is.
    """

    loaded: Loaded

    def __init__(
        self,
        source: Source,
        backends: Backends,
        adopt: Callable[[Config], Awaitable[None]],
        *,
        patient: bool = False,
        publish: Callable[[ConfigurationRefused], None] = lambda _: None,
    ) -> None:
        """Read the source for the first time; `adopt` is not called for that.

        Args:
            source: where the configuration is.
            backends: those that are installed.
            adopt: puts a configuration in force, or raises ConfigError.
            patient: whether the cluster may still say what the source does not: a profile that
                only a label can choose is no error then, and nothing is offered until it is chosen.
            publish: tells of what is refused, but not of what the cluster says: that is its answer.

        Raises:
            ConfigError: if the configuration is wrong.
        """
        self.error: str | None = None
        self._taken = self._refused = 0
        self._taken_at = self._refused_at = 0.0
        self._source = source
        self._backends = backends
        self._adopt = adopt
        self._publish = publish
        self._read: tuple[Text, ...] | None = None
        self._told: frozenset[str] = frozenset()
        self._reading = anyio.Lock()

        try:
            self._read = source.read()
            self._take(source.understand(self._read, backends))
            self._note_taken()
        except ConfigError as error:
            if not patient:
                raise
            log.warning("nothing is offered before the cluster says what", error=str(error))
            self._take(source.understand((Text("<nothing>", NOTHING),), backends))
            self._read = None
            self._note_refused(str(error))

    async def reload(self, *, again: bool = True) -> None:
        """Read the configuration; `again` also if the files are as they were.

        Whatever goes wrong is told, and what is in force stays.
        """
        if (refused := await self._reload(again=again)) is not None:
            self._publish(ConfigurationRefused(refused, time()))

    async def _reload(self, *, again: bool) -> str | None:
        """Read the configuration; give why it is refused, if that is news."""
        async with self._reading:
            try:
                read = await to_thread.run_sync(self._source.read)
                if read == self._read and not again:
                    return None
                self._read = read
                loaded = await to_thread.run_sync(self._source.understand, read, self._backends)
                await self._adopt(loaded.config)
            except ConfigError as error:
                known, self._read = self.error, None
                self._note_refused(str(error))
                if self.error == known and not again:
                    return None
                log.error(
                    "the configuration was not taken; the last good one stays", error=self.error
                )
                return self.error
            except Exception as error:
                self._read = None
                log.exception(
                    "the configuration could not be taken, by a fault of metagpu's own; the last "
                    "good one stays"
                )
                self._note_refused(f"metagpu failed ({type(error).__name__}: {error}); see its log")
                return self.error
            self._take(loaded)
            self._note_taken()
            log.info("configuration read", config=loaded.config.file)
            return None

    async def follow(self, told: Instruction) -> Outcome:
        """Go by what the cluster says of this node's configuration, as far as it can be taken."""
        source = self._source.told(told)
        if source.situation != self._source.situation:
            self._read = None  # the same files say something else now
        self._source = source
        await self._reload(again=False)
        lays_mig = any(form.startswith("mig-parted") for form in self.loaded.formats)
        pools = self.loaded.config.envelope.pools
        kept = "; ".join(dict.fromkeys(filter(None, (pool.reason for pool in pools))))
        return Outcome(self.error, lays_mig, kept if lays_mig else "")

    async def follow_files(self) -> None:
        """Take what the files say as soon as they say something else."""
        async for _ in changes(self._source.paths):
            await self.reload(again=False)

    def report(self) -> dict[str, Any]:
        """Say where the configuration comes from, and what of it does not hold."""
        return {
            "file": self.loaded.config.file,
            "formats": list(self.loaded.formats),
            "profiles": list(self.loaded.profiles),
            "notes": [str(note) for note in self.loaded.notes],
            "error": self.error,
        }

    def measured(self) -> Configuration:
        """Say the same in numbers, and how often the source was read with what outcome."""
        return Configuration(
            file=self.loaded.config.file,
            forms=self.loaded.formats,
            profiles=self.loaded.profiles,
            notes=len(self.loaded.notes),
            good=self.error is None,
            taken=self._taken,
            taken_at=self._taken_at,
            refused=self._refused,
            refused_at=self._refused_at,
        )

    def _note_taken(self) -> None:
        self._taken += 1
        self._taken_at = time()

    def _note_refused(self, error: str) -> None:
        self.error = error
        self._refused += 1
        self._refused_at = time()

    def _take(self, loaded: Loaded) -> None:
        """Go by a configuration from now on; tell what of it is not honoured, each thing once."""
        self.loaded, self.error = loaded, None
        for note in loaded.notes:
            if str(note) not in self._told:
                log.warning("in the configuration", note=str(note))
        self._told = frozenset(map(str, loaded.notes))
