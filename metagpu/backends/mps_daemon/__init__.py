"""One MPS control daemon, of a GPU or of a MIG instance: for every backend that shares through MPS.

`supervision` keeps it, `supervisor` says what to do about what was seen, `control` speaks to it,
`parts` says what its clients have.
"""
