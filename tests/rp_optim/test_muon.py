"""Muon: torch's numbers for matrices, stacks as matrices one by one, AdamW's steps for the rest, and groups."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import rp_optim
import torch
from rp_optim import GradientPair, Master, Muon, link, muon_groups, unlink
from rp_optim.optimizers import newton_schulz
from rp_optim.optimizers.newton_schulz import NewtonSchulz
from torch import nn

from .training import combinations

SHAPES = [(16, 16), (33, 17), (8, 64), (64, 8), (1, 5), (130, 70)]
RULES = (None, "original", "match_rms_adamw")
OPTIONS = [
    {"lr": 0.02},
    {"lr": 0.02, "nesterov": False, "weight_decay": 0.0},
    {"lr": 0.02, "momentum": 0.3},
    {"lr": 0.02, "momentum": 0.0, "eps": 1e-3},
    {"lr": torch.tensor(0.02), "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5)},
    *({"lr": 0.01, "adjust_lr_fn": rule} for rule in RULES),
]
ITERATION = NewtonSchulz((3.4445, -4.775, 2.0315), 5, 1e-7)


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def matrices(seed: int = 0, shapes: Any = tuple(SHAPES)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(make: Any, steps: int = 10, shapes: Any = tuple(SHAPES), **options: Any) -> tuple[Any, Any]:
    parameters = [nn.Parameter(value) for value in matrices(0, shapes)]
    optimizer = make(parameters, **options)
    train_on(parameters, optimizer, 0, steps)
    return [parameter.data for parameter in parameters], optimizer


def train_on(parameters: list[nn.Parameter], optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        grads = matrices(step + 1, [parameter.shape for parameter in parameters])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad * 10.0 ** (step % 4 - 2)
        optimizer.step()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


# Torch's numbers


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ten_steps_are_torchs(options: dict[str, Any]) -> None:
    mine, my_optimizer = trained(Muon, ns_dtype=torch.bfloat16, **options)
    theirs, their_optimizer = trained(torch.optim.Muon, **options)
    # A last bit of fp32 may turn the rounding of an update's element to bf16.
    assert max(map(distance, mine, theirs)) < 5e-5
    states = zip(my_optimizer.state.values(), their_optimizer.state.values(), strict=True)
    for my_state, their_state in states:
        assert my_state.keys() == their_state.keys() == {"momentum_buffer"}
        torch.testing.assert_close(
            my_state["momentum_buffer"], their_state["momentum_buffer"], rtol=2e-6, atol=1e-6
        )


def test_the_default_arguments_are_torchs() -> None:
    mine, theirs = Muon([nn.Parameter(torch.ones(2, 2))]), torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    assert mine.defaults == theirs.defaults
    assert isinstance(mine, torch.optim.Muon)


def plain(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration in fp64, as it is written."""
    wide = matrix.double() / matrix.double().norm()
    wide = wide.T if wide.shape[0] > wide.shape[1] else wide
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_updates_are_orthogonal_as_far_as_the_iteration_goes(dtype: torch.dtype, bound: float) -> None:
    for matrix in matrices():
        found = matrix.to(dtype, copy=True)[None]
        ITERATION.orthogonalize_(found)
        assert distance(found[0], plain(matrix)) < bound
        if matrix.shape != (16, 16):  # a square matrix has singular values near 0
            values = torch.linalg.svdvals(found[0].float())
            assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_the_torch_fallback_and_all_kernels_have_the_same_bits() -> None:
    before = rp_optim.kernel_in_use()
    found = []
    for name in rp_optim.available_kernels():
        rp_optim.use_kernel(name)
        found.append(trained(Muon, shapes=[(40, 50), (3, 20, 10)], lr=0.02)[0])
    rp_optim.use_kernel(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stack_is_its_matrices_one_by_one(dtype: torch.dtype) -> None:
    options = {"lr": 0.02, "ns_dtype": dtype, "adjust_lr_fn": "match_rms_adamw"}
    ((stack,), _) = trained(Muon, shapes=[(3, 20, 12)], **options)
    alone = [nn.Parameter(matrix.clone()) for matrix in matrices(0, [(3, 20, 12)])[0]]
    optimizer = Muon(alone, **options)
    for step in range(10):
        grads = matrices(step + 1, [(3, 20, 12)])[0] * 10.0 ** (step % 4 - 2)
        for parameter, grad in zip(alone, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    assert torch.equal(stack, torch.stack([parameter.data for parameter in alone]))


@pytest.mark.parametrize("rule", [*RULES, "spectral_unclamped"])
def test_rates_follow_the_shape_of_a_matrix(rule: str | None) -> None:
    wanted = {
        None: (2.0, 1.0),
        "original": (2.0, 1.0),
        "match_rms_adamw": (0.2 * 8, 0.2 * 8),
        "spectral_unclamped": (2.0, 0.5),
    }[rule]
    for shape, ratio in zip(((64, 16), (16, 64)), wanted, strict=True):
        values = matrices(0, [shape])
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = values[0]
        Muon([parameter], lr=0.5, adjust_lr_fn=rule, ns_dtype=torch.float32).step()
        assert distance(parameter.data, -0.5 * ratio * plain(values[0])) < 1e-4


def test_zero_gradients_and_empty_matrices_change_only_what_decays() -> None:
    one, empty, stack = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(0, 3)), torch.ones(0, 2, 3)
    empty_stack = nn.Parameter(stack)
    optimizer = Muon([one, empty, empty_stack], lr=0.5, weight_decay=0.5)
    for parameter in (one, empty, empty_stack):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(one.data, torch.full((4, 3), 0.75))


def test_the_arithmetic_goes_by_the_processor_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    newton_schulz.dtype_here.cache_clear()
    for has_tiles, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda found=has_tiles: found)
        assert newton_schulz.dtype_here() == dtype
        newton_schulz.dtype_here.cache_clear()


