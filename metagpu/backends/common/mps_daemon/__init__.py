"""One MPS control daemon, of a GPU or MIG instance, for every backend with MPS.

`supervisor` runs the loop, `decisions` holds its pure decisions, `control` the commands and
directories, `client_limits` the limits of a client. Nothing here knows how shares are chosen.
"""
