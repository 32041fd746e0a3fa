"""Building C++ with the compiler and the options of Inductor's kernels for the CPU."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from gradrewrite._compat.versions import needed_for


def build_cpp(source: Path) -> Path | None:
    """Compile a C++ file into a shared library, as Inductor does for the CPU; None where that finds no compiler.

    The file includes no header of torch. The library is kept in a folder below torch's cache folder, by the contents of
    the file, the command and the version of the compiler; of several processes one compiles. A file that the compiler
    refuses raises CppCompileError (a RuntimeError), a folder that cannot be written OSError.
    """
    with needed_for("Inductor's compiler and options for the CPU can be used to build a library"):
        from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_compiler_version_info, get_cpp_compiler
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.exc import InvalidCxxCompiler
        from torch._inductor.runtime.cache_dir_utils import cache_dir
        from torch.utils._filelock import FileLock

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return None
    options = CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=False, warning_all=False, compiler=compiler)

    def builder(folder: str) -> CppBuilder:
        return CppBuilder(name=source.stem, sources=str(source), output_dir=folder, BuildOption=options)

    identity = (source.read_text(), builder("folder").get_command_line(), get_compiler_version_info(compiler))
    folder = Path(cache_dir(), "gradrewrite", hashlib.sha256(repr(identity).encode()).hexdigest()[:32])
    library = folder / Path(builder(str(folder)).get_target_file_path()).name
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / "lock")), tempfile.TemporaryDirectory(dir=folder) as building:
            if not library.exists():
                built = builder(building)
                built.build()
                os.replace(built.get_target_file_path(), library)  # whole, for who does not wait for the lock
    return library
