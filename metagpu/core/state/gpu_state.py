"""Transitions of one GPU's state: verdict, pauses, cleanup, provisioned devices."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar, assert_never

from msgspec.structs import replace

from metagpu.core.model.shares import Fault, Pause, ProvisionedState, Verdict
from metagpu.core.model.snapshot import GpuState
from metagpu.core.state.facts import (
    BackendAttached,
    BackendDetached,
    BackendResumed,
    BackendSuspended,
    CleanupFinished,
    GpuCordoned,
    GpuFact,
    GpuFaulted,
    GpuFaultExplained,
    GpuHeard,
    GpuNeedsProof,
    GpuRecovered,
    GpuRecovering,
    GpuUncordoned,
    GpuUnheard,
    InstanceFaulted,
    InstanceRecovered,
    ProvisioningReported,
)

NOT_READY: Final = "it is being made ready"
"""The reason of a backend's pause until it first reports that it is ready."""

KeyT = TypeVar("KeyT", bound=str)
ValueT = TypeVar("ValueT")


def apply_gpu_fact(  # noqa: C901, PLR0911, PLR0912 - one return for each kind of fact
    state: GpuState, fact: GpuFact
) -> GpuState:
    """Return the state that follows from a fact; the same object if nothing changes."""
    match fact:
        case GpuFaulted():
            verdict = Verdict(healthy=False, since=fact.at, reason=fact.reason, fault=fact.fault)
            return _with_verdict(state, verdict)
        case GpuFaultExplained():
            return _with_present_reason(state, fact.reason)
        case GpuNeedsProof():
            verdict = state.verdict
            if verdict.healthy or verdict.needs_proof:
                return state
            return replace(state, verdict=replace(verdict, needs_proof=True))
        case GpuRecovered():
            return _with_verdict(state, Verdict(healthy=True, since=fact.at))
        case InstanceFaulted() | InstanceRecovered():
            return _with_device_verdict(state, fact)
        case GpuCordoned():
            current = state.cordons.get(fact.source)
            cordon = _pause(current, fact.reason, fact.at)
            if cordon == current:
                return state
            return replace(state, cordons=MappingProxyType({**state.cordons, fact.source: cordon}))
        case GpuUncordoned():
            if fact.source not in state.cordons:
                return state
            return replace(state, cordons=_without(state.cordons, fact.source))
        case GpuRecovering():
            known = state.verdict
            if known.healthy or known.recovery == fact.recovery:
                return state
            return replace(state, verdict=replace(known, recovery=fact.recovery))
        case GpuUnheard():
            unheard = _pause(state.unheard, fact.reason, fact.at)
            return state if unheard == state.unheard else replace(state, unheard=unheard)
        case GpuHeard():
            return state if state.unheard is None else replace(state, unheard=None)
        case BackendAttached():
            return _attached(state, fact)
        case BackendDetached():
            return _detached(state, fact)
        case BackendSuspended():
            return _suspended(state, fact)
        case BackendResumed():
            return _resumed(state, fact.backend)
        case CleanupFinished():
            return _cleaned(state, fact)
        case ProvisioningReported():
            return _provisioned(state, fact.backend, fact.provisioned)
        case _:
            assert_never(fact)


def _with_present_reason(state: GpuState, reason: str) -> GpuState:
    verdict = state.verdict
    if verdict.fault is not Fault.DRIVER or verdict.reason == reason:
        return state
    return replace(state, verdict=replace(verdict, reason=reason))


def _with_verdict(state: GpuState, verdict: Verdict) -> GpuState:
    """Change the verdict; until the GPU recovers, the first reason and time stay.

    That NVML cannot be used is no fault of the GPU: the first one of its own replaces this reason.
    """
    known = state.verdict
    if known.healthy == verdict.healthy:
        if known.fault is not Fault.DRIVER or verdict.fault is Fault.DRIVER:
            return state
        verdict = replace(verdict, since=known.since, needs_proof=known.needs_proof)
    return replace(state, verdict=verdict)


def _with_device_verdict(state: GpuState, fact: InstanceFaulted | InstanceRecovered) -> GpuState:
    """Change the verdict of a MIG device, by the rule of a GPU's verdict."""
    faulty = isinstance(fact, InstanceFaulted)
    if faulty == (fact.device in state.mig_faults):
        return state

    faults = dict(_without(state.mig_faults, fact.device))
    if faulty:
        faults[fact.device] = Verdict(healthy=False, since=fact.at, reason=fact.reason)
    return replace(state, mig_faults=MappingProxyType(faults))


def _pause(current: Pause | None, reason: str, at: float) -> Pause:
    """Return a new pause, or the current one with a new reason."""
    return Pause(reason, current.since if current else at)


def _attached(state: GpuState, fact: BackendAttached) -> GpuState:
    if fact.needs_cleanup and fact.backend not in state.cleanup.backends:
        backends = state.cleanup.backends | {fact.backend}
        state = replace(state, cleanup=replace(state.cleanup, backends=backends))
    if fact.needs_setup:
        state = _suspended(state, BackendSuspended(fact.gpu, fact.backend, NOT_READY, fact.at))
    return state


def _detached(state: GpuState, fact: BackendDetached) -> GpuState:
    if fact.backend in state.cleanup.backends:
        backends = state.cleanup.backends - {fact.backend}
        state = replace(state, cleanup=replace(state.cleanup, backends=backends))
    state = _cleaned(_resumed(state, fact.backend), fact)
    return _provisioned(state, fact.backend, ProvisionedState())


def _suspended(state: GpuState, fact: BackendSuspended) -> GpuState:
    current = state.suspended.get(fact.backend)
    pause = replace(_pause(current, fact.reason, fact.at), until_reset=fact.until_reset)
    if pause == current:
        return state
    return replace(state, suspended=MappingProxyType({**state.suspended, fact.backend: pause}))


def _resumed(state: GpuState, backend: str) -> GpuState:
    if backend not in state.suspended:
        return state
    return replace(state, suspended=_without(state.suspended, backend))


def _cleaned(state: GpuState, fact: CleanupFinished | BackendDetached) -> GpuState:
    since = state.cleanup.since.get(fact.backend)
    if since is None or (isinstance(fact, CleanupFinished) and fact.since != since):
        return state

    others = _without(state.cleanup.since, fact.backend)
    return replace(state, cleanup=replace(state.cleanup, since=others))


def _provisioned(state: GpuState, backend: str, reported: ProvisionedState) -> GpuState:
    if state.provisioned.get(backend, ProvisionedState()) == reported:
        return state

    others = _without(state.provisioned, backend)
    empty = reported == ProvisionedState()
    provisioned = others if empty else MappingProxyType({**others, backend: reported})
    return replace(state, provisioned=provisioned)


def _without(values: Mapping[KeyT, ValueT], key: KeyT) -> Mapping[KeyT, ValueT]:
    return MappingProxyType({name: value for name, value in values.items() if name != key})
