"""The command lines `metagpu` and `mgctl`: arguments, commands, exit statuses.

A command loads what it needs when it runs; `--help` and `mgctl` load no plugin and no event loop.
"""
