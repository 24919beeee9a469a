"""What the best of all rules could place on one GPU: a Markov decision process, solved exactly.

Pods come and stay by chance (Poisson, exponential), and who finds no room goes. A rule says where
an instance goes, not whether: who can be placed is placed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from bench import arrivals
from bench.arrivals import Rule
from metagpu.backends.mig.profiles import Board, Spot

_SWEEPS: Final = 10_000
_EXACT: Final = 1e-7
"""Within how much of each other the bounds on the result are, in memory slices a unit of time."""

Decision: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], int]
"""Chooses the next state out of some, from the present one and what each state is worth."""


class Process:
    """One GPU on which pods come and go.

    Args:
        board: what the GPU can be cut into.
        mix: how often each profile is asked for, in proportion.
        load: memory asked for at a time, if all were placed, as a part of all there is.
    """

    def __init__(self, board: Board, mix: Mapping[str, float], load: float) -> None:
        self._board = board
        self._states = [frozenset(spots) for spots in board.arrangements()]
        self._number = {state: number for number, state in enumerate(self._states)}
        self._ends = [[self._number[s - {spot}] for spot in s] for s in self._states]
        self._next = [
            [[self._number[s | {spot}] for spot in self._free(s, p.name)] for p in board.profiles]
            for s in self._states
        ]

        chances = [mix[profile.name] / sum(mix.values()) for profile in board.profiles]
        self._sizes = [profile.memory_slices for profile in board.profiles]
        each = sum(chance * size for chance, size in zip(chances, self._sizes, strict=True))
        come = load * board.free_slices(0) / each
        self._rates = [come * chance for chance in chances]
        self._asked = come * each

    def best(self) -> float:
        """Tell what part of the memory asked for the best rule places, in %."""
        return self._placed(lambda _, options, worths: max(options, key=worths.__getitem__))

    def by(self, rule: Rule) -> float:
        """Tell what part of the memory asked for a rule places, in %."""
        known: dict[tuple[int, int], int] = {}
        for number, state in enumerate(self._states):
            for profile, options in zip(self._board.profiles, self._next[number], strict=True):
                if options:
                    known[number, options[0]] = self._chosen(rule, state, profile.name)
        return self._placed(lambda number, options, _: known[number, options[0]])

    def _free(self, state: frozenset[Spot], profile: str) -> list[Spot]:
        return self._board.free(sum(self._board.masks[spot] for spot in state), profile)

    def _chosen(self, rule: Rule, state: frozenset[Spot], profile: str) -> int:
        on = arrivals.node(self._board, 1)
        on.taken[on.gpus[0].id] |= {slot for spot in state for slot in spot.footprint}
        share = rule(on, profile)
        assert share, "there is room"
        free = self._free(state, profile)
        spot = next(spot for spot in free if spot.footprint == share.footprint)
        return self._number[state | {spot}]

    def _placed(self, decide: Decision) -> float:
        """Iterate values until the bounds on the gain meet (uniformised, so in equal steps)."""
        most = max(map(len, self._states))
        total = sum(self._rates) + most
        worths = [0.0] * len(self._states)

        for _ in range(_SWEEPS):
            found = []
            for number, options_of in enumerate(self._next):
                stays = total - len(self._ends[number])
                value = sum(worths[after] for after in self._ends[number])
                for rate, size, options in zip(self._rates, self._sizes, options_of, strict=True):
                    if options:
                        stays -= rate
                        value += rate * (size + worths[decide(number, options, worths)])
                found.append((value + stays * worths[number]) / total)

            gains = [(new - old) * total for new, old in zip(found, worths, strict=True)]
            if max(gains) - min(gains) < _EXACT:
                return 100 * max(gains) / self._asked
            worths = [value - found[0] for value in found]
        raise AssertionError("the values do not settle")
