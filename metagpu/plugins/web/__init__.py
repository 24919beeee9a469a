"""The page in a browser, and the status API of `kubectl metagpu`.

Each is loaded only with its address (`--web`, `--status-api`).
"""
