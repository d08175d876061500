"""`Publications`: who is told on the optimizer's thread of weights that steps publish."""

from __future__ import annotations

from rp_state.block import Block


class Publications:
    """Ignores what it is told."""

    def note_published(self, block: Block) -> None:
        """A machine alone has published a block and left its turn."""

    def note_step_over(self) -> None:
        """A step has ended, or failed: it publishes nothing more."""
