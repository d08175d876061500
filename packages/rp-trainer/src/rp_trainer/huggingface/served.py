"""Let a server generate for TRL's trainers, with the weights that the policy has now."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rp_serving import Sampling, ServedPolicy, VllmServer
from transformers import Trainer

from rp_trainer.huggingface.phases import Phases
from rp_trainer.on_devices import OnDevices

_Base = Trainer if TYPE_CHECKING else object


class ServedText(_Base):
    """Has completions from a server, where there is one, by the method that TRL's trainers have for one turn."""

    _phases: Phases
    _served: ServedPolicy | None = None

    def _serve(self, server: VllmServer, policy: OnDevices) -> None:
        """Generate with a server from now on. Raises `ValueError` for a trainer that generates in another way."""
        if not hasattr(super(), "_generate_single_turn") or getattr(self, "rollout_func", None) is not None:
            raise ValueError(
                f"{type(self).__name__} does not ask for text as RoundPipeOptions(server=...) answers: TRL's "
                " GRPOTrainer and RLOOTrainer do, without a rollout_func"
            )
        engine, sending = policy.engine, partial(self._phases, "send")
        device = engine.runtime.lanes[0].device.torch_device
        self._served = ServedPolicy.of(server, engine.named_model, device, engine.runtime.release_memory, sending)
        # So TRL compares the server's log-probabilities with the policy's, and corrects by their ratio.
        self.use_vllm, self.vllm_mode = True, "server"

    def _generate_single_turn(self, prompt_ids: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        if self._served is None:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)  # type: ignore[misc]
        if images is not None:
            raise ValueError("prompts have images, but RoundPipeOptions(server=...) generates from text alone")
        # Outside of training anything may have changed the weights.
        version = self.state.global_step if self.is_in_train else None
        found = self._served.generate(prompt_ids, self._sampling(self._served.is_seeded), version)
        ids = [one.token_ids for one in found]
        # RLOO asks for no log-probabilities.
        corrects = hasattr(self, "vllm_importance_sampling_correction")
        return (ids, [one.log_probs for one in found]) if corrects else ids

    def _sampling(self, is_seeded: bool) -> Sampling:
        own: Any = self
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        given: dict[str, Any] = {name: getattr(own, name) for name in names}
        seed = (own.args.seed + self.state.global_step) * 1009 if is_seeded else None
        more: dict[str, Any] = own.args.generation_kwargs or {}
        return Sampling(own.max_completion_length, min_p=own.min_p or 0.0, seed=seed, more=more, **given)
