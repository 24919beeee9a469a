"""`python -m metagpu` is `metagpu`."""

import sys

from metagpu.cli import main

sys.exit(main())
