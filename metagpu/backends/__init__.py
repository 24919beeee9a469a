"""The ways of cutting a GPU, one module each, strangers to each other.

A backend says what shares a GPU has and what a container gets for some of them. It may import
`core` and nothing else of ours; it never speaks gRPC, and NVML only through `core.driver`.
"""
