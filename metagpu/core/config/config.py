"""The configuration `version: metagpu/v1`: its keys, and their validation.

The options of a backend are described by that backend.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from posixpath import basename, normpath
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.memory import ComputeEnforcement, ComputePolicy, MemoryEnforcement
from metagpu.core.config.selector import GpuSelector
from metagpu.core.config.units import Duration
from metagpu.core.contracts.backend import Backend, Options
from metagpu.core.contracts.capabilities import MemoryGuard, guard_of
from metagpu.core.grants import cdi
from metagpu.core.grants.injection import POD_FOLDER, DeviceListStrategy, Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.offers import Api, OfferPolicy
from metagpu.core.model.shares import ResourceName
from metagpu.core.model.xid_severity import Severity

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN_LIMIT = 244
"""253 characters of a DNS name, less the prefix `requests.` that Kubernetes adds."""
_DRIVER_LIMIT = 63


def name_problem(name: str) -> str | None:
    """Return why Kubernetes rejects an extended resource's name; `None` if valid.

    The rules are those of Kubernetes' IsExtendedResourceName: a domain, one `/`, a name.
    """
    domain, _, last = name.partition("/")

    if not last or "/" in last:
        return "it needs a domain, one `/` and a name, as in cnvrg.io/metagpu"
    if "kubernetes.io/" in name:
        return "kubernetes.io is Kubernetes' own domain"
    if domain.startswith("requests."):
        return "a domain must not begin with `requests.`"
    if len(domain) > _DOMAIN_LIMIT or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", domain):
        return f"the domain must be a lower-case DNS name of at most {_DOMAIN_LIMIT} characters"
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", last):
        return "the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, alphanumeric at both ends"
    return None


def driver_problem(name: str) -> str | None:
    """Return why Kubernetes rejects the name of a DRA driver; `None` if valid."""
    if len(name) > _DRIVER_LIMIT or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name):
        return f"it must be a lower-case DNS name of at most {_DRIVER_LIMIT} characters"
    return None


_NAME: Final = "mgctl"


class MgctlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The settings of `mgctl` in containers with shares.

    Attributes:
        in_pods: whether `mgctl` is mounted and its calls are answered.
        path: a second path of `mgctl` in containers, beside its own folder; `None` for none. The
            mount covers what an image has there, so the name of the file is always `mgctl`: the
            author of a configuration may not replace a program of somebody else's image.
    """

    in_pods: bool = True
    path: str | None = "/usr/local/bin/mgctl"

    def __post_init__(self) -> None:
        if self.path is not None and not _is_mountable(self.path):
            raise ValueError(
                f"path {self.path!r} cannot be mounted as a program; write one like "
                "/usr/local/bin/mgctl, or null"
            )
        if self.path is not None and basename(self.path) != _NAME:
            raise ValueError(
                f"path {self.path!r} would cover another program of every image; it has to end in "
                f"/{_NAME}, such as /usr/local/bin/{_NAME}"
            )


def _is_mountable(path: str) -> bool:
    """Return whether every container runtime accepts this path as a mount point."""
    return (
        path.startswith("/")
        and not path.startswith("//")
        and path not in {"/", POD_FOLDER}
        and normpath(path) == path
        and path.isprintable()
        and ":" not in path
    )


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
"""The configuration without a file: MetaGPU's behaviour, 100 shares of every GPU."""

