"""The start of the relay's process, by the path of its folder."""

import sys
from importlib import import_module
from os.path import realpath  # pathlib is large

# Python has put this folder here; the modules are known by their full names, as to the daemon.
sys.path[0] = realpath(f"{__file__}/../../../../..")
import_module("metagpu.plugins.pod_api.relay.relay").main(*sys.argv[1:])
