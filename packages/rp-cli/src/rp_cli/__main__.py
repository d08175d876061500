"""Entry point of ``python -m rp_cli``: runs the command line."""

import sys

from rp_cli.command import main

sys.exit(main())
