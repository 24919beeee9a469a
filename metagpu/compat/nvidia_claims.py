"""Opaque parameters of NVIDIA's DRA driver, in claims and DeviceClasses. Pure.

Under NVIDIA's name of the driver they mean what they mean there: containers that have one claim
together share its GPU. A field that nothing here follows is an error, as it is there.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from metagpu.core.config.decode_errors import describe_mismatch
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.units import Quantity, decode_unit
from metagpu.core.devices.devices import MIG_TYPE, WHOLE_TYPE
from metagpu.core.model.gpu import MIB
from metagpu.core.model.resource_claims import (
    AllocatedPart,
    ClaimSharing,
    MpsLimits,
    OpaqueParameters,
)

DRIVER: Final = "gpu.nvidia.com"
"""NVIDIA's name of its driver."""
API_VERSION: Final = "resource.nvidia.com/v1beta1"

_MPS: Final = "MPS"
_DEFAULT: Final = "Default"
_MOST_THREADS: Final = 100
"""Percent of a GPU."""
_MOST_MEMORY: Final = 2**50
"""Bytes: the limit is a part of a CDI name."""
_STRATEGY: Final = "sharing.strategy"
_MPS_CONFIG: Final = "sharing.mpsConfig"
_PER_DEVICE: Final = f"{_MPS_CONFIG}.defaultPerDevicePinnedMemoryLimit"


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A mapping in which an unknown key is an error."""


class _TimeSlicingConfig(_Strict, frozen=True):
    interval: Literal["Default", "Short", "Medium", "Long"] | None = None


class _MpsConfig(_Strict, frozen=True):
    default_active_thread_percentage: int | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: dict[str, Quantity] | None = None
    multi_user: bool | None = None


class _GpuSharing(_Strict, frozen=True):
    strategy: Literal["TimeSlicing", "MPS"]
    time_slicing_config: _TimeSlicingConfig | None = None
    mps_config: _MpsConfig | None = None


class _MigDeviceSharing(_Strict, frozen=True):
    strategy: Literal["TimeSlicing", "MPS"]
    mps_config: _MpsConfig | None = None


class _GpuConfig(_Strict, frozen=True):
    api_version: str
    kind: str
    sharing: _GpuSharing | None = None


class _MigDeviceConfig(_Strict, frozen=True):
    api_version: str
    kind: str
    sharing: _MigDeviceSharing | None = None


_DeviceConfig = _GpuConfig | _MigDeviceConfig
_KINDS: Final[dict[str, type[_DeviceConfig]]] = {
    "GpuConfig": _GpuConfig,
    "MigDeviceConfig": _MigDeviceConfig,
}


def read_sharing(
    configs: Sequence[OpaqueParameters], devices: Sequence[AllocatedPart]
) -> list[ClaimSharing | None]:
    """Return how each device of a claim is shared, `None` for a device as it is.

    The parameters of the claim win over those of its classes, and later ones over earlier ones.

    Raises:
        ConfigError: with the path of a field that cannot be followed.
    """
    ordered = sorted(configs, key=lambda parameters: not parameters.from_class)
    decoded = [(parameters, _decode(parameters.parameters)) for parameters in ordered]
    chosen = [_choose(decoded, device) for device in devices]
    found: list[ClaimSharing | None] = []
    for place, device in zip(chosen, devices, strict=True):
        group = [part for at, part in zip(chosen, devices, strict=True) if at == place]
        config = None if place is None else decoded[place][1]
        found.append(_sharing(config, device, group) if isinstance(config, _GpuConfig) else None)
    return found


def _decode(parameters: Any) -> _DeviceConfig:  # noqa: ANN401 - any JSON
    given = parameters if isinstance(parameters, dict) else {}
    version, kind = (given.get(key) for key in ("apiVersion", "kind"))
    if version != API_VERSION:
        problem = f"{version!r}; allowed: {API_VERSION}"
        raise _error("apiVersion", problem, ConfigReason.UNKNOWN_VALUE)
    if not isinstance(kind, str) or kind not in _KINDS:
        problem = f"{kind!r} is not served; allowed: {', '.join(_KINDS)}"
        raise _error("kind", problem, ConfigReason.UNKNOWN_VALUE)
    try:
        config = msgspec.convert(parameters, _KINDS[kind], dec_hook=decode_unit)
    except msgspec.ValidationError as error:
        raise _error(*describe_mismatch(parameters, _KINDS[kind], str(error))) from None
    _check(config)
    return config


def _check(config: _DeviceConfig) -> None:
    """Refuse what contradicts itself, and what no backend does."""
    if (sharing := config.sharing) is None:
        return
    mps = sharing.mps_config
    if sharing.strategy != _MPS and mps is not None:
        problem = f"the strategy is {sharing.strategy}; remove one of them"
        raise _error(_MPS_CONFIG, problem, ConfigReason.CONFLICT)
    if isinstance(config, _MigDeviceConfig):
        if sharing.strategy == _MPS:
            problem = (
                "MPS is not served on a MIG device that a claim has alone; a backend mig with "
                "`sharing` offers parts of MIG devices to claims"
            )
            raise _error(_STRATEGY, problem, ConfigReason.NOT_SERVED)
    elif config.sharing and config.sharing.time_slicing_config and sharing.strategy == _MPS:
        problem = "the strategy is MPS; remove one of them"
        raise _error("sharing.timeSlicingConfig", problem, ConfigReason.CONFLICT)
    if mps is not None:
        _check_mps(mps)


def _check_mps(mps: _MpsConfig) -> None:
    threads = mps.default_active_thread_percentage
    if threads is not None and not 0 <= threads <= _MOST_THREADS:
        path = f"{_MPS_CONFIG}.defaultActiveThreadPercentage"
        problem = f"{threads}; allowed: 0 to {_MOST_THREADS}"
        raise _error(path, problem, ConfigReason.INVALID_VALUE)
    limits = {f"{_MPS_CONFIG}.defaultPinnedDeviceMemoryLimit": _memory(mps)}
    limits |= {f"{_PER_DEVICE}.{key}": memory for key, memory in _per_device(mps).items()}
    for path, limit in limits.items():
        if limit is not None and not MIB <= limit <= _MOST_MEMORY:
            problem = f"{limit} bytes; allowed: 1Mi to 1024Ti"
            raise _error(path, problem, ConfigReason.INVALID_VALUE)
    if mps.multi_user:
        problem = "servers for several users at once are not served; remove it"
        raise _error(f"{_MPS_CONFIG}.multiUser", problem, ConfigReason.NOT_SERVED)


def _memory(mps: _MpsConfig) -> int | None:
    return mps.default_pinned_device_memory_limit


def _per_device(mps: _MpsConfig) -> dict[str, Quantity]:
    return mps.default_per_device_pinned_memory_limit or {}


def _choose(
    decoded: Sequence[tuple[OpaqueParameters, _DeviceConfig]], device: AllocatedPart
) -> int | None:
    """Return the place of the configuration of a device: the last that is for it.

    One that names no request is for devices of its type alone.
    """
    for place, (given, config) in reversed(list(enumerate(decoded))):
        named = device.request in given.requests or device.main_request in given.requests
        if given.requests and not named:
            continue
        kind = WHOLE_TYPE if isinstance(config, _GpuConfig) else MIG_TYPE
        if kind == device.type:
            return place
        if named:
            problem = (
                f"{config.kind} is for devices of type {kind}, and request {device.request} was "
                f"allocated one of type {device.type}"
            )
            raise _error("kind", problem, ConfigReason.CONFLICT)
    return None


def _sharing(
    config: _GpuConfig, device: AllocatedPart, group: Sequence[AllocatedPart]
) -> ClaimSharing | None:
    """Return how a GPU is shared; `group` are all devices of the same configuration."""
    if (sharing := config.sharing) is None:
        return None
    if sharing.strategy != _MPS:
        slicing = sharing.time_slicing_config
        interval = (slicing and slicing.interval) or _DEFAULT
        field = f"sharing.timeSlicingConfig.interval: {interval}"
        return ClaimSharing("timeslice", field, interval.lower(), required=interval != _DEFAULT)
    together = [part for part in group if part.main_request == device.main_request]
    if len(together) > 1:
        problem = (
            f"MPS is served for requests of one GPU, and {device.main_request} has "
            f"{len(together)}; ask for each by a request of its own"
        )
        raise _error(_STRATEGY, problem, ConfigReason.NOT_SERVED)
    limits = _limits(sharing.mps_config or _MpsConfig(), device, group)
    return ClaimSharing("mps", f"{_STRATEGY}: {_MPS}", limits.settings)


def _limits(mps: _MpsConfig, device: AllocatedPart, group: Sequence[AllocatedPart]) -> MpsLimits:
    """Return the limits of a client on one GPU.

    A limit of one GPU names the GPU by its uuid, or by its place among those of the configuration.
    """
    gpus = [part.gpu for part in group]
    names = {gpu: gpu for gpu in gpus} | {str(place): gpu for place, gpu in enumerate(gpus)}
    memory = _memory(mps)
    for key, limit in _per_device(mps).items():
        if key not in names:
            problem = f"no GPU of the claim; it has {', '.join(names)}"
            raise _error(f"{_PER_DEVICE}.{key}", problem, ConfigReason.UNKNOWN_VALUE)
        if names[key] == device.gpu:
            memory = limit
    threads = mps.default_active_thread_percentage or None  # 0 sets no limit
    return MpsLimits(threads, None if memory is None else memory // MIB)


def _error(path: str, problem: str, reason: ConfigReason) -> ConfigError:
    return ConfigError(problem, reason, path=path, file="opaque parameters")
