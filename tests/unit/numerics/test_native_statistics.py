"""The compiled function for statistics: built once, found again, and what happens where it cannot be built."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.cpp_builder import CppBuilder

import gradrewrite as gr
from gradrewrite._compat import cpp_library
from gradrewrite.distributed.figures import Combination
from gradrewrite.errors import RewriteWarning
from gradrewrite.numerics import measuring, native_statistics
from gradrewrite.numerics.statistics import STATISTICS, Statistic, share_of
from gradrewrite.passes import CheckFinite, Observe

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def fresh() -> Iterator[None]:
    """The function is built, or not, within the test."""
    native_statistics.compiled_function.cache_clear()
    yield
    native_statistics.compiled_function.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_is_built_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = cpp_library.build_cpp(source)
    assert built is not None
    assert built.is_file()
    with monkeypatch.context() as patched:
        patched.setattr(CppBuilder, "build", lambda _: pytest.fail("it is in the cache"))
        assert cpp_library.build_cpp(source) == built

    source.write_text(SOURCE.replace("42", "43"))
    other = cpp_library.build_cpp(source)
    assert other not in (None, built)


def test_an_unfinished_build_is_not_taken_for_a_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(builder: Any) -> None:
        Path(builder.get_target_file_path()).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CppBuilder, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cpp_library.build_cpp(source)
    built = cpp_library.build_cpp(source)
    assert built is not None
    assert built.stat().st_size > 1000


@pytest.mark.slow
def test_processes_build_at_the_same_time(source: Path) -> None:
    program = f"""
import ctypes
from pathlib import Path
from gradrewrite._compat import cpp_library
print(ctypes.CDLL(str(cpp_library.build_cpp(Path({str(source)!r})))).answer())
"""
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["42", "42"]


def records(x: Tensor) -> dict[str, float]:
    torch.manual_seed(0)
    policy = [gr.on("*", [Observe("norm", "max_abs", "zeros"), CheckFinite("record")])]
    model = gr.transform(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), policy)
    model(x).sum().backward()
    return model.monitor.latest()


def test_without_a_compiler_the_figures_are_the_same(fresh: None) -> None:
    x = torch.randn(3, 4)
    wanted = records(x)
    assert native_statistics.compiled_function() is not None
    native_statistics.compiled_function.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert cpp_library.build_cpp(Path(native_statistics.__file__).with_suffix(".cpp")) is None
        got = records(x)
        assert native_statistics.compiled_function() is None
    assert list(got) == list(wanted)
    assert got == pytest.approx(wanted, rel=1e-6)


def test_a_build_that_fails_warns_once(
    fresh: None, source: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    source.write_text("this is no C++")
    monkeypatch.setattr(native_statistics, "_SOURCE", source)
    for _ in range(2):
        assert measuring.measure(torch.tensor([3.0, 4.0]), ["norm"], is_opaque=True).tolist() == [5.0]
    (warning,) = recwarn
    assert issubclass(warning.category, RewriteWarning)
    assert "could not be built" in str(warning.message)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_openmp_library() -> None:
    program = (  # in a process of its own: scikit-learn has one too
        "from gradrewrite.numerics import native_statistics\n"
        "assert native_statistics.compiled_function() is not None\n"
        "print(open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"/\S*lib[gi]*omp[\w.-]*\.so\S*", done.stdout))
    assert len(loaded) == 1, loaded


def test_types_that_it_does_not_know_are_measured_op_by_op() -> None:
    counts, turned = torch.tensor([0, 3, -4]), torch.tensor([3 + 4j, 0j])
    assert native_statistics.figures_of([counts], "max_abs") is None
    assert native_statistics.figures_of([turned], "norm") is None
    assert torch.ops.gradrewrite.pack([turned, counts], "norm,max_abs; ", []).tolist() == [5.0, 5.0, 0.0, 3.0, -4.0]


def test_a_statistic_without_a_native_form_is_measured_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([-1.0, 2.0, 0.0, -3.0])
    assert native_statistics.figures_of([x], "negative,norm") is None
    negative = Statistic(lambda x: share_of(x < 0), Combination("mean"), "share", is_native=False)
    monkeypatch.setattr(measuring, "STATISTICS", {**STATISTICS, "negative": negative})
    assert measuring.measure(x, ["negative", "max_abs"], is_opaque=True).tolist() == [0.5, 3.0]
