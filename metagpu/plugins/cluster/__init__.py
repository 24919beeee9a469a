"""The API server's side: configuration choice, labels, status and Events.

`library` alone imports kubernetes_asyncio, and only where the API server is used.
"""
