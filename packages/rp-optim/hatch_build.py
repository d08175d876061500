"""Build hook that compiles the kernels into the wheel if there is a compiler; otherwise first use compiles them.

``RP_OPTIM_WHEEL=compiled`` fails where they cannot be compiled; ``RP_OPTIM_WHEEL=pure`` does not try.
"""

# Only the build's own environment has hatchling.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _builder(root: str) -> Any:
    # Load the file by its path: importing the package needs torch, which the build environment does not have.
    spec = importlib.util.spec_from_file_location("rp_optim_build", Path(root) / "src/rp_optim/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface):
    """Builds ``rp_optim/kernels/_kernels.so``. A wheel with it fits one platform, and any Python on that."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the wheel is editable: it points at these sources, which may change later."""
        mode = os.environ.get("RP_OPTIM_WHEEL", "")
        if mode not in ("", "compiled", "pure"):
            raise ValueError(f"RP_OPTIM_WHEEL must be compiled or pure, but is {mode!r}; correct it, or unset it")
        if self.target_name != "wheel" or version == "editable" or mode == "pure":
            return
        builder = _builder(self.root)
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / "_kernels.so"
        try:
            compiler = builder.find_compiler()
            if compiler is None:
                if mode:
                    raise builder.BuildFailed("there is no C compiler that runs")
                self.app.display_warning("no C compiler: the kernels will be compiled on first use")
                return
            builder.build(compiler, library)
        except (builder.BuildFailed, OSError) as error:
            if mode:
                raise
            self.app.display_warning(f"the kernels will be compiled on first use: {error}")
            return
        build_data["force_include"][str(library)] = "rp_optim/kernels/_kernels.so"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled library, which is in the wheel now."""
        del version, build_data, artifact_path
        if hasattr(self, "_folder"):
            self._folder.cleanup()
