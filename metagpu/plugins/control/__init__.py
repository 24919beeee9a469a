"""The operator's side: the daemon's control socket, its commands, its client.

Only root reaches the daemon here; containers use `pod_api`.
"""
