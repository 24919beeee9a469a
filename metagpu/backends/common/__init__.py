"""Code that several backends share: bin packing, MPS control daemons.

Nothing here knows a backend; backends import these modules and not each other.
"""
