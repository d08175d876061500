"""Find by experiment how a model's own loss over a batch follows from the losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rp_presets.errors import UnknownLoss
from rp_presets.losses.counts import IGNORED, Rule, candidates, count
from rp_presets.losses.own_loss import TOTAL, OwnLoss, Shifts

# Runs the model, or its end, and returns its output object.
Run = Callable[[Mapping[str, Any]], Any]

# Divisors for the experiments: any numbers that cannot be counts of labels.
_TOTALS = (7.5, 11.25, 3.125)


def observe_loss(run: Run, batch: Mapping[str, Any], *, labels: str = "labels") -> OwnLoss:
    """Find how the loss that a model returns for a batch follows from the losses of its parts.

    Args:
        run: calls the model with keyword arguments and returns its output object, which has a `loss`. The same
            arguments must give the same loss, so use eval mode. In fp64 the experiments are more conclusive.
        batch: arguments for a few short sequences or samples, at least three rows, with labels of the kind in
            question. Tensors whose first dimension is that of the labels are split. More tokens are more
            conclusive.
        labels: the name of the argument for labels.

    >>> from types import SimpleNamespace
    >>> logits = torch.randn(4, 6, 9)
    >>> def run(kwargs):
    ...     rows = logits[kwargs["row"]].flatten(0, 1)
    ...     return SimpleNamespace(loss=functional.cross_entropy(rows, kwargs["labels"].flatten()))
    >>> observe_loss(run, {"row": torch.arange(4), "labels": torch.randint(9, (4, 6))}).rule
    'tokens'

    The labels are replaced by ragged ones, with different ignored positions (-100) in each row. Each of these
    batches is split in several ways. The experiments also test whether `num_items_in_batch` divides the loss, and
    what `shift_labels` do. A rule holds if it gives the loss of the whole batch in every experiment, to the
    precision of the dtype.

    Raises:
        UnknownLoss: no rule holds, or several that differ; the message says which and why. It never guesses.
        ValueError: the batch has no labels, or fewer than three rows.
    """
    return _Observer(run, _checked(batch, labels), labels).observe()


class _Seen(NamedTuple):
    """A loss, and the auxiliary loss in the same output."""

    loss: float
    auxiliary: float | None


class _Sample(NamedTuple):
    """Arguments, and the losses that the model computed from them."""

    kwargs: Mapping[str, Any]
    seen: _Seen


class _Experiment(NamedTuple):
    """A batch and its parts."""

    whole: _Sample
    parts: Sequence[_Sample]


@dataclass(slots=True)
class _Observer:
    run: Run
    batch: Mapping[str, Any]
    labels: str
    # The relative error that the dtype of the loss allows.
    tolerance: float = 0.0

    def observe(self) -> OwnLoss:
        """Run all experiments; later ones use the results of earlier ones."""
        first = self._measured(self.batch)
        again = self._measured(self.batch)
        if not math.isfinite(first.loss) or self._differ(first.loss, again.loss):
            raise UnknownLoss(
                f"the loss of the same batch was {first.loss} and then {again.loss}; it must be finite and the "
                "same each time: call eval() first"
            )
        undivided = self._undivided(first.loss)
        takes_total = undivided is not None
        known = None if undivided is None else self._known_coefficient(undivided, first)
        rule, coefficient = self._rule(self._experiments(), known, takes_total=takes_total)
        shifts = self._shifts(first.loss, takes_total=takes_total, coefficient=coefficient)
        return OwnLoss(rule, takes_total, coefficient, shifts, self.labels)

    # Measuring

    def _measured(self, kwargs: Mapping[str, Any]) -> _Seen:
        with torch.no_grad():
            outputs = self.run(kwargs)
        loss, auxiliary = getattr(outputs, "loss", None), getattr(outputs, "aux_loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnknownLoss(f"the model returned a {type(outputs).__name__} whose loss is no scalar tensor")
        self.tolerance = 1e-10 if loss.dtype == torch.float64 else 64 * torch.finfo(loss.dtype).eps
        return _Seen(loss.double().item(), auxiliary.double().item() if isinstance(auxiliary, Tensor) else None)

    def _differ(self, actual: float, wanted: float, scale: float = 0.0) -> bool:
        return not abs(actual - wanted) <= self.tolerance * max(abs(actual), abs(wanted), scale)

    # The divisor that callers may pass

    def _undivided(self, plain: float) -> float | None:
        """Return the part of the loss that `num_items_in_batch` does not divide; None if it divides nothing."""
        try:
            given = [self._measured({**self.batch, TOTAL: total}).loss for total in _TOTALS]
        except TypeError:
            # Its forward has no such argument.
            return None
        if not any(self._differ(loss, plain) for loss in given):
            return None
        (total, rest), third = self._line(given[:2]), given[2]
        if self._differ(total / _TOTALS[2] + rest, third):
            raise UnknownLoss(f"{TOTAL} changes the loss, but does not divide it")
        return rest

    def _known_coefficient(self, undivided: float, first: _Seen) -> float:
        """Return the coefficient of the auxiliary loss, from the undivided part of the loss."""
        if abs(undivided) <= self.tolerance * abs(first.loss):
            return 0.0
        if not first.auxiliary:
            raise UnknownLoss(
                f"{undivided} of the loss is not divided by {TOTAL}, and the output has no aux_loss to explain it"
            )
        return undivided / first.auxiliary

    def _line(self, given: Sequence[float]) -> tuple[float, float]:
        """Return the sum that was divided by the first two of `_TOTALS`, and the part that was not divided."""
        total = (given[0] - given[1]) / (1 / _TOTALS[0] - 1 / _TOTALS[1])
        return total, given[0] - total / _TOTALS[0]

    # The count by which a mean divides

    def _rule(
        self, experiments: Sequence[_Experiment], known: float | None, *, takes_total: bool
    ) -> tuple[Rule, float]:
        """Return the rule that gives the loss of every whole batch, and the coefficient of the auxiliary loss."""
        rules, fitting = candidates(self.batch[self.labels], self.batch), list[tuple[Rule, float]]()
        for rule in rules:
            coefficient = self._coefficient(rule, self.labels, experiments, known)
            if coefficient is not None:
                fitting.append((rule, coefficient))
        if not fitting:
            raise UnknownLoss(
                f"the loss of a batch is not a mean over {' or '.join(rules)}: no such count gives it from the "
                "losses of its parts"
            )
        self._refuse_doubt([rule for rule, _ in fitting], experiments)
        if takes_total:
            self._check_total(fitting[0][0], experiments)
        return fitting[0]

    def _refuse_doubt(self, rules: Sequence[Rule], experiments: Sequence[_Experiment]) -> None:
        """Raise if rules that hold count differently in some experiment."""
        batches = [sample.kwargs for each in experiments for sample in (each.whole, *each.parts)]
        counts = [[count(rule, kwargs[self.labels], kwargs) for kwargs in batches] for rule in rules]
        if any(each != counts[0] for each in counts):
            raise UnknownLoss(
                f"the loss may be a mean over {' or '.join(rules)}: the losses of the rows are too alike to tell; "
                "give a batch whose rows differ, in fp64"
            )

    def _coefficient(
        self, rule: Rule, labels: str, experiments: Sequence[_Experiment], known: float | None
    ) -> float | None:
        """Return the auxiliary loss's coefficient with which the rule holds, 0 without one; None if it fails."""
        attempts = [_errors(rule, labels, each) for each in experiments]
        errors = [each for each in attempts if each is not None]
        if len(errors) < len(attempts):
            return None
        weight = sum(auxiliary**2 for _, auxiliary, _ in errors)
        auxiliary = experiments[0].whole.seen.auxiliary
        if known is None and auxiliary and math.sqrt(weight) <= 100 * self.tolerance * abs(auxiliary):
            # It is the same in the parts and the whole, so its coefficient cannot be determined.
            return None
        if known is None:
            known = sum(main * auxiliary for main, auxiliary, _ in errors) / weight if weight else 0.0
        return (
            known if all(abs(main - known * aux) <= self.tolerance * size for main, aux, size in errors) else None
        )

    def _check_total(self, rule: Rule, experiments: Sequence[_Experiment]) -> None:
        """Raise unless passing the counted total changes nothing, and the parts' losses add up with any total."""
        for each in experiments:
            total = count(rule, each.whole.kwargs[self.labels], each.whole.kwargs)
            loss = self._measured({**each.whole.kwargs, TOTAL: total}).loss if total else each.whole.seen.loss
            if self._differ(loss, each.whole.seen.loss) and total:
                raise UnknownLoss(
                    f"with its number of labels, {total}, passed as {TOTAL}, the loss is {loss} instead of "
                    f"{each.whole.seen.loss}"
                )
        self._check_sums(experiments[-1])

    def _check_sums(self, each: _Experiment) -> None:
        whole, *parts = (self._sum(sample.kwargs) for sample in (each.whole, *each.parts))
        if self._differ(sum(parts), whole, scale=max(map(abs, parts))):
            raise UnknownLoss(
                f"with {TOTAL} passed, the losses of the parts add up to {sum(parts)}, but that of the whole is "
                f"{whole}"
            )

    def _sum(self, kwargs: Mapping[str, Any]) -> float:
        given = [self._measured({**kwargs, TOTAL: total}).loss for total in _TOTALS[:2]]
        return self._line(given)[0]

    # Labels that are shifted already

    def _shifts(self, plain: float, *, takes_total: bool, coefficient: float) -> Shifts:
        """Return how the model treats `shift_labels`, tested with other ignored positions than in its labels."""
        labels = self.batch[self.labels]
        if labels.is_floating_point() or labels.ndim < 2:
            return "ignored"
        shifted = functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        shifted[0, : labels.shape[1] // 2] = IGNORED
        whole = {**self.batch, "shift_labels": shifted}
        try:
            if not self._differ(self._measured(whole).loss, plain):
                return "ignored"
        except TypeError:
            # Its forward has no such argument.
            return "ignored"
        experiments = self._splits(whole)
        if takes_total:
            self._check_sums(experiments[-1])
        holds = self._coefficient("tokens", "shift_labels", experiments, coefficient)
        return "unknown" if holds is None else "counted"

    # Experiments

    def _experiments(self) -> list[_Experiment]:
        """Split ragged batches in two ways each; only the batch itself if the model rejects ignored labels."""
        first, *others = _ragged(self.batch[self.labels])
        experiments = self._splits({**self.batch, self.labels: first})
        try:
            for labels in others:
                experiments += self._splits({**self.batch, **self._padded(labels), self.labels: labels})
        except (IndexError, RuntimeError, ValueError):
            return experiments[:2]
        return experiments

    def _padded(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the attention mask with some padding, to see whether labels there count."""
        mask = self.batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != labels.shape or labels.shape[1] < 3:
            return {}
        mask = mask.clone()
        mask[1, -2:] = 0
        return {"attention_mask": mask}

    def _splits(self, whole: Mapping[str, Any]) -> list[_Experiment]:
        size = len(whole[self.labels])
        rows = [self._sample(_rows(whole, slice(row, row + 1), size)) for row in range(size)]
        rest = self._sample(_rows(whole, slice(1, size), size))
        sample = self._sample(whole)
        return [_Experiment(sample, [rows[0], rest]), _Experiment(sample, rows)]

    def _sample(self, kwargs: Mapping[str, Any]) -> _Sample:
        return _Sample(kwargs, self._measured(kwargs))


def _errors(rule: Rule, labels: str, each: _Experiment) -> tuple[float, float, float] | None:
    """Return the errors of the loss and auxiliary loss that the rule predicts from the parts, and their scale.

    None if the rule counts no labels although the loss is nonzero, or counts some although it is not finite.
    """
    whole = each.whole.seen
    total = count(rule, each.whole.kwargs[labels], each.whole.kwargs)
    if not total:
        return None if math.isfinite(whole.loss) and whole.loss else (0.0, 0.0, 0.0)
    weights = [count(rule, kwargs[labels], kwargs) / total for kwargs, _ in each.parts]
    counted = [(weight, seen) for weight, (_, seen) in zip(weights, each.parts, strict=True) if weight]
    if not math.isfinite(whole.loss + sum(seen.loss for _, seen in counted)):
        return None
    main = sum(weight * seen.loss for weight, seen in counted) - whole.loss
    auxiliary = sum(weight * (seen.auxiliary or 0.0) for weight, seen in counted) - (whole.auxiliary or 0.0)
    return main, auxiliary, max(abs(whole.loss), *(abs(weight * seen.loss) for weight, seen in counted))


def _ragged(labels: Tensor) -> Iterator[Tensor]:
    """Yield the labels, then ragged ones: with the end, the start, a part in between or a whole row ignored."""
    yield labels
    if labels.is_floating_point():
        return
    rows, columns = len(labels), max(1, labels[0].numel())
    row = torch.arange(rows, device=labels.device)[:, None]
    column = torch.arange(columns, device=labels.device)[None]
    first_only = (row == rows - 1) & (column > 0)
    for ignored in (
        column > columns - 1 - (row % columns),
        (column < (row + 1) % columns) | first_only,
        (row == 0) | ((row + column) % 3 == 0),
    ):
        ragged = labels.masked_fill(ignored.reshape(labels.shape), IGNORED)
        if (ragged != IGNORED).any():
            yield ragged


def _rows(whole: Mapping[str, Any], rows: slice, size: int) -> dict[str, Any]:
    return {
        name: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for name, value in whole.items()
    }


def _checked(batch: Mapping[str, Any], labels: str) -> Mapping[str, Any]:
    given = batch.get(labels)
    if not isinstance(given, Tensor) or given.ndim == 0 or len(given) < 3:
        raise ValueError(f"the batch must have {labels!r}, a tensor of at least three rows, to test the loss with")
    return batch
