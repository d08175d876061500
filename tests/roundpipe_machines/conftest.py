"""Several processes of one machine stand for several machines."""

from __future__ import annotations

import sys
from pathlib import Path

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))