# Linked masters


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_linked_masters_step_as_plain_parameters(kind: Any, is_pair: bool) -> None:
    values = matrices()
    masters, plains = [Master(value.clone()) for value in values], [nn.Parameter(value) for value in values]
    weights = [torch.empty(value.shape, dtype=torch.bfloat16) for value in values]
    ours, other = Muon(masters, lr=0.02, state=kind), Muon(plains, lr=0.02, state=kind)
    written: list[int] = []
    for step in range(3):
        grads, more = [[each.bfloat16() for each in matrices(10 * step + 1 + i)] for i in (0, 1)]
        for number, master in enumerate(masters):
            first, second = grads[number], more[number]
            source = GradientPair(first, second) if is_pair else first
            link(
                master,
                lambda source=source: source,
                lambda number=number: weights[number],
                written=lambda number=number: written.append(number),
            )
            plains[number].grad = first.float() + second.float() if is_pair else first.float()
        rp_optim.clip_grad_norm_(masters, 1.0)
        rp_optim.clip_grad_norm_(plains, 1.0)
        ours.step()
        other.step()
        for master in masters:
            master.grad = None
            unlink(master)
    assert written == list(range(len(SHAPES))) * 3
    for master, one, weight in zip(masters, plains, weights, strict=True):
        # The factor of clipping is multiplied once, not rounded in between.
        assert distance(master, one) < 5e-5
        assert torch.equal(weight, master.data.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_are_stepped(dtype: torch.dtype) -> None:
    value, grad = matrices(0, [(9, 13)])[0].to(dtype), matrices(1, [(9, 13)])[0].to(dtype)
    mine, wide = nn.Parameter(value.clone()), nn.Parameter(value.float())
    mine.grad, wide.grad = grad, grad.float()
    Muon([mine], lr=0.1, ns_dtype=torch.bfloat16).step()
    torch.optim.Muon([wide], lr=0.1).step()
    torch.testing.assert_close(mine.data.float(), wide.data, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)


# AdamW's part


def test_groups_without_muon_take_adamws_steps() -> None:
    values = matrices(0, [(7,), (5, 3), (2, 3, 4, 5)])
    mine, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    settings = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "amsgrad": True}
    muon = Muon([{"params": mine, "use_muon": False, **settings}], lr=0.02)
    adamw = rp_optim.AdamW(theirs, **settings)
    train_on(mine, muon, 0, 4)
    train_on(theirs, adamw, 0, 4)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
        assert muon.state[one].keys() == adamw.state[other].keys()
        assert all(torch.equal(muon.state[one][key], adamw.state[other][key]) for key in muon.state[one])


