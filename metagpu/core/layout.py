"""The configuration laid over the GPUs: which GPU is in which pool, and what is offered of it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from metagpu.core.backend import Backend
from metagpu.core.config import Config, Pool
from metagpu.core.errors import ConfigError
from metagpu.core.facts import SharesOffered
from metagpu.core.injection import Injection
from metagpu.core.model import Gpu, ResourceName, Share

ID_LIMIT = 63
"""Characters of a device id, by the comment in the kubelet's API."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The pool a GPU is in, and why; `pool` is `None` when no pool selects it."""

    gpu: Gpu
    pool: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What the node offers: the result of one configuration and one set of GPUs."""

    assignments: tuple[Assignment, ...]
    backends: Mapping[ResourceName, Backend]
    shares: tuple[Share, ...]

    @property
    def offered(self) -> SharesOffered:
        """The fact that tells the registry."""
        return SharesOffered(tuple(self.backends), self.shares)


def lay_out(config: Config, gpus: Iterable[Gpu], injection: Injection) -> Layout:
    """Give every GPU to the first pool that selects it, and let the pool's backends cut it.

    A resource may be offered by several pools (T4s in 15 shares, A100s in 40) if they use the same
    backend for it; how requests are placed is then said by the first of these pools.

    Raises:
        ConfigError: if two backends claim one resource name, or a name or id is not legal.
    """
    pools = config.pools(config.envelope.injection(injection))
    backends: dict[ResourceName, Backend] = {}

    for pool, cutters in pools:
        for backend in cutters:
            _claim(config, pool, backend, backends)

    assignments = []
    shares: list[Share] = []
    for gpu in gpus:
        assignment, cutters = _assign(gpu, pools)
        assignments.append(assignment)
        for backend in cutters:
            shares += backend.shares(gpu)

    _check_ids(config, shares)
    return Layout(tuple(assignments), backends, tuple(shares))


def _claim(
    config: Config, pool: Pool, backend: Backend, backends: dict[ResourceName, Backend]
) -> None:
    for resource in backend.resources:
        check_resource_name(resource, config.file)
        first = backends.setdefault(resource, backend)

        if first.name != backend.name:
            raise ConfigError(
                f"{resource} is offered by backend {first.name} already and cannot be offered by "
                f"{backend.name} in pool {pool.name!r} too; give it another `resource`",
                file=config.file,
            )


def _assign(gpu: Gpu, pools: list[tuple[Pool, list[Backend]]]) -> tuple[Assignment, list[Backend]]:
    refusals = []

    for pool, cutters in pools:
        refusal = pool.refusal(gpu)
        if refusal is None:
            why = "all GPUs" if pool.gpus == "all" else f"matches {pool.gpus}"
            return Assignment(gpu, pool.name, why), cutters
        refusals.append(f"{pool.name}: {refusal}")

    return Assignment(gpu, None, f"no pool selects it ({'; '.join(refusals)})"), []


def _check_ids(config: Config, shares: list[Share]) -> None:
    seen: set[str] = set()

    for share in shares:
        if len(share.id) > ID_LIMIT:
            raise ConfigError(
                f"the share id {share.id} has more than {ID_LIMIT} characters", file=config.file
            )
        if share.id in seen:
            raise ConfigError(
                f"the share id {share.id} would be offered twice, again as {share.resource}; "
                "use each backend once in a pool",
                file=config.file,
            )
        seen.add(share.id)


def check_resource_name(name: str, file: str = "") -> None:
    """Refuse what the kubelet would refuse as an extended resource's name.

    Raises:
        ConfigError: saying which of its rules is broken. The rules are those of Kubernetes'
            IsExtendedResourceName: a domain, one `/`, a name.
    """
    domain, _, last = name.partition("/")
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

    if not last or "/" in last:
        problem = "it needs a domain, one `/` and a name, as in cnvrg.io/metagpu"
    elif "kubernetes.io/" in name:
        problem = "kubernetes.io is Kubernetes' own domain"
    elif domain.startswith("requests."):
        problem = "a domain must not begin with `requests.`"
    elif len(domain) > 244 or not re.fullmatch(rf"{label}(\.{label})*", domain):  # noqa: PLR2004 - 253 less "requests."
        problem = "the domain must be a lower-case DNS name of at most 244 characters"
    elif not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", last):
        problem = (
            "the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, alphanumeric at both ends"
        )
    else:
        return

    raise ConfigError(f"{name!r} is no resource name: {problem}", file=file)