_MAX_POOLS: Final = 64
_MAX_BACKENDS: Final = 16
"""Of one pool. Every GPU is compared with every pool, and shared by all backends of its own."""
_TWO_POOLS: Final = (
    "a pool has one API: make two pools, one with `api: device-plugin` and one with `api: dra`, "
    "each with GPUs of its own, such as `gpus: {index: 0-3}` and `gpus: {index: 4-7}`"
)
_CDI_KIND: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
)
"""A vendor and a class, as CDI's specification allows them."""


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The settings of the health watch.

    Attributes:
        quiet_period: the time that a GPU must pass its checks without a new fault before it
            returns to service; 60 s is longer than the gap between the XIDs of one incident.
        rescan_period: the time between two checks of all GPUs without an event of NVML.
        xids: severities that differ from the table in `core/model/xid_severity.py`.
        other_xids: the severity of all others; without it the table counts.
    """

    quiet_period: Duration = Duration(60)
    rescan_period: Duration = Duration(30)
    xids: dict[int, Severity] = msgspec.field(default_factory=dict)
    other_xids: Severity | None = None

    def __post_init__(self) -> None:
        if self.rescan_period <= 0:
            raise ValueError("rescanPeriod must be longer than 0")
        for code in self.xids:
            if code < 1:
                raise ValueError(f"{code} is not an XID; they are numbered from 1")


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A set of GPUs and the backends that may share them.

    A GPU is in the first pool that selects it. A pool without backends offers none of its GPUs, and
    no other pool does; `reason` explains that to people. With `offer: exact` several backends take
    turns in offering an idle GPU, and each has the option `offer` where nothing else is given.

    Attributes:
        api: the API of Kubernetes by which pods get the shares.
    """

    name: str
    backends: tuple[dict[str, Any], ...]
    gpus: Literal["all"] | GpuSelector = "all"
    memory_enforcement: MemoryEnforcement = MemoryEnforcement()
    compute_enforcement: ComputeEnforcement = ComputeEnforcement()
    reason: str = ""
    offer: OfferPolicy = OfferPolicy.EXACT
    api: Api = Api.DEVICE_PLUGIN

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("a pool needs a name; messages about its GPUs show it")

    @property
    def takes_turns(self) -> bool:
        """Return whether its backends take turns; with DRA the scheduler keeps them apart."""
        return self.offer is OfferPolicy.EXACT and self.api is Api.DEVICE_PLUGIN

    def exclusion_reason(self, gpu: Gpu) -> str | None:
        """Return why a GPU is not in this pool, `None` for a GPU that is."""
        if gpu.is_display_card:
            return "it is a display card"
        return None if self.gpus == "all" else self.gpus.exclusion_reason(gpu)


class DraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The settings of DRA.

    Attributes:
        driver: the name of the driver. ResourceClaims that are allocated have it: a new name leaves
            them without a driver.
    """

    driver: str = "gpu.metagpu.io"

    def __post_init__(self) -> None:
        if problem := driver_problem(self.driver):
            raise ValueError(f"{self.driver!r} is not a name of a driver: {problem}")


class MigStrategy(StrEnum):
    """NVIDIA's strategies for the names of MIG instances."""

    SINGLE = "single"
    MIXED = "mixed"


class StartHook(StrEnum):
    """The hook before a container's first process, by what follows its failure."""

    IGNORE = "ignore"
    FAIL = "fail"
    NONE = "none"


class RootConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The top-level keys of the file; the options of backends are not decoded yet."""

    version: Literal["metagpu/v1"]
    pools: tuple[Pool, ...]
    health: HealthConfig = HealthConfig()
    device_list_strategy: DeviceListStrategy | tuple[DeviceListStrategy, ...] = (
        DeviceListStrategy.ENVVAR
    )
    pass_device_specs: bool = True
    cdi_kind: str = cdi.KIND
    mig_strategy: MigStrategy | None = None
    mgctl: MgctlConfig = MgctlConfig()
    start_hook: StartHook = StartHook.NONE
    dra: DraConfig = DraConfig()

    @property
    def strategies(self) -> tuple[DeviceListStrategy, ...]:
        """The strategies as a tuple, also where the file has only one."""
        value = self.device_list_strategy
        return value if isinstance(value, tuple) else (value,)

    def injection(self, base: Injection) -> Injection:
        """Return the node's injection: `base` with the settings of the file."""
        mounted = bool(base.pod_dir) and self.mgctl.in_pods
        hooks = bool(base.start_hook) and self.start_hook is not StartHook.NONE

        return replace(
            base,
            strategies=frozenset(self.strategies),
            pass_device_specs=self.pass_device_specs,
            cdi_kind=self.cdi_kind,
            pod_dir=base.pod_dir if mounted else "",
            mgctl_path=(self.mgctl.path or "") if mounted else "",
            start_hook=(*base.start_hook, str(self.start_hook)) if hooks else (),
        )


