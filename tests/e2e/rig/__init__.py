"""A real one-node Kubernetes on loopback, and the metagpu daemon beside its kubelet.

`python -m tests.e2e.rig prepare` gathers the programs once; `Node` starts and
stops them; `Daemon` runs metagpu as a host process; `kubectl` talks to the
API server. Nothing here knows what a test wants to show.
"""
