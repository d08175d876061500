"""Compares a row with the model that it was made from: outputs, loss and the gradient of every parameter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import torch
from rp_presets import NotARow, to_sequential
from torch import Tensor, nn
from torch.utils import _pytree as pytree

BATCH, TOKENS = 2, 8
TOLERANCE = 1e-5
Inputs = dict[str, Any]
Outcome = dict[str, Tensor]


# Inputs


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward names this argument."""
    return name in inspect.signature(type(model).forward).parameters


def tokens(vocabulary: int = 70) -> Tensor:
    return torch.randint(4, vocabulary, (BATCH, TOKENS), generator=torch.Generator().manual_seed(7))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, slice(0, 3) if side == "left" else slice(TOKENS - 3, None)] = 0
    return mask


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, :2] = labels[1, 4] = -100
    return labels


def causal_cases(model: nn.Module) -> Iterator[tuple[str, Inputs]]:
    """The calls of a causal language model, by name: only with arguments that it takes."""
    ids = tokens()
    labels = {"labels": labels_of(ids)} if takes(model, "labels") else {}
    yield "tokens", {"input_ids": ids}
    yield "labels", {"input_ids": ids, **labels}
    if takes(model, "attention_mask"):
        for side in ("left", "right"):
            yield f"padded {side}", {"input_ids": ids, "attention_mask": padding(side), **labels}
    if takes(model, "position_ids"):
        places = (padding("left").cumsum(-1) - 1).clamp(min=0)
        yield "positions", {"input_ids": ids, "attention_mask": padding("left"), "position_ids": places}
    yield "hidden states", {"input_ids": ids, **labels, "output_hidden_states": True}
    if takes(model, "output_router_logits"):
        yield "router logits", {"input_ids": ids, **labels, "output_router_logits": True}


# Outcomes


def without_cache(model: nn.Module, inputs: Inputs) -> Inputs:
    return inputs | ({"use_cache": False} if takes(model, "use_cache") else {})


def outputs_of(output: Any) -> Outcome:
    """The tensors of a model's output, by name."""
    fields = output.items() if isinstance(output, Mapping) else enumerate(pytree.tree_leaves(output))
    return {
        f"{name}.{number}": leaf
        for name, field in fields
        for number, leaf in enumerate(pytree.tree_leaves(field))
        if isinstance(leaf, Tensor)
    }


def objective(output: Any) -> Tensor:
    """A number that depends on every part of the output."""
    generator = torch.Generator().manual_seed(3)
    found = torch.zeros(())
    for value in outputs_of(output).values():
        if value.requires_grad:
            found = found + (value * torch.randn(value.shape, generator=generator)).sum() / value.numel() ** 0.5
    return found


