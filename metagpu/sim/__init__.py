"""A node without hardware: NVML, a kubelet and an API server in Python; the demo.

    machine     the GPUs, the driver, MIG and their faults
    nvml        NVML's C functions on that machine
    kubelet     the device manager of a kubelet
    apiserver   an API server with Nodes, Pods, ConfigMaps and Events
    cluster     both together with a scheduler, for one node
    commands    `metagpu sim ...`
    demo        `metagpu demo`

The real `metagpu.nvml` and the real pynvml run on the simulated library. No other package but
`cli`, and the tests, may import this one.
"""
