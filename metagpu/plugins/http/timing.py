"""The times of HTTP."""

import msgspec


class HttpTiming(msgspec.Struct, frozen=True):
    """Times of serving, all in seconds.

    Attributes:
        page_age: requests within this time share one page.
        request_timeout: for a client to send its request.
        response_timeout: for a client to read the response: Prometheus gives up after 10 s too.
        silence: that a client which sends nothing waits in the kernel before it is accepted; 0
            accepts it at once.
        retry_period: between two attempts to bind the port.
    """

    page_age: float = 1.0
    request_timeout: float = 5.0
    response_timeout: float = 10.0
    silence: int = 5
    retry_period: float = 5.0
