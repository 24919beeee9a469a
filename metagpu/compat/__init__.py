"""Files of other programs: configurations to convert, manifests to read.

Each format has a module with a pure function: documents in, plain data and notes out. A key is
honoured, or one note names the effect that the key would have had. Nothing here knows a GPU, or
which backends are installed, and only `kube_documents` reads a file.
"""
