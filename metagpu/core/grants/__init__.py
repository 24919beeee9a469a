"""Grants: the devices, mounts and variables that a container gets for its shares.

Pure functions of snapshots; no Kubernetes messages, no files.
"""
