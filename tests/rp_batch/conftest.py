"""What the tests of rp_batch share lies beside them, since test files are imported one by one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