def test_one_rate_and_decay_fit_both_with_adamws_rule() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))]}, {"params": [nn.Parameter(torch.ones(2))]}]
    groups[1]["use_muon"] = False  # type: ignore[assignment]
    hidden, others = Muon(groups, lr=2e-4, adjust_lr_fn="match_rms_adamw").param_groups
    assert (hidden["lr"], hidden["eps"]) == (2e-4, 1e-7)
    assert (others["lr"], others["betas"], others["eps"]) == (2e-4, (0.9, 0.999), 1e-8)
    assert hidden["weight_decay"] == others["weight_decay"] == 0.1


# State


def test_state_and_torchs_load_each_other() -> None:
    mine, my_optimizer = trained(Muon, 5, lr=0.02, ns_dtype=torch.bfloat16)
    _, their_optimizer = trained(torch.optim.Muon, 5, lr=0.03, momentum=0.9)
    parameters = [nn.Parameter(value.clone()) for value in mine]
    loaded = Muon(parameters, lr=1.0)
    loaded.load_state_dict(their_optimizer.state_dict())
    assert (loaded.param_groups[0]["lr"], loaded.param_groups[0]["momentum"]) == (0.03, 0.9)
    train_on(parameters, loaded, 5, 6)
    torchs = torch.optim.Muon(parameters)
    torchs.load_state_dict(my_optimizer.state_dict())
    assert torchs.param_groups[0]["lr"] == 0.02
    train_on(parameters, torchs, 5, 6)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_small_state_trains_as_whole_state_does(kind: Any) -> None:
    def last_loss(state: Any) -> float:
        target, weight = matrices(3, [(48, 32)])[0], nn.Parameter(torch.zeros(48, 32))
        optimizer = Muon([weight], lr=0.05, weight_decay=0.0, state=state)
        generator = torch.Generator().manual_seed(4)
        for _ in range(200):
            noise = torch.randn(48, 32, generator=generator)
            weight.grad = weight.data - target + 0.1 * noise
            optimizer.step()
        return float((weight.data - target).square().mean())

    assert last_loss(kind) == pytest.approx(last_loss("fp32"), rel=0.05)


def test_copies_go_on_alike() -> None:
    parameters = [nn.Parameter(value) for value in matrices()]
    optimizer = Muon(parameters, lr=0.02, state="8bit", ns_dtype=torch.float32)
    train_on(parameters, optimizer, 0, 2)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copies = twin.param_groups[0]["params"]
        again = [nn.Parameter(parameter.data.clone()) for parameter in parameters]
        other = Muon(again, lr=0.02, state="8bit", ns_dtype=torch.float32)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_on(copies, twin, 2, 3)
        train_on(again, other, 2, 3)
        assert all(map(torch.equal, copies, again))


# Groups of a model


