"""Keep `torch.compiler.is_compiling` from being true while another thread compiles."""

from contextlib import nullcontext
from typing import Any

import torch


def hide_from_other_threads() -> None:
    """Make `torch.compiler.is_compiling()` true only in traced code, as in torch 2.11, for the whole process.

    Newer versions also set a flag while anything is compiled, and all threads see it. Code that asks, such as that
    of transformers' masks, would take another path while another device's layer is being compiled.
    """
    compiler: Any = torch.compiler
    if hasattr(compiler, "_compile_session_context"):
        compiler._compile_session_context = nullcontext
