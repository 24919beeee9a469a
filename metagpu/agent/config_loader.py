"""The configuration, read from its source and applied when the source changes."""

import ctypes
from hashlib import sha256
from time import time
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.agent.config_source import (
    NO_SHARING,
    Backends,
    ConfigSource,
    ConfigText,
    Loaded,
)
from metagpu.agent.config_watch import changes
from metagpu.agent.context import NodeContext
from metagpu.agent.layout_manager import LayoutManager
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.profiles import (
    GPUS_STAY,
    LAST_GOOD,
    NOTHING_OFFERED,
    OPTION_FIRST,
    ClusterChoice,
    ConfigOutcome,
    ConfigStatus,
    has_profile,
)
from metagpu.core.errors import InternalError
from metagpu.core.model.gpu import mig_models
from metagpu.core.reports.schema.daemon import ConfigurationReport
from metagpu.core.state.events import ConfigRejected

NOTHING: Final = "<nothing>"
"""The name of the configuration in force where there is none."""
_HASH_DIGITS: Final = 12

log = structlog.get_logger()


class InitialConfig(msgspec.Struct, frozen=True):
    """A source as it is read before the agent runs.

    Attributes:
        loaded: the configuration to begin with; nothing is offered by it if there is an error.
        texts: the source's texts; `None` with an error.
        error: why there is no configuration.
    """

    loaded: Loaded
    texts: tuple[ConfigText, ...] | None
    error: ConfigError | None = None


def read_initial(
    source: ConfigSource, backends: Backends, *, reports_errors: bool = False
) -> InitialConfig:
    """Read a source for the first time. Blocks.

    With `reports_errors`, an error is part of the result: the daemon reports it, and reads the
    source again when that changes.

    Raises:
        ConfigError: if the configuration is wrong.
    """
    try:
        texts = source.read()
        return InitialConfig(source.parse(texts, backends), texts)
    except ConfigError as error:
        if not reports_errors:
            raise
        nothing = source.parse((ConfigText(NOTHING, NO_SHARING),), backends)
        return InitialConfig(nothing, None, error)