class Experts(nn.Module):
    """Stacks of matrices and of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(1, 6, 8))
        self.up, self.up_bias = nn.Parameter(torch.ones(3, 4, 8)), nn.Parameter(torch.ones(3, 4))
        self.gate = nn.Linear(8, 1)


class Language(nn.Module):
    """Embeddings of two kinds, hidden layers, and an output that is not a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.mixer = nn.Conv1d(8, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts, self.norm = Experts(), nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.logits, self.classifier, self.score = nn.Linear(8, 11), nn.Linear(8, 3), nn.Linear(8, 2)
        self.out = nn.Bilinear(8, 8, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def test_hidden_matrices_are_told_from_the_rest() -> None:
    model = Language()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden, others = muon_groups(model, lr=3e-4, betas=(0.9, 0.95))
    assert [names[id(one)] for one in hidden["params"]] == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "experts.up",
    ]
    assert len(hidden["params"]) + len(others["params"]) == len(names) - 1
    assert (others["use_muon"], others["lr"], others["betas"]) == (False, 3e-4, (0.9, 0.95))
    optimizer = Muon([hidden, others], lr=0.02)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_masters_are_divided_by_the_names_of_a_model() -> None:
    model = Language()
    masters = {
        name: Master(value.detach().clone()) for name, value in model.named_parameters() if value.requires_grad
    }
    hidden, _ = muon_groups(model, masters.items(), lr=3e-4)
    wanted, _ = muon_groups(model, lr=3e-4)
    assert [one.shape for one in hidden["params"]] == [one.shape for one in wanted["params"]]
    assert all(any(one is master for master in masters.values()) for one in hidden["params"])


def test_groups_without_parameters_are_left_out() -> None:
    (only,) = muon_groups(nn.LayerNorm(4), lr=3e-4)
    assert not only["use_muon"]
    (only,) = muon_groups(nn.Linear(4, 4, bias=False))
    assert only["use_muon"]


# Refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr >= 0"),
    ({"weight_decay": -1.0}, "weight_decay >= 0"),
    ({"momentum": -0.1}, "momentum >= 0"),
    ({"ns_steps": 100}, "0 <= ns_steps < 100, but has 100"),
    ({"ns_coefficients": (1.0, 2.0)}, "three ns_coefficients, but has 2"),
    ({"adjust_lr_fn": "own"}, "None or one of original, match_rms_adamw, spectral_unclamped, but has 'own'"),
    ({"capturable": True}, "runs on the host, so capturable must be False"),
    ({"differentiable": True}, "runs on the host, so differentiable must be False"),
    ({"ns_dtype": torch.float16}, r"ns_dtype to be torch\.bfloat16 or torch\.float32"),
    ({"state": "4bit"}, "state to be one of fp32, bf16, 8bit"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rp_optim.InvalidOption, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_foreach_and_fused_change_nothing() -> None:
    (first, _), (second, _) = trained(Muon, 1), trained(Muon, 1, foreach=True, fused=True)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)])
def test_what_is_no_matrix_is_refused_with_the_way_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(rp_optim.InvalidParameter, match=r"use_muon=False, or let muon_groups\(model\)"):
        Muon([nn.Parameter(torch.ones(shape))])


def test_complex_matrices_are_refused() -> None:
    with pytest.raises(rp_optim.InvalidParameter, match="Muon needs real parameters"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])


def test_adamws_groups_need_a_rate_of_their_own() -> None:
    group = {"params": [nn.Parameter(torch.ones(2))], "use_muon": False}
    with pytest.raises(rp_optim.InvalidOption, match="an lr in each group with use_muon=False"):
        Muon([group], lr=0.02)
    with pytest.raises(rp_optim.InvalidOption, match=r"betas\[0\] < 1"):
        Muon([{**group, "lr": 1e-3, "betas": (1.0, 0.9)}])
    with pytest.raises(TypeError, match="dict"):
        Muon([nn.Parameter(torch.ones(2, 2))]).add_param_group([])  # type: ignore[arg-type]


def test_options_of_stacks_and_matrices_together(kernel: str) -> None:
    # A momentum of a half is the middle of torch's lerp.
    del kernel
    for options in combinations(momentum=(0.5,), nesterov=(False, True)):
        mine, _ = trained(Muon, 3, ns_dtype=torch.bfloat16, **options)
        theirs, _ = trained(torch.optim.Muon, 3, **options)
        assert max(map(distance, mine, theirs)) < 5e-5
