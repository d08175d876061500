"""What the tests of rp_presets share: `families` and `comparison`, which are no tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
