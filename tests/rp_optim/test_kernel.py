"""The kernels themselves: bits, threads, floating-point modes, and how they come to be there."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ended
from rp_optim.gradients import squares_of
from rp_optim.kernels import build
from rp_optim.kernels.cache import cache_folder, check_trusted
from rp_optim.kernels.kernel import Kernels, current_kernel
from rp_optim.kernels.native import Library
from rp_optim.kernels.updates import AdamNumbers, AdamUpdate, Spot

NATIVE = tuple(name for name in rp_optim.available_kernels() if name != "torch")


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    before = rp_optim.kernel_in_use()
    yield
    rp_optim.use_kernel(before)


def on_every_kernel(compute: Callable[[], torch.Tensor], names: tuple[str, ...] = NATIVE) -> list[torch.Tensor]:
    results = []
    for name in names:
        rp_optim.use_kernel(name)
        results.append(compute())
    return results


def adam_step(
    grad: torch.Tensor, weight_dtype: torch.dtype = torch.bfloat16, factor: float = 1.0, decay: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Master and weight after one step from ones, straight from the kernel in use."""
    param, weight = torch.ones(grad.numel()), torch.empty(grad.numel(), dtype=weight_dtype)
    numbers = AdamNumbers(l2=0.0, shrink=1 - decay, rate=0.1, beta1=0.9, beta2=0.999, root=1.0, eps=1e-8)
    mean, square = torch.full_like(param, 0.1), torch.full_like(param, 0.2)
    current_kernel().adam([AdamUpdate(Spot(param, grad, weight, factor), numbers, mean, square)])
    return param, weight


# What is there


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks torch what an x86 processor can do")
def test_the_kernels_are_those_that_the_processor_can_run(caplog: pytest.LogCaptureFixture) -> None:
    # Torch's own word for it, and a compiler is there in every environment that these tests are run in.
    expected = {"AVX512": {"avx512", "avx2"}, "AVX2": {"avx2"}}.get(torch.backends.cpu.get_cpu_capability(), set())
    assert set(rp_optim.available_kernels()) >= expected | {"scalar", "torch"}, found(caplog)
    assert rp_optim.kernel_in_use() == rp_optim.available_kernels()[0] or "RP_OPTIM_KERNEL" in os.environ


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(rp_optim.KernelUnavailable, match=r"must be one of .*torch here, but is 'sse9' instead"):
        rp_optim.use_kernel("sse9")


# Bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for name in NATIVE:
        rp_optim.use_kernel(name)
        param = torch.zeros(every.numel())
        parameter = rp_optim.Master(param)
        rp_optim.link(parameter, lambda: every)
        rp_optim.SGD([parameter], lr=1.0, maximize=True).step()
        assert torch.equal(torch.nan_to_num(parameter.data, nan=7.0), torch.nan_to_num(every.float(), nan=7.0)), (
            name
        )


def interesting_floats() -> torch.Tensor:
    """Every upper half of an fp32 number with lower halves around each tie and each edge."""
    upper = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower[None, :]).reshape(-1)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_to_nearest_even_as_torch_does(dtype: torch.dtype) -> None:
    values = interesting_floats()
    for name in NATIVE:
        rp_optim.use_kernel(name)
        master, weight = rp_optim.Master(values.clone()), torch.zeros(values.numel(), dtype=dtype)
        rp_optim.link(master, lambda: torch.zeros_like(values), lambda weight=weight: weight)
        rp_optim.SGD([master], lr=1.0).step()
        # A NaN may come with other bits, but is one.
        expected = values.to(dtype)
        assert torch.equal(weight.isnan(), expected.isnan()), name
        number = ~expected.isnan()
        assert torch.equal(weight.view(torch.int16)[number], expected.view(torch.int16)[number]), name


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(floats32, min_size=1, max_size=200),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(1e-6, 10.0),
    st.sampled_from([0.0, 0.25]),
)
def test_all_variants_give_the_same_bits_and_torch_nearly(
    numbers: list[float], dtype: torch.dtype, factor: float, decay: float
) -> None:
    grad = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    masters = on_every_kernel(lambda: adam_step(grad, factor=factor, decay=decay)[0])
    assert all(torch.equal(master.view(torch.int32), masters[0].view(torch.int32)) for master in masters)
    (reference,) = on_every_kernel(lambda: adam_step(grad, factor=factor, decay=decay)[0], ("torch",))
    torch.testing.assert_close(masters[0], reference, rtol=1e-6, atol=1e-6, equal_nan=True)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(floats32, max_size=300))
