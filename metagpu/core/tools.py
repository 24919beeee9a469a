"""The contract of programs of the host: what a backend may ask for that NVML cannot do."""

from typing import Protocol


class Tools(Protocol):
    """Runs programs of the host to their end."""

    async def run(self, program: str, *arguments: str) -> str:
        """Run a program by its name, such as `nvidia-smi`; give what it printed.

        Raises:
            ToolMissing: if there is no such program here; says where it was looked for.
            ToolError: if it failed or did not end in time; says what it printed last.
        """
        ...
