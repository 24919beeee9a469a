"""The configuration: `version: metagpu/v1`, read once, frozen.

The envelope is described here; what a pool says to a backend is described by that backend.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from metagpu.core import cdi
from metagpu.core.backend import Backend, Options
from metagpu.core.client import Mgctl
from metagpu.core.document import Document
from metagpu.core.enforcement import Enforcement
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import Gpu
from metagpu.core.injection import DeviceListStrategy, Injection
from metagpu.core.model import ResourceName
from metagpu.core.names import name_refusal
from metagpu.core.selector import Selector
from metagpu.core.units import Duration
from metagpu.core.xid import Severity

VERSION: Final = "metagpu/v1"

DEFAULT: Final = """\
version: metagpu/v1
pools:
  - name: all
    gpus: all
    backends:
      - backend: fraction
        resource: cnvrg.io/metagpu
        sharesPerGpu: 100
"""
"""What runs without a file: MetaGPU's behaviour, 100 shares of every GPU."""

_CDI_KIND: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
)
"""A vendor and a class, as CDI's specification allows them."""


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When a GPU goes out of service and when it comes back.

    Attributes:
        quiet_period: how long a GPU must pass its checks, without a new fault, before it serves
            again; 60 s is longer than the gap between the XIDs of one incident.
        rescan_period: how often all GPUs are looked at even when nothing was heard.
        xids: severities that differ from the table in `core/xid.py`.
    """

    quiet_period: Duration = Duration(60)
    rescan_period: Duration = Duration(30)
    xids: dict[int, Severity] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rescan_period <= 0:
            raise ValueError("rescanPeriod must be longer than 0")
        for code in self.xids:
            if code < 1:
                raise ValueError(f"{code} is no XID; they are numbered from 1")


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Some GPUs and the backends that may cut them. A GPU is in the first pool that selects it.

    A pool without backends keeps its GPUs from all others: they are offered to nobody, and `reason`
    says to people why that is so.
    """

    name: str
    backends: tuple[dict[str, Any], ...]
    gpus: Literal["all"] | Selector = "all"
    memory_enforcement: Enforcement = Enforcement()
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("a pool has a name, by which people are told of it")

    def refusal(self, gpu: Gpu) -> str | None:
        """Say why a GPU is not in this pool, `None` when it is."""
        return None if self.gpus == "all" else self.gpus.refusal(gpu)


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The file as a whole, before the backends have read their part."""

    version: Literal["metagpu/v1"]
    pools: tuple[Pool, ...]
    health: Health = Health()
    device_list_strategy: DeviceListStrategy | tuple[DeviceListStrategy, ...] = (
        DeviceListStrategy.ENVVAR
    )
    pass_device_specs: bool = True
    cdi_kind: str = cdi.KIND
    mgctl: Mgctl = Mgctl()

    @property
    def strategies(self) -> tuple[DeviceListStrategy, ...]:
        """How containers get to see their GPUs, in all ways together."""
        given = self.device_list_strategy
        return given if isinstance(given, tuple) else (given,)

    def injection(self, base: Injection) -> Injection:
        """Give the node's injection: the file's choices on what `base` knows of the host."""
        mounted = bool(base.pod_dir) and self.mgctl.in_pods

        return replace(
            base,
            strategies=frozenset(self.strategies),
            pass_device_specs=self.pass_device_specs,
            cdi_kind=self.cdi_kind,
            pod_dir=base.pod_dir if mounted else "",
            command=(self.mgctl.path or "") if mounted else "",
        )


class Config:
    """A configuration that can be used: every part was read by who understands it.

    Attributes:
        file: where it came from, for messages.
        envelope: the file's own keys.
        options: for each pool, the options of its backends, in order.
    """

    def __init__(self, document: Document, backends: Mapping[str, type[Backend]]) -> None:
        self._document = document
        self._backends = backends
        self.file = document.file
        self.envelope = document.decode(Envelope)
        self.options: dict[str, tuple[Options, ...]] = {}

        if not self.envelope.pools:
            raise document.error("pools", "there is no pool; give at least one")
        self._check_injection()
        for number, pool in enumerate(self.envelope.pools):
            path = f"pools[{number}]"
            if pool.name in self.options:
                raise document.error(f"{path}.name", f"{pool.name!r} is taken; name each pool once")
            self.options[pool.name] = tuple(
                self._options(f"{path}.backends[{place}]", given.get("backend"))
                for place, given in enumerate(pool.backends)
            )
        # What the backends have to say against their options is said now.
        self.pools(self.envelope.injection(Injection()))

    def error(self, path: str, problem: str) -> ConfigError:
        """Make the error for a problem with what the file says at `path`, or with all of it."""
        if not path:
            return ConfigError(problem, file=self.file)
        return self._document.error(path, problem)

    def _check_injection(self) -> None:
        """Refuse what containers cannot be given their GPUs by."""
        strategies, kind = self.envelope.strategies, self.envelope.cdi_kind
        if not strategies:
            raise self._document.error(
                "deviceListStrategy", "there is no strategy; give at least one"
            )
        if {DeviceListStrategy.CDI_CRI, DeviceListStrategy.CDI_ANNOTATIONS}.issubset(strategies):
            raise self._document.error(
                "deviceListStrategy", "cdi-cri and cdi-annotations inject twice; choose one of them"
            )
        if not _CDI_KIND.fullmatch(kind):
            problem = f"{kind!r} is no vendor/class; write one like nvidia.com/gpu"
            raise self._document.error("cdiKind", problem)

    def _options(self, path: str, name: object) -> Options:
        if not isinstance(name, str) or name not in self._backends:
            known = ", ".join(sorted(self._backends))
            problem = f"{name!r} is no backend" if name else "missing key `backend`"
            raise self._document.error(f"{path}.backend", f"{problem}; allowed: {known}")

        return self._document.decode(self._backends[name].options_type, path)

    def pools(self, injection: Injection) -> list[tuple[Pool, list[Backend]]]:
        """Make the backends of every pool, ready to cut GPUs.

        A resource may be offered by several pools (T4s in 15 shares, A100s in 40) if they use the
        same backend for it.

        Raises:
            ConfigError: if a backend refuses its options, two backends claim one resource name, or
                a name is not legal.
        """
        made = []
        claims: dict[ResourceName, str] = {}

        for number, pool in enumerate(self.envelope.pools):
            backends = []
            for place, options in enumerate(self.options[pool.name]):
                try:
                    backend = self._backends[options.backend].configured(options, injection)
                    for resource in backend.resources:
                        _claim(resource, backend.name, claims)
                except ValueError as error:
                    path = f"pools[{number}].backends[{place}]"
                    key = ".resource" if isinstance(error, _NameError) else ""
                    raise self._document.error(path + key, str(error)) from None
                backends.append(backend)
            made.append((pool, backends))

        return made


def parse(text: str, file: str, backends: Mapping[str, type[Backend]]) -> Config:
    """Read a configuration.

    Raises:
        ConfigError: naming file, line and path, what is wrong and what is allowed.
    """
    return Config(Document(text, file), backends)


class _NameError(ValueError):
    """Raised when a resource cannot be offered under its name."""


def _claim(resource: ResourceName, backend: str, claims: dict[ResourceName, str]) -> None:
    if refusal := name_refusal(resource):
        raise _NameError(f"{resource!r} is no resource name: {refusal}")

    first = claims.setdefault(resource, backend)
    if first != backend:
        raise _NameError(
            f"{resource} is offered by backend {first} already and cannot be offered by {backend} "
            "too; give it another `resource`"
        )