class Config:
    """A valid configuration: every option was decoded by its backend.

    Attributes:
        file: the name of the file, for messages.
        envelope: the file's own keys.
        options: for each pool, the options of its backends, in order.

    Args:
        at_origin: turns what `error` returns into an error about the file that this text was
            converted from.
    """

    def __init__(
        self,
        document: Document,
        backends: Mapping[str, type[Backend]],
        at_origin: Callable[[ConfigError], ConfigError] = lambda error: error,
    ) -> None:
        self._at_origin = at_origin
        self._document = document
        self._backends = backends
        self.file = document.file
        _refuse_fronts(document)
        self.root = document.decode(RootConfig)
        self.options: dict[str, tuple[Options, ...]] = {}

        if not self.root.pools:
            problem = "there is no pool; write at least one"
            raise document.error("pools", problem, ConfigReason.MISSING)
        if (count := len(self.root.pools)) > _MAX_POOLS:
            problem = f"there are {count} pools; allowed: {_MAX_POOLS} at most"
            raise document.error("pools", problem, ConfigReason.TOO_LARGE)
        self._check_injection()
        for number, pool in enumerate(self.root.pools):
            path = f"pools[{number}]"
            if (count := len(pool.backends)) > _MAX_BACKENDS:
                problem = f"there are {count} backends; allowed: {_MAX_BACKENDS} at most"
                raise document.error(f"{path}.backends", problem, ConfigReason.TOO_LARGE)
            if pool.name in self.options:
                problem = f"{pool.name!r} is taken; name each pool once"
                raise document.error(f"{path}.name", problem, ConfigReason.GIVEN_TWICE)
            self.options[pool.name] = tuple(
                self._options(f"{path}.backends[{place}]", given, pool.offer)
                for place, given in enumerate(pool.backends)
            )
            self._check_compute(path, pool)
        # Backends reject unusable options here, when the file is read.
        self.build_backends(self.root.injection(Injection()))

    def error(self, path: str, problem: str, reason: ConfigReason) -> ConfigError:
        """Return the error for a problem at `path`; an empty path means the whole file."""
        if not path:
            return ConfigError(problem, reason, file=self.file)
        return self._at_origin(self._document.error(path, problem, reason))

    def _check_injection(self) -> None:
        """Reject settings with which containers would get no GPU, or get one twice."""
        strategies, kind = self.root.strategies, self.root.cdi_kind
        if not strategies:
            raise self._document.error(
                "deviceListStrategy",
                "there is no strategy; write at least one",
                ConfigReason.MISSING,
            )
        if {DeviceListStrategy.CDI_CRI, DeviceListStrategy.CDI_ANNOTATIONS}.issubset(strategies):
            raise self._document.error(
                "deviceListStrategy",
                "cdi-cri and cdi-annotations inject twice; choose one of them",
                ConfigReason.CONFLICT,
            )
        if not _CDI_KIND.fullmatch(kind):
            problem = f"{kind!r} is not a vendor/class; write one like nvidia.com/gpu"
            raise self._document.error("cdiKind", problem, ConfigReason.INVALID_VALUE)

    def _check_compute(self, path: str, pool: Pool) -> None:
        """Reject reports of compute where every backend of a pool gives it by itself."""
        names = [options.backend for options in self.options[pool.name]]
        guards = {guard_of(self._backends[name]) for name in names}
        is_on = pool.compute_enforcement.policy is ComputePolicy.REPORT
        if is_on and guards and MemoryGuard.ENFORCER not in guards:
            problem = f"with {' and '.join(names)} each container has its own compute; remove it"
            path = f"{path}.computeEnforcement"
            raise self._document.error(path, problem, ConfigReason.CONFLICT)

    def _options(self, path: str, given: Mapping[str, Any], offer: OfferPolicy) -> Options:
        name = given.get("backend")
        if not isinstance(name, str) or name not in self._backends:
            known = ", ".join(sorted(self._backends))
            problem, reason = f"{name!r} is not a backend", ConfigReason.UNKNOWN_VALUE
            if not name:
                problem, reason = "missing key `backend`", ConfigReason.MISSING
            raise self._document.error(f"{path}.backend", f"{problem}; allowed: {known}", reason)

        options = self._document.decode(self._backends[name].options_type, path)
        if offer is OfferPolicy.ALL and "offer" not in given and hasattr(options, "offer"):
            return replace(options, offer=offer)
        return options

    def build_backends(self, injection: Injection) -> list[tuple[Pool, list[Backend]]]:
        """Build the configured backends of every pool.

        Several pools may offer one resource (T4s in 15 shares, A100s in 40) with the same backend.

        Raises:
            ConfigError: a backend rejects its options, two backends use one resource name, or a
                resource name is not valid.
        """
        built = []
        names: dict[ResourceName, tuple[str, Api]] = {}

        for number, pool in enumerate(self.root.pools):
            backends = []
            # ResourceClaims give a container its GPU by CDI.
            in_pool = injection if pool.api is Api.DEVICE_PLUGIN else injection.by_own_cdi
            for place, options in enumerate(self.options[pool.name]):
                try:
                    backend = self._backends[options.backend].configured(options, in_pool)
                    for resource in backend.resources:
                        _reserve_name(resource, backend.name, pool.api, names)
                except ValueError as error:
                    path, reason = f"pools[{number}].backends[{place}]", ConfigReason.INVALID_VALUE
                    if isinstance(error, _NameError):
                        path, reason = f"{path}.resource", error.reason
                    raise self._document.error(path, str(error), reason) from None
                backends.append(backend)
            guards = {guard_of(type(backend)) for backend in backends}
            if pool.memory_enforcement.burst and MemoryGuard.ENFORCER not in guards:
                raise self._document.error(
                    f"pools[{number}].memoryEnforcement.burst",
                    "no backend of this pool can lend memory: MPS, MIG and whole GPUs have fixed "
                    "amounts; add fraction or timeslice, or leave burst out",
                    ConfigReason.CONFLICT,
                )
            built.append((pool, backends))

        return built


