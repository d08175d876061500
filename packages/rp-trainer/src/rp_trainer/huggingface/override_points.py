"""The methods of trainers that RoundPipe overrides, with their known arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

# Methods of `transformers.Trainer`. If one is missing or has other arguments, a model would train without
# RoundPipe.
TRAINER: Mapping[str, str] = {
    "_clip_grad_norm": "(self, model)",
    "_finalize_training": "(self, trial, num_train_samples, start_time)",
    "_get_grad_norm": "(self, model, grad_norm)",
    "_load_best_model": "(self)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model)",
    "_load_optimizer_and_scheduler": "(self, checkpoint)",
    "_prepare_inputs": "(self, inputs)",
    "_move_model_to_device": "(self, model, device)",
    "_save_optimizer_and_scheduler": "(self, output_dir)",
    "_wrap_model": "(self, model, training, dataloader)",
    "compute_loss": "(self, model, inputs, return_outputs, num_items_in_batch)",
    "create_accelerator_and_postprocess": "(self)",
    "create_optimizer": "(self, model)",
    "evaluation_loop": ("(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)"),
    "prediction_step": "(self, model, inputs, prediction_loss_only, ignore_keys)",
    "log": "(self, logs, start_time)",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device)",
    "get_optimizer_cls_and_kwargs": "(args, model)",
    "save_model": "(self, output_dir, _internal_call)",
    "train": "(self, resume_from_checkpoint, trial, ignore_keys_for_eval)",
    "training_step": "(self, model, inputs, num_items_in_batch)",
}

# Methods of TRL's trainers, which come between RoundPipe's and `Trainer`'s, by class.
_LOSS = {"compute_loss": TRAINER["compute_loss"], "training_step": "(self, *args, **kwargs)"}
_GENERATING = {
    "_generate": "(self, prompts)",
    "_generate_and_score_completions": "(self, inputs)",
    "_prepare_inputs": "(self, generation_batch)",
}
_TURN = "self, prompt_ids, images, multimodal_fields"
TRL: Mapping[str, Mapping[str, str]] = {
    "SFTTrainer": _LOSS,
    "DPOTrainer": _LOSS,
    "KTOTrainer": _LOSS,
    "RewardTrainer": _LOSS,
    "GRPOTrainer": {**_GENERATING, "_generate_single_turn": f"({_TURN}, num_generations, has_tool_images)"},
    "RLOOTrainer": {**_GENERATING, "_generate_single_turn": f"({_TURN})"},
}


def changed(trainer: type[object], known: Mapping[str, str] = TRAINER) -> Iterator[str]:
    """Yield a sentence for each method that a trainer's class lacks or has with other arguments.

    >>> from transformers import Trainer
    >>> list(changed(Trainer))
    []
    """
    for name, wanted in known.items():
        actual = _arguments(getattr(trainer, name)) if callable(getattr(trainer, name, None)) else None
        if actual != wanted:
            yield f"{trainer.__name__}.{name} is known as {wanted}, but is {actual or 'not there'}"


def _arguments(method: object) -> str:
    assert callable(method)
    parameters = inspect.signature(method).parameters.values()
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(marks.get(one.kind, '') + one.name for one in parameters)})"
