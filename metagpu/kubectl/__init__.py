"""The plugin `kubectl metagpu`: all nodes, for a user of the API server.

Asking is in `viewer`, deciding is pure, and nothing imports this package.
"""