def parse(text: str, file: str, backends: Mapping[str, type[Backend]]) -> Config:
    """Parse and validate a configuration.

    Raises:
        ConfigError: names file, line and path, the problem and the allowed values.
    """
    return Config(Document(text, file), backends)


class _NameError(ValueError):
    """Raised when a resource cannot be offered under its name."""

    def __init__(self, problem: str, reason: ConfigReason) -> None:
        super().__init__(problem)
        self.reason = reason


def _refuse_fronts(document: Document) -> None:
    """Refuse the key `fronts`, in whose place a pool has `api`."""
    pools = document.data.get("pools") if isinstance(document.data, Mapping) else None
    for number, pool in enumerate(pools if isinstance(pools, list) else ()):
        if not isinstance(pool, Mapping) or "fronts" not in pool:
            continue
        given = pool["fronts"]
        wanted = given[0] if isinstance(given, list) and len(given) == 1 else given
        fix = f"write `api: {wanted}`" if wanted in tuple(Api) else _TWO_POOLS
        problem = f"unknown key `fronts`; {fix}"
        raise document.error(f"pools[{number}].fronts", problem, ConfigReason.UNKNOWN_KEY)


def _reserve_name(
    resource: ResourceName,
    backend: str,
    api: Api,
    names: dict[ResourceName, tuple[str, Api]],
) -> None:
    if problem := name_problem(resource):
        problem = f"invalid resource name {resource!r}: {problem}"
        raise _NameError(problem, ConfigReason.INVALID_NAME)

    first, its_api = names.setdefault(resource, (backend, api))
    if its_api is not api:
        raise _NameError(
            f"{resource} is offered by a pool with `api: {its_api}` already and cannot be offered "
            f"with `api: {api}` too; give it another `resource`, or both pools the same `api`",
            ConfigReason.NAME_TAKEN,
        )
    if first != backend:
        raise _NameError(
            f"{resource} is offered by backend {first} already and cannot be offered by {backend} "
            "too; give it another `resource`",
            ConfigReason.NAME_TAKEN,
        )
