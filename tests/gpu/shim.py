"""Registration of the simulated CUDA device with torch; imports neither torch nor triton."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, cast

Mode = Literal["interpreted", "compiled"]

VARIABLE = "GRADREWRITE_GPU"
MODES = ("interpreted", "compiled")
VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}  # whose private names are patched
_SOURCE = Path(__file__).with_name("shim.cpp")


def wanted() -> Mode | None:
    """The mode that the environment asks for; None if it asks for nothing.

    Raises:
        ValueError: The variable has another value.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in MODES:
        raise ValueError(f"{VARIABLE} is one of {', '.join(MODES)}; got {asked!r}")
    return cast(Mode, asked) if asked else None


def why_not() -> str:
    """The reason why the device cannot be simulated here; empty if it can."""
    for package, needed in VERSIONS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"the simulated GPU needs {package} {needed}, which is not installed"
        if found.partition("+")[0] != needed:
            return f"the simulated GPU needs {package} {needed}, and {found} is installed"
    if shutil.which("g++") is None:
        return "the simulated GPU needs g++"
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "the simulated GPU needs the CPU wheel of torch; this one has CUDA"
    return ""


def register(mode: Mode) -> None:
    """Register the device; once in a process, before torch is imported.

    Args:
        mode: ``"interpreted"`` lets triton interpret kernels, which it decides when it is imported.

    Raises:
        RuntimeError: torch is imported already; it would not look for the device again.
        subprocess.CalledProcessError: The compiler failed.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated GPU is registered before torch is imported")
    if mode == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
    library = _built()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def _built() -> Path:
    """The shared library of the shim; compiled once for a version of torch (4 s)."""
    torch = _torch_folder()
    key = hashlib.sha256(_SOURCE.read_bytes() + str(torch).encode() + version("torch").encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"gradrewrite-gpu-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", str(_SOURCE), *flags, "-o", str(partial)], check=True)
        partial.replace(library)  # another process may do the same
    return library


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
