"""End-to-end tests of metagpu on a real one-node Kubernetes."""
