"""The API server's side: configuration choice, labels, status and Events.

`client` and `credentials` alone import kubernetes_asyncio, and only where the API server is used.
"""
