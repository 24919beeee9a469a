"""The HTTP server of the metrics, the status API and the page.

`server` and `messages`, with their library, are loaded only with an address.
"""
