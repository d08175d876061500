"""A kernel that expands packed weights gives the bits of torch's operations, which do it where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples

sys.path.insert(0, str(Path(__file__).parent))
from packed_bits import FORMS, assert_same_bits, expanded_by_torch, random_bits
from rp_packing import KernelWarning, PackedWeight
from rp_packing.format import Format
from rp_packing.formats.by_name import format_of
from rp_packing.kernel import choice, launching
from rp_packing.layout import CodeLayout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).parent
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="torch brings Triton along on Linux alone")


def name_of(form: Format) -> str:
    return f"{form.name}-{'transposed' if form == format_of('mxfp4', transposed=True) else 'rows'}"


# Without a GPU: what Triton's interpreter makes of the kernel


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("test", ["any_bits", "every_code", "layers_train"])
def test_the_interpreted_kernel_gives_the_bits_of_torch(test: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(FOLDER.parent)]),
    }
    # NumPy, in which the interpreter computes, warns of infinities.
    command = [sys.executable, "-W", "ignore", str(FOLDER / "interpreted_kernel.py"), test, str(examples(300))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Without a GPU: what is compiled for one


def compiled(layout: CodeLayout, dtype: torch.dtype, arch: int, *, is_aligned: bool = True) -> dict[str, Any]:
    """Every level of what Triton makes of the kernel for a card, as at a launch; down to machine code."""
    import triton
    from rp_packing.kernel import triton_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton_kernel.expand_kernel
    sizes, constants = triton_kernel.settings(layout)
    scales = "*u8" if layout.kind == "first_low" else "*fp32"
    types = {"codes": "*u8", "scales": scales, "values": "*fp32", "out": f"*{DTYPES[dtype]}"}
    types |= {name: "i64" if size >= 1 << 31 else "i32" for name, size in sizes.items()}
    constants |= {name: size for name, size in sizes.items() if size == 1} | (
        {} if layout.values else {"values": None}
    )
    types |= dict.fromkeys(constants, "constexpr")
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    whole = (
        [name for name in types if name not in constants and sizes.get(name, 0) % 16 == 0] if is_aligned else []
    )
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in whole},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm


def check_rounding(ptx: str, dtype: torch.dtype) -> None:
    """Nothing flushes subnormal numbers, and results are rounded to nearest."""
    operations = {word for line in ptx.splitlines() for word in line.split() if "f32" in word and "." in word}
    assert {one for one in operations if one.startswith("mul")} in ({"mul.rn.f32"}, {"mul.f32"})
    assert not [one for one in operations if "ftz" in one or one.startswith(("fma", "mad"))]
    rounding = {one for one in operations if one.startswith("cvt") and not one.startswith("cvt.rn.f32.s")}
    wanted = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype)
    short = {f"cvt.rn.{wanted}x2.f32", f"cvt.rn.{wanted}.f32"}
    assert rounding <= short if wanted else not rounding
    assert bool(rounding) == bool(wanted)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_it_compiles_for_cards_and_rounds_as_torch_does(
    form: Format, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype in DTYPES if arch == 90 else [torch.bfloat16]:
        found = compiled(form.layout((4, 2048, 4096)), dtype, arch)
        check_rounding(found["ptx"], dtype)
        assert found["cubin"]
    # Whole vectors are read and written.
    assert "ld.global.v4" in found["ptx"]
    assert "st.global.v4" in found["ptx"]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_it_compiles_for_weights_of_any_number_of_elements_at_any_address(
    form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for shape in ((3, 32, 32), (128, 1 << 16, 1 << 15), (1, 32, 1 << 32)):
        found = compiled(form.layout(shape), torch.bfloat16, 90, is_aligned=False)
        assert found["cubin"]
        # Nothing is read as if it were aligned: bytes of codes are read one by one.
        assert "ld.global.v" not in found["ptx"]


def test_layouts_have_the_bytes_of_codes_and_scales() -> None:
    for form in FORMS:
        for shape in ((3, 128, 96), (2, 5, 160, 32), (1, 256, 64)):
            layout, (codes, scales, _) = form.layout(shape), form.specs(shape)
            assert layout.matrices * layout.lines * layout.line_bytes == torch.Size(codes).numel()
            assert torch.Size(layout.scales).numel() == torch.Size(scales).numel()
            assert layout.matrices * layout.lines * layout.length == torch.Size(shape).numel()


# Which way is taken


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is known of any device yet."""
    monkeypatch.setattr(launching, "_launched", set())
    monkeypatch.setattr(launching, "_refused", {})
    return monkeypatch


