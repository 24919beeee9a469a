"""`metagpu demo`: its scenarios, their run on a simulated node, and its tables."""
