"""``python -m roundpipe`` is the command line."""

import sys

from roundpipe.cli import main

sys.exit(main())
