"""The start of kubectl-metagpu: unpacks its modules once, for this Python, and runs them.

Any Python 3 reads this file, to say which one is needed.
"""

import atexit
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import zipfile

OLDEST = (3, 11)


def unpack(archive: str, folder: str) -> None:
    """Unpack the modules, and msgspec's compiled part for this Python, into an empty folder."""
    native = "native/" + platform.machine() + "/"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(archive) as parts:
        compiled = [
            name
            for name in parts.namelist()
            if name.startswith(native) and name.endswith("_core" + suffix)
        ]
        if not compiled:
            sys.exit(
                "kubectl metagpu: nothing is compiled here for Python %s on %s %s: install the "
                "package by `pip install metagpu`, or use another Python 3.11 to 3.14"
                % (platform.python_version(), platform.system(), platform.machine())
            )
        for name in parts.namelist():
            if name.startswith("lib/") or name in compiled:
                path = name.split("/", 1)[1] if name.startswith("lib/") else name[len(native) :]
                target = os.path.join(folder, *path.split("/"))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as file:
                    file.write(parts.read(name))


def find_modules(archive: str) -> str:
    """Return the folder of the unpacked modules: of the cache, or else of this run alone."""
    with zipfile.ZipFile(archive) as parts:
        digest = parts.read("digest").decode()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.path.join(cache, "kubectl-metagpu")
    python = "%s-%s-%s" % (sys.implementation.cache_tag, sys.platform, platform.machine())
    target = os.path.join(home, "%s-%s" % (digest[:16], python))
    if os.path.isdir(target):
        return target
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(prefix=".new-", dir=home)
    except OSError:
        fresh = tempfile.mkdtemp(prefix="kubectl-metagpu-")
        atexit.register(shutil.rmtree, fresh, True)  # noqa: FBT003 - ignores errors
        unpack(archive, fresh)
        return fresh
    try:
        unpack(archive, fresh)
        os.rename(fresh, target)
    except OSError:
        if not os.path.isdir(target):  # where another start was first, its folder is as good
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def main() -> int:
    """Run kubectl-metagpu, or its completion where the file has that name."""
    if sys.version_info < OLDEST:
        sys.exit(
            "kubectl metagpu: this is Python %d.%d, and it needs 3.11 or newer: put one first in "
            "PATH as python3" % sys.version_info[:2]
        )
    sys.path.insert(0, find_modules(os.path.dirname(os.path.abspath(__file__))))
    from metagpu.kubectl.program import complete, main

    name = os.path.basename(sys.argv[0])
    return complete() if name.startswith("kubectl_complete") else main()


sys.exit(main())
