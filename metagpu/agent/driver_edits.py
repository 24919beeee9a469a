"""The driver's libraries, programs and hooks in a CDI file, by NVIDIA's toolkit.

`nvidia-ctk` looks at the roots as this process sees them; the edits name the host's paths, which
the container runtime opens.
"""

from collections.abc import Callable
from typing import Final

import structlog
from anyio import to_thread

from metagpu.core.contracts.programs import Programs
from metagpu.core.errors import ProgramError
from metagpu.core.grants import cdi
from metagpu.core.model.driver_roots import MOUNT_HOST, DriverRoots
from metagpu.host.driver_roots import find_hook

_COMMAND: Final = ("nvidia-ctk", "cdi", "generate", "--format=json")

log = structlog.get_logger()


class DriverEdits:
    """The edits of every container with a GPU, read once for each driver and layout.

    Attributes:
        edits: the edits, none while there is a problem.
        problem: why there are no edits; empty before the first read and after a good one.
    """

    def __init__(
        self,
        programs: Programs,
        find_roots: Callable[[], DriverRoots] = DriverRoots,
        hook_path: str = "",
    ) -> None:
        """Create edits that nobody has read yet.

        Args:
            programs: runs `nvidia-ctk`.
            find_roots: looks for the driver; blocks.
            hook_path: the host's path of the program of hooks; found on the host if empty.
        """
        self._programs = programs
        self._find_roots = find_roots
        self._hook_path = hook_path
        self._read_for: tuple[str, DriverRoots] | None = None
        self.edits = cdi.ContainerEdits()
        self.problem = ""

    async def read(self, driver: str) -> None:
        """Read the edits of a version of the driver, if they were not; log a new problem."""
        roots = await to_thread.run_sync(self._find_roots)
        if self._read_for == (driver, roots):
            return
        try:
            edits = await self._generate(roots)
        except (ProgramError, ValueError) as error:
            problem = str(error)
            if not isinstance(error, ProgramError):
                problem = f"`{_COMMAND[0]}`: {error}"
            if problem != self.problem:
                log.warning("cdi edits of the driver unavailable", error=problem)
            # Those of another driver, or of other roots, name libraries that are gone.
            self.edits, self.problem, self._read_for = cdi.ContainerEdits(), problem, None
            return
        self.edits, self.problem, self._read_for = edits, "", (driver, roots)

    async def _generate(self, roots: DriverRoots) -> cdi.ContainerEdits:
        """Run the toolkit.

        Raises:
            ProgramError: it is missing, or failed.
            ValueError: its output cannot be used.
        """
        hook = self._hook_path or await to_thread.run_sync(find_hook, roots.host)
        command = list(_COMMAND)
        if roots.driver.here != "/":
            command.append(f"--driver-root={roots.driver.here}")
        if roots.dev.here != roots.driver.here:
            command.append(f"--dev-root={roots.dev.here}")
        if hook:
            command.append(f"--nvidia-ctk-path={hook}")  # the name that all its versions know
        edits = cdi.parse_edits(await self._programs.run(*command))
        if not hook and edits.edits.get("hooks"):
            raise ValueError(
                "the hooks of its specification need nvidia-cdi-hook on the host, and it is not "
                f"below {roots.host.here}; install NVIDIA's container toolkit on the host, "
                f"{MOUNT_HOST}, or name the program with --nvidia-cdi-hook-path"
            )
        return cdi.with_host_paths(edits, (roots.driver, roots.dev, roots.host))
