"""`compute="auto"` on several machines: all compute as the first one has measured, or as one of them must."""

from __future__ import annotations

from on_machines import on_machines
from rp_packing import Fp8


def test_all_machines_multiply_alike() -> None:
    first, second = on_machines(2, "machine_auto", "decided", "cpu:1")

    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"]
        assert one["decision"] == other["decision"]
        assert other["asked"] == []
    measured, refused, failed = first
    assert measured["decision"].recipe == Fp8(weights="bf16")
    # The rows of a microbatch, and those of this machine.
    assert measured["asked"] == [(2, 2)]
    assert refused["decision"].recipe is None
    assert refused["decision"].reason == "bf16, since on machine 1 cuda:0 is too old"
    assert measured["losses"] != refused["losses"]
    assert failed["error"].startswith("ValueError: times must be positive")
    assert second[2]["error"].startswith("MachineFailed: in choosing how linear layers of model")