def outcome(model: nn.Module, run: Callable[[], tuple[Any, Callable[[Tensor], None]]]) -> Outcome:
    """Outputs and gradients of a run. A parameter without gradient has zeros."""
    model.zero_grad()
    torch.manual_seed(11)
    output, backward = run()
    backward(objective(output))
    forget(model)
    gradients = {
        f"gradient of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return {name: value.detach() for name, value in outputs_of(output).items()} | gradients


def forget(model: nn.Module) -> None:
    """Detach what layers have left in their attributes: such tensors cannot be copied."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                vars(module)[name] = value.detach()


def plainly(network: nn.Module, inputs: Inputs) -> Callable[[], tuple[Any, Callable[[Tensor], None]]]:
    """Call it."""
    return lambda: (network(**inputs), lambda loss: loss.backward())


def as_layers(row: nn.Sequential, inputs: Inputs) -> Callable[[], tuple[Any, Callable[[Tensor], None]]]:
    """Run a row as an engine does: the first layer takes the arguments, each next one the result before."""

    def run() -> tuple[Any, Callable[[Tensor], None]]:
        handed = row[0](**inputs)
        for layer in list(row)[1:]:
            handed = layer(handed)
        return handed, lambda loss: loss.backward()

    return run


def apart(row: nn.Sequential, inputs: Inputs) -> Callable[[], tuple[Any, Callable[[Tensor], None]]]:
    """Run a row with nothing but the carry between its layers: each is a copy, in a thread of its own, and its
    backward is run by itself with the gradients of what it handed on."""

    def run() -> tuple[Any, Callable[[Tensor], None]]:
        boundaries: list[tuple[list[Tensor], list[Tensor]]] = []
        twins: list[tuple[nn.Module, nn.Module]] = []
        handed: Any = None
        for number, layer in enumerate(row):
            twins.append((layer, copy.deepcopy(layer)))
            with ThreadPoolExecutor(1) as pool:
                twin = twins[-1][1]
                call = pool.submit(twin, **inputs) if number == 0 else pool.submit(twin, handed)
                result = call.result()
            if number == len(row) - 1:
                break
            leaves, spec = pytree.tree_flatten(result)
            given = [_reattached(leaf) for leaf in leaves]
            handed = pytree.tree_unflatten(given, spec)
            pairs = [(one, two) for one, two in zip(leaves, given, strict=True) if _is_differentiated(one)]
            boundaries.append(([one for one, _ in pairs], [two for _, two in pairs]))

        def backward(loss: Tensor) -> None:
            loss.backward()
            for made, given in reversed(boundaries):
                reached = [(one, two.grad) for one, two in zip(made, given, strict=True) if two.grad is not None]
                torch.autograd.backward([one for one, _ in reached], [grad for _, grad in reached])
            for layer, twin in twins:
                _add_gradients(layer, twin)

        return result, backward

    return run


def _is_differentiated(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _reattached(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # A copy: memory that two layers share would hide a write.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _add_gradients(layer: nn.Module, twin: nn.Module) -> None:
    found = {id(two): (one, two) for one, two in zip(layer.parameters(), twin.parameters(), strict=True)}
    for one, two in found.values():
        if two.grad is not None:
            one.grad = two.grad.clone() if one.grad is None else one.grad + two.grad


# Comparison


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """What is not equal, in words; empty if all is."""
    if found.keys() != expected.keys():
        return [f"only in one: {sorted(found.keys() ^ expected.keys())}"]
    return [text for name in expected if (text := _difference(name, found[name], expected[name]))]


def _difference(name: str, found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{name} is {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    if not found.is_floating_point():
        return "" if torch.equal(found, expected) else f"{name} differs"
    largest = expected.nan_to_num(0).abs().max().item() if expected.numel() else 0.0
    if torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * max(largest, 1e-2), equal_nan=True):
        return ""
    return f"{name} differs by {(found - expected).abs().max().item():.2g} of {largest:.2g}"


def cases_that_run(model: nn.Module, cases: Iterable[tuple[str, Inputs]]) -> dict[str, Inputs]:
    """The calls that the model itself can serve, if need be without labels."""
    found: dict[str, Inputs] = {}
    for name, inputs in cases:
        for some in (inputs, {key: value for key, value in inputs.items() if key != "labels"}):
            with suppress(ValueError, RuntimeError, IndexError), torch.no_grad():
                model(**without_cache(model, some))
                found[name] = some
                break
    return found


def compare(
    model: nn.Module,
    cases: Mapping[str, Inputs],
    modes: Iterable[bool] = (False, True),
    example_inputs: Inputs | None = None,
) -> list[str]:
    """Make a row of the model and compare them in eval and training mode; what differs, in words.

    A call that asks for more than the usual outputs may be refused: the code between some models' layers changes
    what it collects.
    """
    found: list[str] = []
    row = to_sequential(model, example_inputs=example_inputs)
    for training in modes:
        model.train(training)
        row.train(training)
        for name, inputs in cases.items():
            where = f"{name}, {'in training' if training else 'in eval mode'}"
            with suppress(NotARow) if is_optional(name) else nullcontext():
                found += [f"{where}: {text}" for text in compare_case(model, row, inputs)]
    return found


def is_optional(case: str) -> bool:
    """Whether a row may refuse this call."""
    return case in ("hidden states", "router logits")


def compare_case(model: nn.Module, row: nn.Sequential, inputs: Inputs) -> list[str]:
    """What differs in one call, in words: of the row as it is, and of its layers run apart."""
    expected = outcome(model, plainly(model, without_cache(model, inputs)))
    found = differences(outcome(model, as_layers(row, inputs)), expected)
    if found:
        return found
    return [f"layers apart: {text}" for text in differences(outcome(model, apart(row, inputs)), expected)]


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every probability of dropping to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