def test_squares_are_those_of_fp64(numbers: list[float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(len(numbers)))
    weight.grad = torch.tensor(numbers, dtype=torch.float32)
    exact = weight.grad.double().square().sum().item()
    found = set()
    for name in NATIVE:
        rp_optim.use_kernel(name)
        found.update(squares_of([weight]))
    assert len(found) == 1
    assert found.pop() == pytest.approx(exact, rel=1e-14, abs=0)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 20))
def test_nothing_beside_the_arrays_is_touched(before: int, length: int, after: int) -> None:
    for name in NATIVE:
        rp_optim.use_kernel(name)
        weights = torch.full((before + length + after,), 9.0, dtype=torch.bfloat16)
        masters = torch.full((before + length + after,), 9.0)
        master = rp_optim.Master(masters[before : before + length])
        rp_optim.link(master, lambda: torch.ones(length), lambda w=weights: w[before : before + length])
        rp_optim.SGD([master], lr=1.0).step()
        for found in (weights.float(), masters):
            expected = torch.full_like(found, 9.0)
            expected[before : before + length] = 8.0
            assert torch.equal(found, expected)


def test_weights_written_around_the_cache_start_anywhere() -> None:
    length = (1 << 16) + 77
    grad = torch.linspace(-1, 1, length).bfloat16()
    for name, start in ((name, start) for name in NATIVE for start in (0, 1, 13, 31)):
        rp_optim.use_kernel(name)
        room = torch.full((length + 64,), 9.0, dtype=torch.bfloat16)
        master = rp_optim.Master(torch.zeros(length))
        rp_optim.link(master, lambda: grad, lambda room=room, start=start: room[start : start + length])
        rp_optim.SGD([master], lr=1.0).step()
        assert torch.equal(room[start : start + length], -grad)
        assert torch.equal(room[:start], torch.full((start,), 9.0, dtype=torch.bfloat16))
        assert torch.equal(room[start + length :], torch.full((64 - start,), 9.0, dtype=torch.bfloat16))


# Threads


def all_optimizers(threads: int) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(5)
    results = []
    for kind in (rp_optim.AdamW, rp_optim.SGD, rp_optim.Lion, rp_optim.Adafactor):
        sizes = ((200_001,), (700, 301), (1, 70_000), (70_000, 1))
        weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        norms = [rp_optim.clip_grad_norm_(weights, 1.0, norm_type=norm) for norm in (2.0, 1.0, 3.0)]
        kind(weights, lr=0.01).step()
        # In fp64, where the order of a sum shows.
        squares = [torch.tensor(squares, dtype=torch.float64) for squares in squares_of(weights)]
        results += [*squares, *norms, *(weight.data for weight in weights)]
    return results


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        alone = all_optimizers(1)
        for threads in (2, 3, 7):
            for left, right in zip(alone, all_optimizers(threads), strict=True):
                assert torch.equal(left, right)
    finally:
        torch.set_num_threads(before)


# Floating-point modes


@pytest.mark.usefixtures("kernel")
def test_tiny_gradients_are_not_flushed() -> None:
    weight = torch.nn.Parameter(torch.zeros(70_000))
    weight.grad = torch.full_like(weight, 1e-20)
    optimizer = rp_optim.Adam([weight])
    optimizer.step()
    state = optimizer.state[weight]
    torch.testing.assert_close(state["exp_avg"], torch.full((70_000,), 1e-21), rtol=1e-6, atol=0)
    # 1e-43 is 71 times the smallest number there is.
    assert torch.equal(state["exp_avg_sq"], torch.full((70_000,), (1e-20 * 1e-3) * 1e-20))
    assert (state["exp_avg_sq"] > 0).all()


