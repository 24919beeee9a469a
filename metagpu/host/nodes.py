"""NVIDIA's device nodes, as they stand in the host's /dev."""

from pathlib import Path


def device_nodes(dev_root: Path | None = None) -> frozenset[str]:
    """List NVIDIA's device nodes, as paths seen from `dev_root` (the host's root by default)."""
    root = dev_root or Path("/")
    return frozenset(f"/dev/{node.name}" for node in (root / "dev").glob("nvidia*"))