@pytest.fixture
def as_on_a_gpu(fresh: pytest.MonkeyPatch) -> None:
    """Tensors of the host are taken for those of a CUDA device, so Triton refuses the launch."""
    fresh.setattr(choice, "is_for_kernels", lambda *_: True)


def packed(name: str = "nf4", seed: int = 0) -> PackedWeight:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))
    return PackedWeight.of(format_of(name), weight.bfloat16())


def expected(weight: PackedWeight) -> torch.Tensor:
    return expanded_by_torch(weight.format, weight.codes, weight.scales, tuple(weight.shape), weight.dtype)


@pytest.mark.slow
def test_importing_the_package_imports_no_triton() -> None:
    script = "import sys, rp_packing.kernel.choice; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@needs_triton
@pytest.mark.usefixtures("as_on_a_gpu")
def test_where_the_kernel_does_not_run_torch_expands_and_one_warning_says_why() -> None:
    with pytest.warns(
        KernelWarning, match=r"by operations of torch on cpu.*: Triton's kernel does not run there, \w+Error"
    ):
        found = packed().expanded()
    assert torch.equal(found, expected(packed()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("fp8", "nf4"):
            assert torch.equal(packed(name).expanded(), expected(packed(name)))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_triton_the_warning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rp_packing.kernel.triton_kernel", raising=False)
    with pytest.warns(KernelWarning, match="import of triton halted.*it needs Triton.*apt install gcc"):
        found = packed().expanded()
    assert torch.equal(found, expected(packed()))
    assert "triton" in (choice.refusal(torch.device("cpu")) or "")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_device_that_is_short_of_memory_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter([torch.OutOfMemoryError("too much"), RuntimeError("Triton Error [CUDA]: out of memory"), None])

    def launch(*_: object) -> None:
        error = next(launches)
        if error is not None:
            raise error

    monkeypatch.setattr(choice, "_launch", launch)
    for words in ("too much", "out of memory"):
        with pytest.raises(RuntimeError, match=words):
            packed().expanded()
    packed().expanded()
    assert next(launches, "all were launched") == "all were launched"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_error_of_a_kernel_that_has_run_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter([None, ValueError("of a later launch")])

    def launch(*_: object) -> None:
        error = next(launches)
        if error is not None:
            raise error

    monkeypatch.setattr(choice, "_launch", launch)
    weight = packed()
    out = torch.empty(weight.shape, dtype=weight.dtype)
    choice.expand_into(weight.format, weight.codes, weight.scales, out)
    with pytest.raises(ValueError, match="of a later launch"):
        choice.expand_into(weight.format, weight.codes, weight.scales, out)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_one_thread_compiles_at_a_time_and_nobody_waits_for_it_who_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bool]] = []
    compiles, may_end = threading.Event(), threading.Event()

    def launch(form: Format, *_: object) -> None:
        seen.append((form.name, launching._FIRST.locked()))
        if form.name == "fp8":
            compiles.set()
            assert may_end.wait(60)

    monkeypatch.setattr(choice, "_launch", launch)
    known, unknown = packed("nf4"), packed("fp8")
    out = torch.empty(known.shape, dtype=known.dtype)
    choice.expand_into(known.format, known.codes, known.scales, out)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(unknown.expanded)
        assert compiles.wait(60)
        # A thread compiles one; what is compiled already is launched meanwhile.
        choice.expand_into(known.format, known.codes, known.scales, out)
        may_end.set()
        first.result(60)
    assert seen == [("nf4", True), ("fp8", True), ("nf4", True)]
    choice.expand_into(known.format, known.codes, known.scales, out)
    assert seen[-1] == ("nf4", False)