def subnormals_live() -> bool:
    return bool((torch.tensor([1e-40]) * 0.5 > 0).all())


def big_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(300_000))
    weight.grad = torch.full_like(weight, 1e-20)
    rp_optim.AdamW([weight]).step()


@pytest.mark.usefixtures("kernel")
def test_no_floating_point_mode_is_changed() -> None:
    big_step()
    in_new_thread: list[bool] = []
    thread = threading.Thread(target=lambda: in_new_thread.append(subnormals_live()))
    thread.start()
    thread.join(10)
    assert in_new_thread == [True]
    assert subnormals_live()
    # And of torch's own threads, which are the kernel's as well.
    assert bool((torch.full((300_000,), 1e-40) * 0.5 > 0).all())


@pytest.mark.parametrize("name", NATIVE)
def test_a_mode_that_the_caller_set_is_kept_and_not_used(name: str) -> None:
    rp_optim.use_kernel(name)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        weight = torch.nn.Parameter(torch.zeros(8))
        weight.grad = torch.full_like(weight, 1.0)
        state = rp_optim.Adam([weight])
        weight.grad.view(torch.int32).fill_(torch.tensor(1e-20).view(torch.int32).item())
        state.step()
        assert (state.state[weight]["exp_avg_sq"].view(torch.int32) > 0).all()
        assert not subnormals_live()
    finally:
        torch.set_flush_denormal(False)


# Coming to be there

NO_COMPILER = """
import logging, os, sys
os.environ.pop("RP_OPTIM_KERNEL", None)
os.environ.pop("CC", None)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import torch, rp_optim
weight = torch.nn.Parameter(torch.ones(5))
weight.grad = torch.ones(5)
rp_optim.AdamW([weight], lr=0.5).step()
rp_optim.AdamW([weight], lr=0.5).step()
print("KERNEL", rp_optim.kernel_in_use(), weight[0].item() != 1.0)
"""

BUILD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
sys.modules["build"] = build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.build(build.find_compiler(), pathlib.Path(sys.argv[2]))
"""


# What it has made of the same arguments before is copied: temporary folders count for nothing.
QUICK = """#!/bin/sh
for word; do
    shift
    [ "$word" = -O3 ] && word=-O0
    [ "$word" = -fopenmp ] && [ "$NO_OPENMP" ] && exit 1
    [ "$last" = -o ] && made="$word"
    last="$word"
    set -- "$@" "$word"
done
[ "$1" != --version ] && [ -d "$KEPT" ] || exec cc "$@"
kept="$KEPT/$(printf '%s ' "$@" | sed 's|[^ ]*/\\.build-[^/ ]*/||g' | cksum | tr ' ' -)"
[ -f "$kept" ] || { cc "$@" && cp "$made" "$kept.$$" && mv "$kept.$$" "$kept"; exit; }
cp "$kept" "$made"
"""


@pytest.fixture(scope="session")
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def _quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_before: Path) -> None:
    """A compiler that takes no time to optimize, nor to compile again."""
    compiler = tmp_path / "quick-cc"
    compiler.write_text(QUICK)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("KEPT", str(compiled_before))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place to cache libraries in."""
    monkeypatch.setenv("RP_OPTIM_CACHE", str(tmp_path / "cache" / "kernels"))
    return tmp_path / "cache" / "kernels"


