"""What tests of the terminal share lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

# Test files are imported one by one.
sys.path.insert(0, str(Path(__file__).parent))
