"""A filter for repeated problems: each is logged when it begins, changes and ends."""

from collections.abc import Hashable

import msgspec


class LogOnce(msgspec.Struct):
    """The problem last logged for each subject: a GPU, a file, a resource."""

    _logged: dict[Hashable, str] = msgspec.field(default_factory=dict)

    def is_new(self, subject: Hashable, problem: str) -> bool:
        """Record a problem; return whether it differs from the last one of its subject."""
        if self._logged.get(subject) == problem:
            return False
        self._logged[subject] = problem
        return True

    def clear(self, subject: Hashable) -> bool:
        """Forget the problem of a subject; return whether there was one."""
        return self._logged.pop(subject, None) is not None
