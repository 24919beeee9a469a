"""Loading of the API server's client for a command, and the memory that a daemon takes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.webhook.rig import Authority


def test_the_authorities_of_the_system_are_read_by_no_library(tmp_path: Path) -> None:
    """Contexts that libraries make as they are loaded are empty; later ones have authorities."""
    program = """
import gc, ssl
from metagpu.cli.loading import quick_loading
with quick_loading():
    from metagpu.plugins.cluster.client import aiohttp
own, later = aiohttp.connector._SSL_CONTEXT_VERIFIED, ssl.create_default_context()
print(gc.isenabled(), *(len(it.get_ca_certs()) for it in (own, later)))
"""
    authority = Authority(tmp_path)
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program],
        env={**os.environ, "SSL_CERT_FILE": str(authority.certificate)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split()[:2] == ["True", "0"]
    assert int(done.stdout.split()[2]) >= 1


def test_large_buffers_have_memory_of_their_own() -> None:
    """The buffers of a large configuration return theirs; a read of a socket takes none."""
    program = """
import ctypes
from metagpu.cli.loading import return_large_buffers
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
look = ctypes.CDLL(None).mallinfo2
look.restype = Info
return_large_buffers()
bytes(4 << 20)  # freed at once: glibc by itself would take all smaller ones from the heap now
before = look().e
large = [bytes(300_000) for _ in range(10)]
print(look().e - before >= 10 * 300_000)
before = look().e
read = bytes(256 << 10)
print(look().e - before)
"""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["True", "0"]
