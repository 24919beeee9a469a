"""The container image of metagpu, laid without a registry and without a container engine.

`layer` is metagpu itself, and deploy/Dockerfile uses it too; `debian` is a base of Debian's
packages; `archive` writes the file that `docker load` and `ctr images import` take.
"""