def test_tensors_that_trace_operations_are_expanded_by_those_of_torch(fresh: pytest.MonkeyPatch) -> None:
    # given tensors whose mode is not asked for
    fresh.setattr(launching, "is_watched", lambda: False)
    with FakeTensorMode(), torch.device("cuda"):
        codes, scales, out = torch.empty(32, dtype=torch.uint8), torch.empty(1), torch.empty(64)
        assert codes.is_cuda
        choice.expand_into(format_of("nf4"), codes, scales, out)
    assert not launching._refused


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5120, 25600), torch.bfloat16),
        ((4, 2880, 5760), torch.bfloat16),
        ((2, 160, 4128), torch.float16),
        ((2, 160, 4128), torch.float32),
        ((3, 96, 1), torch.bfloat16),
        ((33, 0, 32), torch.bfloat16),
    ],
)
def test_on_a_gpu_any_bits_are_expanded_as_by_torch(
    form: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if form == format_of("mxfp4"):
        shape = (*shape[:-2], shape[-1], shape[-2])
    for offset in (0, 1):
        codes, scales = random_bits(form, shape, 0, offset=offset, device="cuda")
        weight = PackedWeight(form, codes, scales, shape, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error", KernelWarning)
            found = weight.expanded()
        assert_same_bits(found, expanded_by_torch(form, codes, scales, shape, dtype))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_threads_compile_and_launch_at_once() -> None:
    # given two threads, each with a stream of its own, and formats in another order
    meeting, shape = threading.Barrier(2, timeout=60), (320, 1056)
    weights = [(form, random_bits(form, shape, 1, device="cuda")) for form in FORMS for _ in DTYPES]
    todo = [(form, bits, dtype) for (form, bits), dtype in zip(weights, [*DTYPES] * len(FORMS), strict=True)]
    torch.cuda.synchronize()

    def expand_all(ordered: list[Any]) -> list[torch.Tensor]:
        meeting.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [PackedWeight(form, *bits, shape, dtype).expanded() for form, bits, dtype in ordered]
            torch.cuda.current_stream().synchronize()
        return found

    # when
    with ThreadPoolExecutor(2) as threads:
        forward, backward = threads.map(expand_all, (todo, todo[::-1]))
    # then
    assert not launching._refused
    for one, other, (form, bits, dtype) in zip(forward, reversed(backward), todo, strict=True):
        wanted = expanded_by_torch(form, *bits, shape, dtype)
        assert_same_bits(one, wanted)
        assert_same_bits(other, wanted)


@pytest.mark.cuda
def test_on_a_gpu_it_runs_on_the_current_stream_without_waiting_or_temporaries() -> None:
    form, shape = format_of("nf4"), (4096, 4096)
    codes, scales = random_bits(form, shape, 2, device="cuda")
    weight = PackedWeight(form, codes, scales, shape, torch.bfloat16)
    wanted = weight.expanded()
    torch.cuda.synchronize()
    side, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(side):
        # Some hundred milliseconds, in which the codes are other ones.
        codes.bitwise_not_()
        torch.cuda._sleep(500_000_000)
        codes.bitwise_not_()
        found = weight.expanded()
        after = side.record_event()
    assert not after.query()
    assert torch.cuda.max_memory_allocated() - before == found.nbytes
    after.synchronize()
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_a_mode_sees_the_operations_of_torch() -> None:
    codes, scales = random_bits(format_of("nf4"), (64, 64), 4, device="cuda")
    weight = PackedWeight(format_of("nf4"), codes, scales, (64, 64), torch.bfloat16)
    with FlopCounterMode(display=False):
        assert_same_bits(weight.expanded(), expected(weight))
    assert not launching._launched
    assert not launching._refused
    weight.expanded()
    assert launching._launched


@pytest.mark.cuda
def test_on_a_gpu_weights_may_have_more_elements_than_32_bits_count() -> None:
    rows, columns = (1 << 31) // 4096 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 3.5 * rows * columns:
        pytest.skip("needs 7.5 GB of device memory")
    for form in FORMS:
        if form == format_of("mxfp4", transposed=True):
            continue
        codes_shape, scales_shape, dtype = form.specs((rows, columns))
        codes = torch.zeros(codes_shape, dtype=torch.uint8, device="cuda")
        scales = torch.ones(scales_shape, device="cuda").to(dtype)
        # The last three rows begin where 31 bits end, at the start of a block.
        last_codes, last_scales = random_bits(form, (3, columns), 3, device="cuda")
        codes.view(-1)[-last_codes.numel() :] = last_codes.view(-1)
        scales.view(-1)[-last_scales.numel() :] = last_scales.view(-1)
        found = PackedWeight(form, codes, scales, (rows, columns), torch.float16).expanded()[-3:]
        assert_same_bits(found, expanded_by_torch(form, last_codes, last_scales, (3, columns), torch.float16))
        del codes, scales, found
