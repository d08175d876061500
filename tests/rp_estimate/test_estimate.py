"""What `roundpipe plan` counts, against arithmetic, the engine's own forecast, and measured runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roundpipe import RoundPipe, Runtime
from roundpipe.optim import muon_groups
from rp_adapters.choice import Adapters
from rp_adapters.making import adapt
from rp_estimate.cases import _switches
from rp_estimate.foretold import Case, Foretold, foretell
from rp_estimate.machine.cards import CARDS, card_named
from rp_estimate.machine.hardware import Machine, measured
from rp_estimate.machine.network import Network
from rp_estimate.meta.meter import FusedAttention, Meter
from rp_estimate.meta.observe import observe
from rp_estimate.workload import TrainingSetup, Workload
from rp_optim import OPTIMIZERS
from rp_presets import to_sequential
from rp_sched import Task
from rp_transfer import HostLimit
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.configuration_utils import PretrainedConfig

GB = 10**9
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
MODELS: Mapping[str, PretrainedConfig] = {
    "Qwen3-1.7B": Qwen3Config(
        **QWEN, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "Qwen3-4B": Qwen3Config(
        **QWEN, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    ),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}


def on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def ram(nbytes: int) -> HostLimit:
    return HostLimit("the given RAM", nbytes, nbytes)


# Operations and bytes


def test_a_causal_attention_is_half_a_whole_one() -> None:
    query = torch.empty(1, 4, 32, 16, device="meta", requires_grad=True)
    flops: list[tuple[int, int]] = []
    for is_causal in (False, True):
        with FusedAttention(), Meter() as meter:
            out = functional.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
            forward = meter.flops
            out.sum().backward()
        flops.append((forward, meter.flops - forward))
    assert flops == [
        (2 * 2 * 4 * 32 * 32 * 16, 5 * 2 * 4 * 32 * 32 * 16),
        (2 * 4 * 32 * 32 * 16, 5 * 4 * 32 * 32 * 16),
    ]


def test_grouped_heads_keep_no_copies() -> None:
    query, key = (torch.empty(1, heads, 32, 16, device="meta") for heads in (8, 2))
    with FusedAttention(), Meter() as meter:
        functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    assert meter.flops == 2 * 8 * 32 * 32 * 16


def test_the_peak_falls_when_tensors_are_freed() -> None:
    with Meter() as meter:
        for _ in range(3):
            torch.empty(1000, device="meta").add(1)
    assert meter.peak_bytes == 8000


def test_operations_are_those_of_weights_and_attention() -> None:
    tokens, shape = 32, SHAPE
    found = observe(on_meta(Qwen3Config(**shape)), tokens)
    layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 80
    attention = 2 * 4 * 16 * tokens * tokens
    first, *rest = [facts.forward_flops.of(1) for facts in found.facts]
    assert rest == [*[2 * tokens * layer + attention] * 3, 2 * tokens * 64 * 96]
    # Rotary positions are a product in some versions of transformers.
    assert first <= 2 * tokens * 16
    assert found.facts[1].backward_flops.of(1) == 2 * 2 * tokens * layer + attention * 5 // 2
    assert found.facts[1].boundary_bytes == tokens * 64 * 2
    assert (found.hidden, found.vocabulary, found.is_counted) == (64, 96, True)


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    whole, adapted = on_meta(Qwen3Config(**SHAPE)), on_meta(Qwen3Config(**SHAPE))
    adapt(adapted, Adapters(rank=2))
    full, thin = (observe(model, 32).facts[1] for model in (whole, adapted))
    # Input gradients only, and two thin products for each.
    assert full.forward_flops.of(1) < thin.forward_flops.of(1) < 1.2 * full.forward_flops.of(1)
    assert thin.backward_flops.of(1) < 0.75 * full.backward_flops.of(1)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 21
    assert all(name.endswith((".lora_A.default.weight", ".lora_B.default.weight")) for name in trained)


@pytest.mark.parametrize(
    "config", [Qwen3Config(**SHAPE), Qwen3MoeConfig(**SHAPE, num_experts=4), GptOssConfig(**SHAPE)]
)
def test_what_a_model_uses_is_all_that_it_has(config: PretrainedConfig) -> None:
    model = on_meta(config)
    found = observe(model, 16)
    used = {id(tensor) for module in found.modules for tensor in module.parameters()}
    assert used == {id(tensor) for tensor in model.parameters()}
    assert len(found.modules) == len(found.facts)


def test_tied_weights_are_in_both_ends() -> None:
    model = on_meta(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    first, *_, last = observe(model, 16).modules
    tied = model.get_input_embeddings().weight
    assert any(tensor is tied for tensor in first.parameters())
    assert any(tensor is tied for tensor in last.parameters())


def test_a_model_stays_as_it_was() -> None:
    model = on_meta(Qwen3Config(**SHAPE))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    observe(model, 16)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_layers_of_two_kinds_are_both_measured() -> None:
    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    facts = observe(on_meta(config), 64).facts
    # A window is a mask: the arithmetic is not halved.
    assert facts[1].forward_flops.of(1) < facts[2].forward_flops.of(1) == facts[3].forward_flops.of(1)


def test_a_model_that_reads_values_is_guessed_by_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1))
    counted = observe(model, 32)

    def reads(*_: object, **__: object) -> None:
        torch.empty(1, device="meta").item()

    monkeypatch.setattr(model, "forward", reads)
    guessed = observe(model, 32)
    assert not guessed.is_counted
    assert len(guessed.facts) == len(counted.facts)
    assert guessed.facts[-1].forward_flops.of(1) == counted.facts[-1].forward_flops.of(1)
    # Attention between tokens is not guessed, and one expert of four is.
    assert guessed.facts[1].forward_flops.of(1) == pytest.approx(counted.facts[1].forward_flops.of(1), rel=0.5)


def test_counts_are_those_of_torchs_counter_on_a_real_model() -> None:
    config = LlamaConfig(**SHAPE, attn_implementation="eager")
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        real(input_ids=torch.zeros(1, 32, dtype=torch.long), use_cache=False)
    found = observe(on_meta(config), 32)
    assert sum(facts.forward_flops.of(1) for facts in found.facts) == counter.get_total_flops()


# Host memory


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("optimizer", "dtype", "masters", "compute"),
    [
        *((name, torch.bfloat16, torch.float32, "bf16") for name in OPTIMIZERS),
        ("adamw", torch.float32, torch.float32, "bf16"),
        ("adamw", torch.bfloat16, torch.bfloat16, "bf16"),
        ("adamw", torch.bfloat16, torch.float32, "fp8"),
        ("muon", torch.bfloat16, torch.bfloat16, "bf16"),
    ],
)
def test_host_memory_is_the_engines_own_forecast(
    optimizer: str, dtype: torch.dtype, masters: torch.dtype, compute: str
) -> None:
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    row = to_sequential(AutoModelForCausalLM.from_config(config, dtype=dtype))
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(row, optim_dtype=masters, runtime=runtime, double_buffer=False, compute=compute)
        named = list(model.optim_named_parameters())
        is_muon = optimizer == "muon"
        trained = muon_groups(model.named_model, named, lr=0.1) if is_muon else [one for _, one in named]
        engine = model.memory_forecast(OPTIMIZERS[optimizer](trained), additions=2).whole
    how = TrainingSetup(sequence=16, optimizer=optimizer, optim_dtype=masters, compute=compute)
    workload = Workload.of(on_meta(config, dtype), how)
    layers = range(len(workload.observed.facts))
    tasks = [Task("FB", layers, range(0, 2), 0), Task("FB", layers, range(2, 4), 1)]
    ours = workload.forecast(tasks, 4, 1, Machine(CARDS[0], 2, None, 100.0)).whole
    assert replace(ours, activations=0) == replace(engine, activations=0)
    assert (ours.codes > 0) == (compute == "fp8")


def test_weights_that_multiply_in_fp8_travel_in_a_byte() -> None:
    card = card_named("H100")
    assert card is not None
    plain, coded, cast = (
        Workload.of(
            on_meta(Qwen3Config(**SHAPE, tie_word_embeddings=True), torch.bfloat16),
            TrainingSetup(sequence=16, compute=kind),
        )
        for kind in ("bf16", "fp8", "fp8-cast")
    )
    costs = [one.costs(1, card)[1] for one in (plain, coded, cast)]
    linear = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 80
    rows = 16 * (4 + 2 + 2) + 64 + 2 * 80 + 64

    assert costs[0].weight_bytes - costs[1].weight_bytes == linear - 4 * rows
    assert costs[0].trainable_bytes == costs[1].trainable_bytes
    assert costs[2].weight_bytes == costs[0].weight_bytes
    assert costs[2].kept_bytes == costs[1].kept_bytes + linear + 4 * rows
    assert costs[2].forward_ms == costs[1].forward_ms
    # Codes turned, with a scale for each input.
    assert costs[1].kept_bytes - costs[0].kept_bytes == linear + 4 * (6 * 64 + 80)
    more = coded.step_bytes() * coded.trained - plain.step_bytes() * plain.trained
    assert more == pytest.approx(3 * 3 * linear)


def test_activations_between_stages_are_counted_on_the_host() -> None:
    workload = Workload.of(on_meta(MODELS["Qwen3-1.7B"]), TrainingSetup(sequence=2048))
    card = card_named("RTX 4090")
    assert card is not None
    large, small = (
        foretell(Case(workload, Machine(replace(card, memory_bytes=memory), 1, None, 165.0), 32))
        for memory in (140 * GB, 12 * GB)
    )
    assert large.forecast.whole.activations == 0
    assert small.forecast.whole.activations >= 32 * 2048 * 2048 * 2


def test_weights_get_second_blocks_where_they_take_little() -> None:
    workload = Workload.of(on_meta(Qwen3Config(**SHAPE)), TrainingSetup(sequence=16))
    weights = 2 * workload.trained
    assert workload.is_double(ram(17 * weights))
    assert not workload.is_double(ram(15 * weights))


def test_fp32_gradients_cost_the_network_half_as_much_again() -> None:
    workload = Workload.of(on_meta(Qwen3Config(**SHAPE)), TrainingSetup(sequence=16))
    layers = range(len(workload.observed.facts))
    once = [Task("FB", layers, range(4), 0)]
    twice = [Task("FB", layers, range(2), 0), Task("FB", layers, range(2, 4), 1)]
    # All tensors, in pairs of a size where there are several, go to the one with least.
    for machines in (2, 4):
        shards = workload.shards(machines)
        most, others = shards.numel, machines - 1
        sent = 2 * (workload.trained - most) + 2 * others * most
        assert workload.traffic_bytes(machines, once) == sent
        assert workload.traffic_bytes(machines, twice) == max(
            sent + 2 * (workload.trained - most), 4 * others * most + 2 * (workload.trained - most)
        )
    assert workload.traffic_bytes(1, once) == 0


def test_adapters_send_what_they_train() -> None:
    model = on_meta(Qwen3Config(**SHAPE))
    adapt(model, Adapters(rank=4))
    workload = Workload.of(model, TrainingSetup(sequence=16, is_adapted=True))
    layers = range(len(workload.observed.facts))
    # In fp32, as PEFT makes them: 4 bytes of gradients and of weights, half of them of others.
    sent = workload.traffic_bytes(2, [Task("FB", layers, range(4), 0)])
    assert sent == pytest.approx(2 * 4 * workload.trained / 2, rel=0.05)


def test_the_documented_networks_are_those_that_hold_up_no_step() -> None:
    lines = MACHINES.read_text(encoding="utf-8").splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("| tokens a step and machine | at "))
    rates = [float(cell.split()[1].replace(",", "")) * 1e12 for cell in lines[head].split("|")[2:-1]]
    rows = [line.split("|")[1:-1] for line in lines[head + 2 : head + 6]]
    for tokens, *cells in rows:
        for rate, cell in zip(rates, cells, strict=True):
            # Eight operations a parameter and token, and 4 * (n - 1) / n bytes a parameter, for n = 8.
            needed = 7 / 8 * 4 / (8 * float(tokens.replace(",", "")) / rate) / 1e9
            assert Network.named(8, cell.strip()).gb_s == pytest.approx(needed, rel=0.05)


# Machines


def test_cards_are_found_under_the_names_that_drivers_have() -> None:
    assert card_named("NVIDIA GeForce RTX 4090") is card_named("rtx4090") is card_named("4090")
    assert len({card_named(card.name) for card in CARDS}) == len(CARDS)
    reported = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "A100 80GB",
        "NVIDIA A100-PCIE-40GB": "A100 40GB",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "RTX 4090 24GB": "RTX 4090",
    }
    for name, own in reported.items():
        found = card_named(name)
        assert found is not None, name
        assert found.name == own
    # Others, of which little is known.
    for name in ("RTX 4090 48GB", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "A100", "GB"):
        assert card_named(name) is None, name


@pytest.mark.later
def test_this_machine_is_measured() -> None:
    with Runtime("cpu:2", strict=False) as runtime:
        machine = measured(runtime)
    assert machine.is_measured
    assert machine.devices == 2
    assert machine.ram is not None
    assert min(machine.card.link_gb_s, machine.card.tflops, machine.ram_gb_s) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_devices_are_measured_as_they_train(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.dtype, int]] = []
    ones = torch.ones

    def noted(*sizes: int, **given: Any) -> torch.Tensor:
        if len(sizes) == 2:
            made.append((given["dtype"], torch.get_num_threads()))
        return ones(*sizes, **given)

    threads = torch.get_num_threads()
    with Runtime("cpu:2", strict=False) as runtime:
        monkeypatch.setattr(torch, "ones", noted)
        measured(runtime, dtype)

    assert made == [(dtype, 1), (dtype, 1)]
    assert torch.get_num_threads() == threads


def test_more_devices_are_behind_more_switches() -> None:
    card = card_named("RTX 4090")
    assert card is not None
    machine = Machine(card, 8, None, 165.0, _switches((4, 4), 25.0))
    assert [len(switch.devices) for switch in machine.with_devices(16).switches] == [4] * 4


# Against measured steps: docs/planning.md


MEASURED = {
    # name: model, GPUs, batch, microbatches, rank of adapters, memory in GB; seconds a step
    "one GPU": ("Qwen3-1.7B", 1, 64, 8, None, None, 2.75),
    "two GPUs": ("Qwen3-1.7B", 2, 64, 8, None, None, 1.36),
    "two GPUs, bound by launching": ("Qwen3-1.7B", 2, 64, 16, None, None, 1.56),
    "two H100s": ("Qwen3-1.7B", 2, 64, 8, None, 80, 1.45),
    "two H100s, bound by launching": ("Qwen3-1.7B", 2, 64, 16, None, 80, 1.76),
    "two H100s, as found": ("Qwen3-1.7B", 2, 64, 8, None, 80, 1.60),
    "two H100s, 4B": ("Qwen3-4B", 2, 64, 8, None, 80, 3.70),
    "two H100s, 1B": ("Llama-3.2-1B", 2, 64, 8, None, 80, 1.09),
    "half the batch": ("Qwen3-1.7B", 1, 32, 8, None, None, 1.5),
    "a small batch": ("Qwen3-1.7B", 1, 8, 4, None, None, 0.438),
    "in 24 GB": ("Qwen3-1.7B", 1, 64, 32, None, 24, 3.50),
    "adapters": ("Qwen3-1.7B", 1, 32, 8, 16, None, 1.385),
    "4B": ("Qwen3-4B", 1, 32, 8, None, None, 3.52),
    "1B": ("Llama-3.2-1B", 1, 32, 8, None, None, 1.168),
}
MACHINES = Path(__file__).parents[2] / "docs" / "machines.md"
DOCUMENT = Path(__file__).parents[2] / "docs" / "planning.md"


def h200s(count: int, memory_gb: int | None = None) -> Machine:
    card = card_named("H200")
    assert card is not None
    if memory_gb is not None:
        card = replace(card, memory_bytes=memory_gb * GB)
    return Machine(card, count, ram(128 * GB * count), 165.0)


def foretold(name: str) -> Foretold:
    model, gpus, batch, microbatches, rank, memory_gb, _ = MEASURED[name]
    made = on_meta(MODELS[model])
    if rank is not None:
        adapt(made, Adapters(rank=rank))
    workload = Workload.of(made, TrainingSetup(sequence=2048, is_adapted=rank is not None))
    return foretell(Case(workload, h200s(gpus, memory_gb), batch, microbatches))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MEASURED)
def test_a_step_is_foretold_within_15_percent_of_the_measured_one(name: str) -> None:
    found = foretold(name)
    *_, seconds = MEASURED[name]
    assert found.planned is not None
    assert found.fits
    assert found.planned.ms / 1e3 == pytest.approx(seconds, rel=0.15)
    row = f"| {seconds:.3g} s | {found.planned.ms / 1e3:.3g} s | {found.planned.ms / 1e3 / seconds - 1:+.0%} |"
    assert any(name in line and row in line for line in DOCUMENT.read_text(encoding="utf-8").splitlines()), row


@functools.cache
def _observed_once() -> Workload:
    return Workload.of(on_meta(MODELS["Qwen3-1.7B"]), TrainingSetup(sequence=2048))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "memory_gb",
    [pytest.param(None, id="they fit"), pytest.param(24, id="stages stream"), pytest.param(5, id="no memory")],
)
def test_graphs_are_foretold_where_they_are_asked_for_and_fit(memory_gb: int | None) -> None:
    def answer(launch: str, *, chooses: bool = False) -> Foretold:
        how = TrainingSetup(sequence=2048, launch=launch, chooses_launch=chooses)
        # Two threads share the GIL, so launching bounds.
        return foretell(Case(replace(_observed_once(), how=how), h200s(2, memory_gb), 64, 32), settles=False)

    eager, auto, asked = answer("eager"), answer("eager", chooses=True), answer("graphs")

    assert eager.planned is not None
    assert auto.planned is not None
    assert asked.planned is not None
    assert (auto.planned, auto.case.workload.how.launch) == (asked.planned, asked.case.workload.how.launch)
    if memory_gb == 5:
        # Where they do not fit, layers run without.
        assert asked.case.workload.how.launch == "eager"
        return
    assert asked.planned.ms < (0.6 if memory_gb else 0.95) * eager.planned.ms
    # Sums of gradients in fp32 while copies leave, and what a microbatch of two sequences takes; of stages that
    # stream the largest one's.
    parameters = asked.case.workload.parameters
    assert (2 if memory_gb else 4) * parameters < asked.planned.graph_bytes < (6 if memory_gb else 14) * parameters
    assert asked.planned.device_bytes < asked.case.machine.card.memory_bytes


@pytest.mark.parametrize("launch", ["eager", "graphs"])
def test_no_graphs_are_foretold_for_devices_that_have_none(launch: str) -> None:
    how = TrainingSetup(sequence=2048, launch=launch, chooses_launch=launch == "eager")
    case = Case(replace(_observed_once(), how=how), replace(h200s(2), has_graphs=False), 64, 32)

    found = foretell(case, settles=False)

    assert found.planned is not None
    assert (found.planned.graph_bytes, found.case.workload.how.launch) == (0, "eager")


@pytest.mark.slow
def test_device_memory_is_foretold_near_the_measured_peaks() -> None:
    whole, capped = (foretold(name).planned for name in ("one GPU", "in 24 GB"))
    assert whole is not None
    assert capped is not None
    # Measured with all logits of a microbatch in memory: 63.8 GB, and 22.4 of 24.
    assert whole.device_bytes == pytest.approx(63.8 * GB, rel=0.1)
    assert capped.device_bytes == pytest.approx(22.4 * GB, rel=0.1)


def test_the_largest_peak_is_what_the_card_has() -> None:
    found = foretold("in 24 GB")
    assert found.planned is not None
    assert found.planned.device_bytes < found.case.machine.card.memory_bytes
