"""The ways of cutting a GPU, one module each, strangers to each other.

A backend says what shares a GPU has and what a container gets for some of them. It may import
`core`, and what several of them have in common, which knows none of them: `placement`, and
`mps_daemon`. It never speaks gRPC, and NVML only through `core.driver`.
"""
