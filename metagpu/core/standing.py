"""What a fact about one GPU makes of its state: its verdict, its pauses, who keeps or cleans it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar, assert_never

from msgspec.structs import replace

from metagpu.core.facts import (
    BackendResumed,
    BackendSuspended,
    GpuCordoned,
    GpuFact,
    GpuFaulted,
    GpuKept,
    GpuLeft,
    GpuRecovered,
    GpuReturned,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    StockTold,
)
from metagpu.core.model import Pause, Stock, Verdict
from metagpu.core.sharing import broken, withheld
from metagpu.core.snapshot import GpuState

NOT_READY: Final = "it is being made ready"
"""Why a backend gives no shares of a GPU before it has said that it is ready."""

ValueT = TypeVar("ValueT")


def stand(  # noqa: C901, PLR0911 - one return for each kind of fact
    state: GpuState, fact: GpuFact
) -> GpuState:
    """Give the state that follows from a fact, the same object if it says nothing new."""
    match fact:
        case GpuFaulted():
            verdict = Verdict(healthy=False, since=fact.at, reason=fact.reason, fault=fact.fault)
            return _judged(state, verdict)
        case GpuRecovered():
            return _judged(state, Verdict(healthy=True, since=fact.at))
        case InstanceFaulted() | InstanceRecovered():
            return _judged_inside(state, fact)
        case GpuCordoned():
            cordon = _paused(state.cordon, fact.reason, fact.at)
            return state if cordon == state.cordon else replace(state, cordon=cordon)
        case GpuUncordoned():
            return state if state.cordon is None else replace(state, cordon=None)
        case GpuKept():
            return _kept(state, fact)
        case GpuLeft():
            left = _resumed(_not_cleaning(state, fact.backend), fact.backend)
            return _stocked(_cleaned(left, fact), fact.backend, Stock())
        case BackendSuspended():
            return _suspended(state, fact)
        case BackendResumed():
            return _resumed(state, fact.backend)
        case GpuReturned():
            return _cleaned(state, fact)
        case StockTold():
            return _stocked(state, fact.backend, fact.stock)
        case _:
            assert_never(fact)


def _judged(state: GpuState, verdict: Verdict) -> GpuState:
    """Change the verdict; while a GPU is out, the first reason and time stand."""
    same = state.verdict.healthy == verdict.healthy
    return state if same else replace(state, verdict=verdict)


def _judged_inside(state: GpuState, fact: InstanceFaulted | InstanceRecovered) -> GpuState:
    """Change the verdict of a MIG device; the same holds as for a GPU."""
    ill = isinstance(fact, InstanceFaulted)
    if ill == (fact.device in state.faults):
        return state

    faults = dict(_without(state.faults, fact.device))
    if ill:
        faults[fact.device] = Verdict(healthy=False, since=fact.at, reason=fact.reason)
    return replace(state, faults=MappingProxyType(faults), broken=broken(state.stocks, faults))


def _paused(pause: Pause | None, reason: str, at: float) -> Pause:
    """Begin a pause, or give one that lasts a new reason."""
    return Pause(reason, pause.since if pause else at)


def _kept(state: GpuState, fact: GpuKept) -> GpuState:
    if fact.cleans and fact.backend not in state.cleans:
        state = replace(state, cleans=state.cleans | {fact.backend})
    if fact.readies:
        state = _suspended(state, BackendSuspended(fact.gpu, fact.backend, NOT_READY, fact.at))
    return state


def _suspended(state: GpuState, fact: BackendSuspended) -> GpuState:
    known = state.suspended.get(fact.backend)
    pause = replace(_paused(known, fact.reason, fact.at), reset=fact.reset)
    if pause == known:
        return state
    return replace(state, suspended=MappingProxyType({**state.suspended, fact.backend: pause}))


def _resumed(state: GpuState, backend: str) -> GpuState:
    if backend not in state.suspended:
        return state
    return replace(state, suspended=_without(state.suspended, backend))


def _not_cleaning(state: GpuState, backend: str) -> GpuState:
    if backend not in state.cleans:
        return state
    return replace(state, cleans=state.cleans - {backend})


def _cleaned(state: GpuState, fact: GpuReturned | GpuLeft) -> GpuState:
    since = state.cleaning.get(fact.backend)
    if since is None or (isinstance(fact, GpuReturned) and fact.since != since):
        return state

    cleaning = _without(state.cleaning, fact.backend)
    lost = withheld(state.shares, state.leases, cleaning, state.stocks)
    return replace(state, cleaning=cleaning, withheld=lost)


def _stocked(state: GpuState, backend: str, stock: Stock) -> GpuState:
    if state.stocks.get(backend, Stock()) == stock:
        return state

    rest = _without(state.stocks, backend)
    stocks = rest if stock == Stock() else MappingProxyType({**rest, backend: stock})
    lost = withheld(state.shares, state.leases, state.cleaning, stocks)
    return replace(state, stocks=stocks, withheld=lost, broken=broken(stocks, state.faults))


def _without(values: Mapping[str, ValueT], key: str) -> Mapping[str, ValueT]:
    return MappingProxyType({name: value for name, value in values.items() if name != key})
