"""The best possible placement on one GPU: a Markov decision process, solved.

Pods come and stay at random (Poisson, exponential), and a pod that finds no space goes. A rule
decides where an instance goes, not whether: a pod that can be placed is placed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, TypeAlias

from bench.arrivals import Rule
from bench.orders import one_gpu
from metagpu.backends.mig.profiles import MigGeometry, PlacedProfile

_SWEEPS: Final = 10_000
_EXACT: Final = 1e-3
"""Within how much of each other the bounds on the result are, in memory slices a unit of time."""

Decision: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], int]
"""Chooses the next state out of some, from the present one and what each state is worth."""

Choices: TypeAlias = Mapping[tuple[int, int], int]
"""A rule as a table: from a state and its first possible next one to the next one it chooses.

The first possible next state tells the profile: it has one instance of it more.
"""


class Process:
    """One GPU on which pods come and go.

    Args:
        geometry: the GPU's MIG geometry.
        mix: the weight of each profile.
        load: mean requested memory, if all pods were placed, as a part of all memory.
    """

    def __init__(self, geometry: MigGeometry, mix: Mapping[str, float], load: float) -> None:
        self._geometry = geometry
        self._states = [frozenset(placed) for placed in geometry.arrangements()]
        self._number = {state: number for number, state in enumerate(self._states)}
        self._ends = [[self._number[s - {placed}] for placed in s] for s in self._states]
        self._next = [
            [
                [self._number[s | {placed}] for placed in self._free(s, p.name)]
                for p in geometry.profiles
            ]
            for s in self._states
        ]

        chances = [mix[profile.name] / sum(mix.values()) for profile in geometry.profiles]
        self._sizes = [profile.memory_slices for profile in geometry.profiles]
        each = sum(chance * size for chance, size in zip(chances, self._sizes, strict=True))
        come = load * geometry.free_slices(0) / each
        self._rates = [come * chance for chance in chances]
        self._asked = come * each

    def best(self) -> float:
        """Return the part of the requested memory that the best rule places, in %."""
        return self._placed(lambda _, options, worths: max(options, key=worths.__getitem__))

    def by(self, rule: Rule) -> float:
        """Return the part of the requested memory that a rule places, in %."""
        known: dict[tuple[int, int], int] = {}
        for number, state in enumerate(self._states):
            for profile, options in zip(self._geometry.profiles, self._next[number], strict=True):
                if options:
                    known[number, options[0]] = self._chosen(rule, state, profile.name)
        return self.by_choices(known)

    def by_choices(self, choices: Choices) -> float:
        """Return the part of the requested memory that a table of choices places, in %."""
        return self._placed(lambda number, options, _: choices[number, options[0]])

    def count_rules(self) -> int:
        """Count all rules."""
        return prod(len(options) for _, options in self._decisions())

    def rules(self) -> Iterator[Choices]:
        """Yield all rules: every choice in every state."""
        keys = [(number, options[0]) for number, options in self._decisions()]
        for chosen in product(*(options for _, options in self._decisions())):
            yield dict(zip(keys, chosen, strict=True))

    def orders_by(self, choices: Choices) -> int:
        """Count the orders of arrival that a table of choices places in full."""

        def count(number: int) -> int:
            after = (choices[number, options[0]] for options in self._next[number] if options)
            return sum(1 + count(state) for state in after)

        return count(self._number[frozenset()])

    def _decisions(self) -> list[tuple[int, list[int]]]:
        return [
            (number, group) for number, each in enumerate(self._next) for group in each if group
        ]

    def _free(self, state: frozenset[PlacedProfile], profile: str) -> list[PlacedProfile]:
        return self._geometry.free_placements(
            sum(self._geometry.masks[placed] for placed in state), profile
        )

    def _chosen(self, rule: Rule, state: frozenset[PlacedProfile], profile: str) -> int:
        occupied = frozenset(slot for placed in state for slot in placed.footprint)
        chosen = one_gpu(self._geometry, rule).place(occupied, profile)
        assert chosen, "the pod fits"
        return self._number[state | {chosen}]

    def _placed(self, decide: Decision) -> float:
        """Iterate values until the bounds on the gain meet.

        The process is uniformised, so that all steps are equal.
        """
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
