"""Several machines that train one model together, one process each: rp-engine's `Peers` on rp-dist.

`rp_engine.Runtime(machines=...)` finds `open_peers` by its entry point, so nothing needs to import this package.
"""

from rp_machines.opening import open_peers
from rp_machines.several import Several

__version__ = "0.1.0"

__all__ = ["Several", "open_peers"]