def found(caplog: pytest.LogCaptureFixture) -> tuple[tuple[str, ...], str]:
    """The kernels that a new process would find, and the one line that it would log."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rp_optim.kernels.kernel"):
        kernels = tuple(Kernels().all())
    (record,) = caplog.records
    return kernels, f"{record.levelname} {record.getMessage()}"


@pytest.mark.usefixtures("_quick_compiler")
def test_the_library_is_compiled_once_and_then_found(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels, said = found(caplog)
    (library,) = cache.iterdir()
    assert kernels == (*NATIVE, "torch")
    assert said.startswith(
        f"INFO rp-optim runs its steps with the {NATIVE[0]} kernel, compiled now into {library}"
    )
    assert found(caplog) == (kernels, said.replace("compiled now", "compiled before"))


@pytest.mark.usefixtures("_quick_compiler")
def test_a_broken_library_in_the_cache_is_compiled_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    found(caplog)
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    # Shorter than what the loader maps: looking at it there would kill the process.
    for broken in (b"half a library", whole[: len(whole) // 3], bytes(len(whole)), whole[:-1] + b"?"):
        library.unlink()
        library.write_bytes(broken)
        kernels, said = found(caplog)
        assert kernels == (*NATIVE, "torch")
        assert "compiled now into" in said
        (library,) = cache.iterdir()


@pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library of its own")
def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int x;")
    library = tmp_path / "x.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "x.c"], check=True)
    with pytest.raises(OSError, match="is not a library of these kernels"):
        Library(library, build.source_hash())


def test_a_library_in_the_wheel_that_cannot_be_loaded_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"of another machine")
    monkeypatch.setattr(rp_optim.kernels.kernel, "_IN_WHEEL", broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernels, said = found(caplog)
    assert kernels == ("torch",)
    assert said.startswith("WARNING")
    assert "there is no C compiler" in said
    assert f"the wheel's own library could not be loaded: {broken}" in said


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_compiler")
def test_several_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each compiles by itself.
    monkeypatch.delenv("KEPT")
    library = tmp_path / "room" / "kernels.so"
    library.parent.mkdir()
    command = [sys.executable, "-c", BUILD, build.__file__, str(library)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    seen: set[bytes] = set()
    while any(process.poll() is None for process in processes):
        if library.exists():
            seen.add(library.read_bytes())
    assert [process.returncode for process in processes] == [0, 0]
    assert list(library.parent.iterdir()) == [library]
    # Whoever looked at any time found nothing, or all of it.
    for number, content in enumerate({*seen, library.read_bytes()}):
        copy = tmp_path / f"{number}.so"
        copy.write_bytes(content)
        assert tuple(Library(copy, build.source_hash()).variants()) == NATIVE


@pytest.mark.usefixtures("_quick_compiler")
def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    compiler = build.find_compiler()
    assert compiler is not None
    build.build(compiler, library)
    with pytest.raises(OSError, match="compiled from other sources"):
        Library(library, "0" * 16)


@pytest.mark.slow
def test_without_a_compiler_torch_does_the_steps_and_says_so_once(tmp_path: Path) -> None:
    _, told, _ = ended(NO_COMPILER, RP_OPTIM_CACHE=str(tmp_path), PATH=str(tmp_path))
    said, kernel = told.splitlines()
    assert said.startswith(
        "WARNING rp-optim runs its steps with torch's operations, which are slower: there is no C compil"
    )
    assert kernel == "KERNEL torch True"


def test_a_compiler_that_fails_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo 1.0; exit 0; }\necho "no luck today" >&2\nexit 3\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    kernels, said = found(caplog)
    assert kernels == ("torch",)
    assert said.startswith("WARNING")
    assert "ended with 3: no luck today" in said
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cache", "_quick_compiler")
def test_a_compiler_without_openmp_will_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NO_OPENMP", "1")
    kernels, said = found(caplog)
    assert kernels == (*NATIVE, "torch")
    assert "on one thread: the compiler has no OpenMP" in said


@pytest.mark.usefixtures("_quick_compiler")
def test_where_no_cache_can_be_written_the_library_is_the_processs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RP_OPTIM_CACHE", str(tmp_path / "file"))
    kernels, said = found(caplog)
    assert kernels == (*NATIVE, "torch")
    assert "compiled for this process alone" in said


# What a stranger could have put there

STRANGER = """
#include <stdlib.h>
#include <fcntl.h>
__attribute__((constructor)) static void run(void) { open(getenv("STRANGER_WAS_HERE"), O_CREAT | O_WRONLY, 0600); }
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that makes a file, named in the environment, as soon as it is loaded."""
    monkeypatch.setenv("STRANGER_WAS_HERE", str(tmp_path / "was-here"))
    (tmp_path / "x.c").write_text(STRANGER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "x.so", tmp_path / "x.c"], check=True)
    return tmp_path / "x.so"


def plant(library: Path, folder: Path) -> Path:
    """Put a library where a search of `folder` finds it, under a name that says what is in it."""
    compiler = build.find_compiler()
    assert compiler is not None
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:32]
    return library.replace(folder / f"kernels-{build.cache_key(compiler)}-{digest}.so")


@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.parametrize("above", [0, 1], ids=["the folder itself", "a folder above"])
@pytest.mark.parametrize("mode", [0o777, 0o775], ids=oct)
def test_a_library_where_others_may_write_is_not_loaded(
    stranger: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, above: int, mode: int
) -> None:
    planted = plant(stranger, cache)
    open_to_others = (cache, *cache.parents)[above]
    open_to_others.chmod(mode)
    kernels, said = found(caplog)
    assert kernels == (*NATIVE, "torch")
    assert f"{open_to_others} must not be writable by others; run chmod go-w on it" in said
    assert not (tmp_path / "was-here").exists()
    assert planted.exists()


@pytest.mark.usefixtures("_quick_compiler")
def test_the_sticky_bit_protects_what_is_in_a_folder_and_not_the_cache_itself(
    stranger: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.parent.chmod(0o1777)
    assert "compiled now into" in found(caplog)[1]
    plant(stranger, cache)
    cache.chmod(0o1777)
    assert "must not be writable by others" in found(caplog)[1]
    assert not (tmp_path / "was-here").exists()


@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.parametrize("how", ["writable", "link"])
def test_a_file_that_others_could_change_is_compiled_anew(
    stranger: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    planted = plant(stranger, cache)
    if how == "link":
        planted.symlink_to(planted.rename(tmp_path / "elsewhere.so"))
    else:
        planted.chmod(0o666)
    assert "compiled now into" in found(caplog)[1]
    assert not planted.exists()
    assert not (tmp_path / "was-here").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "strangers").mkdir(mode=0o755)
    (tmp_path / "strangers" / "file").touch(0o644)
    check_trusted(tmp_path / "strangers" / "file")
    os.chown(tmp_path / "strangers", 12345, 12345)
    for path in ("strangers", "strangers/file"):
        with pytest.raises(PermissionError, match=r"strangers must belong to this user or root, .* to user 12345"):
            check_trusted(tmp_path / path)


@pytest.mark.usefixtures("_quick_compiler")
def test_what_is_compiled_under_an_open_umask_is_found_again(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    before = os.umask(0o002)
    try:
        found(caplog)
    finally:
        os.umask(before)
    assert "compiled before" in found(caplog)[1]


@pytest.mark.parametrize("shared", ["", "relative"])
def test_a_cache_that_is_not_absolute_is_ignored(
    shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RP_OPTIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == (tmp_path / "home" / ".cache" / "rp-optim").resolve()
    assert not (tmp_path / "relative").exists()


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_not_absolute_is_no_place_for_a_cache(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RP_OPTIM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(OSError, match=f"HOME must be absolute, but is {home!r}"):
        cache_folder()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ('gcc "-O2', "CC must be a command, but is 'gcc \"-O2': No closing quotation"),
        ("gcc-of-nowhere -O2", "CC must name a C compiler that runs, but is 'gcc-of-nowhere -O2'"),
    ],
    ids=["an open quotation mark", "a program that is not there"],
)
@pytest.mark.usefixtures("cache")
def test_what_is_wrong_with_cc_is_said_in_one_line(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", command)
    kernels, said = found(caplog)
    assert kernels == ("torch",)
    assert said.startswith(f"WARNING rp-optim runs its steps with torch's operations, which are slower: {reason}")
    assert len(said.splitlines()) == 1


def test_the_environment_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RP_OPTIM_KERNEL", "scalar")
    assert Kernels().current().name == "scalar"
    monkeypatch.setenv("RP_OPTIM_KERNEL", "sse9")
    with pytest.raises(rp_optim.KernelUnavailable):
        Kernels().current()
