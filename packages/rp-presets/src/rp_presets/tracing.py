"""What code asks of the compiler while another thread compiles."""

from contextlib import nullcontext
from typing import Any

import torch


def hide_from_other_threads() -> None:
    """Let `torch.compiler.is_compiling()` be true in traced code only, as in torch 2.11, for the whole process.

    Newer versions also set a flag while anything is compiled, which all threads see. A model's code that asks, as
    transformers' masks do, would take another path there for as long as another device's layer is being compiled.
    """
    compiler: Any = torch.compiler
    if hasattr(compiler, "_compile_session_context"):
        compiler._compile_session_context = nullcontext
