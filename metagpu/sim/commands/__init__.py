"""`metagpu sim`: its command line, its commands, the way to the running daemon."""