def _return_memory() -> None:
    """Return freed memory to the system, which only glibc keeps for itself. Blocks."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class ConfigLoader:
    """The reader of a source, which applies each change; an error changes nothing.

    Attributes:
        loaded: the configuration in force, and where it comes from.
        error: why the source's present text is not in force, `None` if it is; `reason` names the
            kind of the error.
    """

    loaded: Loaded

    def __init__(
        self,
        context: NodeContext,
        source: ConfigSource,
        initial: InitialConfig,
        layout_manager: LayoutManager,
    ) -> None:
        self.error: str | None = None
        self.reason: str | None = None
        self._accepted = self._rejected = 0
        self._accepted_at = self._rejected_at = 0.0
        self._context = context
        self._source = source
        self._layout_manager = layout_manager
        # The texts in force, and the context in which the same files may mean something else.
        self._content = initial.texts and (initial.texts, source.meaning)
        self._logged: frozenset[str] = frozenset()
        self._reading = anyio.Lock()

        self._layout = initial.loaded.layout  # of what was read last, be it in force or not
        self._take(initial.loaded, source)
        if initial.error is None:
            self._count_accepted()
        else:
            self._count_rejected(str(initial.error), initial.error.reason)
            if initial.error.reason is ConfigReason.NO_CHOICE:
                log.warning(
                    "configuration waits for the cluster", error=self.error, reason=self.reason
                )
            else:
                self._log_rejected()

    async def reload(self, *, again: bool = True) -> None:
        """Read the source and apply it, with `again` also if its texts are as they were.

        An error is logged and published, and the configuration in force stays.
        """
        if (refused := await self._reload(again=again)) is not None:
            self._context.registry.events.publish(ConfigRejected(refused, time(), self.effect))

    async def settle(self, *, strict: bool = False) -> None:
        """Read the source again if it depends on the GPUs, which are read or have changed.

        An error is logged, or raised with `strict`.

        Raises:
            ConfigError: as `ConfigSource.parse`.
        """
        before, self._source = self._source, self._with_gpus(self._source)
        if self._source.meaning != before.meaning:
            await self._reload(again=False, strict=strict)

    def _with_gpus(self, source: ConfigSource) -> ConfigSource:
        gpus = self._context.registry.snapshot.gpus.values()
        models = mig_models(state.gpu for state in gpus)
        return replace(source, context=replace(source.context, models=models))

    async def _reload(self, *, again: bool, strict: bool = False) -> str | None:
        """Read and apply the source; return why it is refused, unless that was known."""
        async with self._reading:
            try:
                source = self._source
                texts = await to_thread.run_sync(source.read)
                content = texts, source.meaning
                if content == self._content and not again:
                    self._accepted_choice = source.cluster
                    return None
                self._content = None  # until it is in force: what is cut short is done again
                loaded = await to_thread.run_sync(source.parse, texts, self._context.backends)
                self._layout = loaded.layout
                await self._layout_manager.apply(loaded.config)
                self._content = content
            except ConfigError as error:
                # The traceback's frames hold what was built, until the next full collection.
                error.with_traceback(None)
                if strict:
                    raise
                known, self._content = self.error, None
                self._count_rejected(str(error), error.reason)
                if self.error == known and not again:
                    return None
                self._log_rejected()
                return self.error
            except Exception as error:
                self._content = None
                log.exception(
                    "configuration failed by a fault of metagpu's own", effect=self.effect
                )
                self._count_rejected(
                    f"metagpu failed ({type(error).__name__}: {error}); see its log",
                    InternalError.reason,
                )
                return self.error
            self._take(loaded, source)
            self._count_accepted()
            await to_thread.run_sync(_return_memory)
            log.info("configuration applied", config=loaded.config.file)
            return None

    async def follow_cluster(self, choice: ClusterChoice) -> None:
        """Apply what the cluster chooses for this node, once the GPUs are known."""
        await self._context.surveyed.wait()
        self._source = self._with_gpus(self._source.with_cluster(choice))
        await self._reload(again=False)

    def outcome(self) -> ConfigOutcome:
        """Return what has become of the cluster's choice by now."""
        if self.error is not None and self._source.cluster != self._accepted_choice:
            return ConfigOutcome(self.error, bool(self._layout.known), effect=self.effect)
        layout = self.loaded.layout
        lays_mig, pools = bool(layout.known), self.loaded.config.root.pools
        missing = [*filter(None, (pool.reason for pool in pools)), *self._misfits]
        reason = "; ".join(dict.fromkeys(missing))
        if refusal := layout.refusal or self._contradicted_label():
            return ConfigOutcome(refusal, lays_mig, effect=GPUS_STAY)
        if ignored := self._ignored_label():
            return ConfigOutcome(ignored, lays_mig, effect=OPTION_FIRST)
        return ConfigOutcome(None, lays_mig, reason if lays_mig else "")

    def _ignored_label(self) -> str:
        """Return which label has no effect, and the option before it; empty for none.

        A choice whose configuration is being read now has no outcome yet.
        """
        source, choice = self._source, self._accepted_choice
        if choice.profile and not has_profile(self.loaded.profiles, choice.profile):
            instead = ", ".join(self.loaded.profiles) or "a file without profiles"
            return (
                f"the label {choice.label}={choice.profile} has no effect: "
                f"{source.profile_choice.option} has precedence; in force: {instead}"
            )
        layout, wanted = self.loaded.layout, choice.mig_config
        if layout.known and wanted and wanted != layout.name:
            return (
                f"the label nvidia.com/mig.config={wanted} has no effect: "
                f"--mig-config has precedence; in force: {layout.name}"
            )
        return ""

    def _contradicted_label(self) -> str:
        """Return which label a file that knows no layouts contradicts; empty for none."""
        choice, config = self._accepted_choice, self.loaded.config
        wanted = choice.mig_config
        if self.loaded.layout.known or not wanted or choice.mig_manager or choice.profile == wanted:
            return ""
        backends = [options for pool in config.root.pools for options in pool.backends]
        mig = [each for each in backends if each["backend"] == "mig" and not each.get("disableMig")]
        if any(each.get("existing") for each in mig) or (wanted == "all-disabled" and not mig):
            return ""
        return (
            f"the label nvidia.com/mig.config={wanted} has no effect: {config.file} says which MIG "
            "instances there are; remove the label, or choose a profile with metagpu.io/config"
        )

    @property
    def effect(self) -> str:
        """The effect of an error: what is in force instead."""
        return NOTHING_OFFERED if self.loaded.config.file == NOTHING else LAST_GOOD

    @property
    def _misfits(self) -> list[str]:
        """The GPUs that can have nothing of their pool, each with the reason."""
        return list(map(str, self._context.layout.misfits))

    async def follow_files(self) -> None:
        """Apply the files as soon as their texts change, until cancelled."""
        async for _ in changes(self._source.paths, self._context.timing.config_watch):
            await self.reload(again=False)

    def report(self) -> ConfigurationReport:
        """Return where the configuration comes from, and what of it is not in force."""
        return ConfigurationReport(
            file=self.loaded.config.file,
            formats=list(self.loaded.formats),
            profiles=list(self.loaded.profiles),
            notes=[str(note) for note in self.loaded.notes],
            device_list_strategy=[str(strategy) for strategy in self.loaded.config.root.strategies],
            error=self.error,
            reason=self.reason,
            effect=self.effect if self.error else None,
            misfits=self._misfits,
            mig_layout=self.loaded.layout.name,
        )

    def to_metrics(self) -> ConfigStatus:
        """Return the same as numbers, and how often the source was applied and refused."""
        return ConfigStatus(
            file=self.loaded.config.file,
            formats=self.loaded.formats,
            profiles=self.loaded.profiles,
            hash=sha256(self.loaded.text.encode()).hexdigest()[:_HASH_DIGITS],
            ignored_settings=len(self.loaded.notes),
            is_current=self.error is None,
            accepted=self._accepted,
            accepted_at=self._accepted_at,
            rejected=self._rejected,
            rejected_at=self._rejected_at,
        )

    def _count_accepted(self) -> None:
        self._accepted += 1
        self._accepted_at = time()

    def _log_rejected(self) -> None:
        log.error(
            "configuration rejected", error=self.error, reason=self.reason, effect=self.effect
        )

    def _count_rejected(self, error: str, reason: str) -> None:
        self.error, self.reason = error, reason
        self._rejected += 1
        self._rejected_at = time()

    def _take(self, loaded: Loaded, source: ConfigSource) -> None:
        """Record the configuration in force and the source that it was read from.

        A setting that is not honoured is logged once.
        """
        self.loaded, self.error, self.reason = loaded, None, None
        self._accepted_choice = source.cluster
        self._source = replace(
            self._source,
            last_layout=loaded.layout.name,
            had_default=source.chooses_in_cluster and source.cluster.profile is None,
        )
        for note in loaded.notes:
            if str(note) not in self._logged:
                log.warning("configuration setting not honoured", note=str(note))
        self._logged = frozenset(map(str, loaded.notes))
