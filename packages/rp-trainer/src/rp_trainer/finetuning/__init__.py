"""Fine-tuning in a loop of ours, on which the command `roundpipe train` stands.

Checkpoints from which a run goes on to the last bit, signals that end it in order, held-out losses, metrics, one
process or several:

>>> import torch
>>> from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
>>> from transformers import Qwen3Config, Qwen3ForCausalLM
>>> from rp_trainer.finetuning import Evaluation, InTurn, Settings, fine_tune
>>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
>>> config = Qwen3Config(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, **heads)
>>> rows = torch.arange(64).reshape(8, 8) % 5
>>> batches = [{"input_ids": part, "labels": part} for part in rows.split(4)]
>>> with Runtime("cpu:2") as runtime:
...     settings = RoundPipeRunConfig(num_microbatch=2)
...     model = wrap_model_to_roundpipe(Qwen3ForCausalLM(config), model_run_config=settings, runtime=runtime)
...     how = Settings(steps=20, lr=1e-2)
...     outcome = fine_tune(model, InTurn(batches), how, evaluation=Evaluation(batches))
>>> outcome.steps, outcome.held_out[20] < outcome.held_out[0]
(20, True)

With ``kept=InFolder(folder, model.named_model.save_pretrained)``, where `folder` comes from
``taken(Path("run"), resume=True)``, checkpoints, metrics and the trained model are in that folder, and the same
program goes on where the last one was stopped or killed.

What is told on the way (held-out losses, places, checkpoints that could not be written) is logged.
"""

from rp_trainer.errors import Diverged, Lost, Refused, ToldElsewhere, Unwritable
from rp_trainer.finetuning.batches import Batches, InTurn
from rp_trainer.finetuning.evaluation import Evaluation
from rp_trainer.finetuning.folder import taken
from rp_trainer.finetuning.kept import InFolder
from rp_trainer.finetuning.loop import TrainingOutcome, fine_tune
from rp_trainer.finetuning.reports import Report, StepFigures
from rp_trainer.finetuning.settings import Names, Settings
from rp_trainer.processes import Processes, joined
from rp_trainer.stopping import Interrupted

__all__ = [
    "Batches",
    "Diverged",
    "Evaluation",
    "InFolder",
    "InTurn",
    "Interrupted",
    "Lost",
    "Names",
    "Processes",
    "Refused",
    "Report",
    "Settings",
    "StepFigures",
    "ToldElsewhere",
    "TrainingOutcome",
    "Unwritable",
    "fine_tune",
    "joined",
    "taken",
]
