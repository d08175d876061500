"""A row made from Qwen3 against the model it was made from."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rp_presets import UnsupportedModel, causal_lm_loss, to_sequential
from rp_presets.rows.carry import Carry
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCABULARY, HIDDEN, BATCH, POSITIONS = 256, 32, 3, 12
EXACT = {"rtol": 1e-5, "atol": 1e-6}
ROUGH = {"rtol": 2e-2, "atol": 2e-2}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}


def by_token_attention(_module, query, key, value, mask, scaling, position_ids=None, sliding_window=None, **_):
    """What flash attention makes of its arguments: a mask by token, packed sequences told by their positions."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = torch.arange(query.shape[2])
    allowed = (rows[:, None] >= rows)[None, None]
    if sliding_window is not None:
        allowed = allowed & (rows[:, None] - rows < sliding_window)
    if mask is not None:
        assert mask.ndim == 2
        allowed = allowed & mask.bool()[:, None, None, :]
    elif position_ids is not None and len(query) == 1:
        sequence = (position_ids.diff(prepend=position_ids[:, :1]) < 0).cumsum(-1)
        allowed = allowed & (sequence[:, None, :, None] == sequence[:, None, None, :])
    # A row without a token attends to itself, so that its softmax is a number.
    allowed = allowed | torch.eye(len(rows), dtype=torch.bool)
    weights = (query @ key.mT * scaling).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("by_token", by_token_attention)
AttentionMaskInterface.register("by_token", flash_attention_mask)


def make_model(attention="sdpa", dtype=torch.float32, **changes) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "use_cache": False,  # with a cache, transformers does not look for packed sequences
            "initializer_range": 0.2,  # logits far from zero
            "pad_token_id": 0,
        }
        | changes
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1, std=0.2)  # norms that are not the identity
    return model


def make_tokens(batch=BATCH, positions=POSITIONS) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, positions), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.int64)
    for row, count in enumerate([0, 3, 5]):
        mask[row, slice(0, count) if side == "left" else slice(POSITIONS - count, None)] = 0
    return mask


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


PACKED = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3])
CAUSAL = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
OWN_MASK = (CAUSAL & (CAUSAL.T | (torch.arange(POSITIONS) % 3 == 0)))[None, None].expand(BATCH, 1, -1, -1)

INPUTS = {
    "tokens only": lambda: {"input_ids": make_tokens()},
    "one position": lambda: {"input_ids": make_tokens(positions=1)},
    "mask of ones": lambda: {"input_ids": make_tokens(), "attention_mask": torch.ones(BATCH, POSITIONS)},
    "padded left": lambda: {"input_ids": make_tokens(), "attention_mask": padding("left")},
    "padded right": lambda: {"input_ids": make_tokens(), "attention_mask": padding("right")},
    "padded left, with positions": lambda: {
        "input_ids": make_tokens(),
        "attention_mask": padding("left"),
        "position_ids": positions_of(padding("left")),
    },
    "one row of positions": lambda: {"input_ids": make_tokens(), "position_ids": torch.arange(7, 19)[None]},
    "packed": lambda: {"input_ids": make_tokens(), "position_ids": PACKED.expand(BATCH, -1)},
    "packed in one": lambda: {"input_ids": make_tokens(1), "position_ids": PACKED[None]},
    "use_cache off": lambda: {"input_ids": make_tokens(), "use_cache": False, "labels": None, "logits_to_keep": 0},
}


def run(network, *args, **kwargs) -> CausalLMOutputWithPast:
    """Call a model; or a row, as an engine does: the first layer takes the arguments, the others one object."""
    first, *others = network if isinstance(network, nn.Sequential) else [network]
    handed = first(*args, **kwargs)
    for layer in others:
        handed = layer(handed)
    return handed


def logits_and_gradients(network: nn.Module, model: nn.Module, inputs, labels=None) -> tuple[Tensor, dict]:
    """Run the network; the gradients are those of the model's parameters, by their names in the model."""
    model.zero_grad()
    output = run(network, **inputs)
    some = inputs.get("input_ids")
    labels = make_tokens(*some.shape) if some is not None else make_tokens()
    causal_lm_loss(output, labels, reduction="mean", aligned=True).backward()
    return output.logits.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_row_equals(model: Qwen3ForCausalLM, inputs: dict, **tolerance) -> None:
    expected = logits_and_gradients(model, model, inputs)
    found = logits_and_gradients(to_sequential(model), model, inputs)
    assert found[1]
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.few(2)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "by_token"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_logits_and_gradients_equal_the_models(attention, inputs):
    assert_row_equals(make_model(attention), inputs(), **EXACT)


@pytest.mark.few(2)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "by_token"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_sliding_windows_equal_the_models(attention, inputs):
    assert_row_equals(make_model(attention, **SLIDING), inputs(), **EXACT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["tokens only", "padded left, with positions"])
def test_bfloat16_equals_the_models(attention, name):
    model = make_model(attention, torch.bfloat16, **SLIDING)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert_row_equals(model, INPUTS[name](), **ROUGH)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=str,
)
def test_every_kind_of_dense_qwen3_equals_its_model(changes):
    assert_row_equals(make_model(**changes), INPUTS["padded right"](), **EXACT)


def test_masks_that_are_ready_are_used_as_they_are():
    inputs = {"input_ids": make_tokens(), "attention_mask": OWN_MASK}
    assert_row_equals(make_model(), inputs, **EXACT)
    by_type = {"full_attention": OWN_MASK, "sliding_attention": None}
    assert_row_equals(make_model(**SLIDING), inputs | {"attention_mask": by_type}, **EXACT)


def test_embeddings_may_come_instead_of_tokens_and_get_their_gradient():
    model = make_model()
    gradients = []
    for network in (model, to_sequential(model)):
        embeddings = torch.randn(BATCH, POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(2))
        embeddings.requires_grad_()
        logits_and_gradients(network, model, {"inputs_embeds": embeddings})
        gradients.append(embeddings.grad)
    torch.testing.assert_close(*gradients, **EXACT)


def test_arguments_may_be_given_by_place():
    model = make_model()
    arguments = (make_tokens(), padding("left"), positions_of(padding("left")), None, None, None, False, 0)
    torch.testing.assert_close(run(to_sequential(model), *arguments).logits, model(*arguments).logits, **EXACT)


def test_frozen_parameters_get_no_gradient():
    model = make_model()
    model.model.requires_grad_(False)
    _, gradients = logits_and_gradients(to_sequential(model), model, INPUTS["tokens only"]())
    assert gradients.keys() == {"lm_head.weight"}


def test_the_output_is_of_the_models_type_and_holds_logits_only():
    model = make_model()
    output = to_sequential(model)(make_tokens())
    assert type(output) is type(model(make_tokens())) is CausalLMOutputWithPast
    assert list(output) == ["logits"]


def test_the_row_has_one_layer_a_decoder_block_and_two_more():
    assert len(to_sequential(make_model(num_hidden_layers=3))) == 5


def test_layers_beyond_the_configured_number_are_left_out():
    model = make_model(num_hidden_layers=3)
    model.config.num_hidden_layers = 2
    row = to_sequential(model)
    assert len(row) == 4
    torch.testing.assert_close(row(make_tokens()).logits, model(make_tokens()).logits, **EXACT)


# What is shared, and what is not touched


@pytest.mark.parametrize("tied", [True, False])
def test_the_row_holds_the_models_own_parameters(tied):
    model = make_model(tie_word_embeddings=tied)
    row = to_sequential(model)
    assert {id(parameter) for parameter in row.parameters()} == {id(parameter) for parameter in model.parameters()}
    first, last = ({id(parameter) for parameter in layer.parameters()} for layer in (row[0], row[-1]))
    assert (id(model.lm_head.weight) in first & last) == tied


def test_what_the_row_learned_is_saved_by_the_model(tmp_path):
    model = make_model(tie_word_embeddings=True)
    row = to_sequential(model)
    before = model(make_tokens()).logits
    optimizer = torch.optim.SGD(row.parameters(), lr=0.1)
    causal_lm_loss(row(make_tokens()), make_tokens(), reduction="mean").backward()
    optimizer.step()

    model.save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)

    assert not torch.allclose(row(make_tokens()).logits, before)
    torch.testing.assert_close(loaded(make_tokens()).logits, row(make_tokens()).logits, **EXACT)


@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_every_modules_mode(training):
    model = make_model().train(training)
    model.model.layers[0].train(not training)
    modes = [module.training for module in model.modules()]
    row = to_sequential(model)
    assert [module.training for module in model.modules()] == modes
    assert all(module.training == training for module in (row, *row))


def test_hooks_of_the_models_modules_run():
    model = make_model()
    seen = []
    for module in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    row = to_sequential(model)
    seen.clear()
    row(make_tokens())
    assert seen == ["Embedding", "Qwen3DecoderLayer", "Qwen3DecoderLayer", "Qwen3RMSNorm", "Linear"]


def everything_held(module: nn.Module) -> list[tuple[str, object]]:
    plain = (int, float, str, bool, type(None))
    held = [
        (f"{name}.{key}", value)
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, plain)
    ]
    buffers = [(name, (id(buffer), buffer._version)) for name, buffer in module.named_buffers()]
    return held + buffers


ROPES_WITH_STATE = [
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
]


@pytest.mark.parametrize("rope", [None, *ROPES_WITH_STATE], ids=str)
def test_forward_writes_nothing_to_the_layers(rope):
    changes = {} if rope is None else {"rope_parameters": rope, "max_position_embeddings": 16}
    row = to_sequential(make_model(**changes))
    before = everything_held(row)
    row(make_tokens(positions=20))
    row(make_tokens())
    assert everything_held(row) == before


@pytest.mark.parametrize("rope", ROPES_WITH_STATE, ids=str)
@pytest.mark.parametrize("positions", [12, 20])
def test_ropes_that_grow_equal_those_of_a_model_that_saw_no_other_sequence(rope, positions):
    changes = {"rope_parameters": rope, "max_position_embeddings": 16}
    row = to_sequential(make_model(**changes))
    row(make_tokens(positions=32))
    tokens = make_tokens(positions=positions)
    torch.testing.assert_close(row(tokens).logits, make_model(**changes)(tokens).logits, **EXACT)


@pytest.mark.parametrize("cast", [lambda row: row.bfloat16(), lambda row: row.to(torch.float16)])
def test_casting_the_row_leaves_the_rotary_frequencies_in_float32(cast):
    model = make_model()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    row = cast(to_sequential(model))
    assert {parameter.dtype for parameter in row.parameters()} <= {torch.bfloat16, torch.float16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(row(make_tokens()).logits, model(make_tokens()).logits, **ROUGH)


def test_a_model_with_rounded_frequencies_is_followed():
    model = make_model().bfloat16()
    assert_row_equals(model, {"input_ids": make_tokens(positions=60)}, **ROUGH)


# What an engine does with the layers


def run_layer_by_layer(row: nn.Sequential, **inputs) -> list:
    made = [row[0](**inputs)]
    for layer in row[1:]:
        made.append(layer(made[-1]))
    return made


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "by_token"])
def test_layers_hand_over_trees_of_tensors(attention):
    row = to_sequential(make_model(attention, **SLIDING))
    for handed in run_layer_by_layer(row, **INPUTS["padded left, with positions"]()):
        found = tensors_of(handed)
        assert found
        assert all(len(tensor) == BATCH for tensor in found)


def test_a_mask_that_is_not_needed_is_not_handed_on():
    def masks(carry: Carry) -> list[torch.Size]:
        return [tensor.shape for tensor in carry.values.values() if tensor.ndim == 4]

    row = to_sequential(make_model("sdpa"))
    assert masks(row[0](make_tokens())) == []
    assert masks(row[0](make_tokens(), padding("left"))) == [(BATCH, 1, POSITIONS, POSITIONS)]


@pytest.mark.parametrize("name", ["tokens only", "padded left, with positions"])
def test_all_but_the_hidden_states_is_handed_on_as_the_same_objects(name):
    *carries, _ = run_layer_by_layer(to_sequential(make_model("eager", **SLIDING)), **INPUTS[name]())
    assert len(carries) == 3
    for before, after in itertools.pairwise(carries):
        assert isinstance(after, Carry)
        known = {id(tensor) for tensor in tensors_of(before)}
        (made,) = [tensor for tensor in tensors_of(after) if id(tensor) not in known]
        assert made.shape == (BATCH, POSITIONS, HIDDEN)


def test_behind_the_layers_only_what_is_read_there_is_handed_on():
    *_, last, _ = run_layer_by_layer(to_sequential(make_model("eager")), **INPUTS["padded left"]())
    (hidden_states,) = last.values.values()
    assert hidden_states.shape == (BATCH, POSITIONS, HIDDEN)
    assert last.parts == {}


def test_microbatches_of_any_size_equal_the_whole_batch():
    row = to_sequential(make_model(**SLIDING))
    inputs = INPUTS["padded left, with positions"]()
    parts = [
        run(row, **{name: tensor[cut] for name, tensor in inputs.items()}) for cut in (slice(0, 1), slice(1, 3))
    ]
    real = inputs["attention_mask"].bool()
    logits = torch.cat([part.logits for part in parts])
    torch.testing.assert_close(logits[real], run(row, **inputs).logits[real], **EXACT)


def twin_of(layer: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """A deep copy with other tensors: each is made once, so tied ones stay tied."""
    for tensor in itertools.chain(layer.parameters(), layer.buffers()):
        if id(tensor) not in tensors:
            moved = tensor.detach().clone()
            is_weight = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(moved) if is_weight else moved
    return copy.deepcopy(layer, dict(tensors))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "by_token"])
def test_twins_with_other_tensors_compute_the_same(attention):
    model = make_model(attention, tie_word_embeddings=True, **SLIDING)
    row = to_sequential(model)
    inputs = INPUTS["padded right"]()
    expected = logits_and_gradients(row, model, inputs)
    model.zero_grad()

    tensors: dict[int, Tensor] = {}
    twin = nn.Sequential(*(twin_of(layer, tensors) for layer in row))
    causal_lm_loss(run(twin, **inputs), make_tokens(), reduction="mean", aligned=True).backward()

    gradients = {name: tensors[id(parameter)].grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, expected[1], **EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in row.parameters())


@pytest.mark.later
def test_compiled_layers_compute_the_same():
    row = to_sequential(make_model(**SLIDING))
    expected = run(row, **INPUTS["padded right"]()).logits
    compiled = [layer.get_submodule(name) for layer in row for name in layer.compiled_submodules]
    assert len(compiled) == 2
    for module in compiled:
        module.compile(backend="eager")
    torch.testing.assert_close(run(row, **INPUTS["padded right"]()).logits, expected, **EXACT)


def test_a_twin_on_another_device_makes_everything_there():
    row = to_sequential(make_model(**SLIDING))
    twin = copy.deepcopy(row).to("meta")
    # A mask that is ready: to make one, transformers looks at the positions, which is impossible there.
    inputs = {"input_ids": make_tokens().to("meta"), "attention_mask": OWN_MASK.to("meta")}
    for handed in run_layer_by_layer(twin, **inputs):
        assert {tensor.device.type for tensor in tensors_of(handed)} == {"meta"}


def test_recomputed_layers_give_the_same_gradients():
    model = make_model("eager", attention_dropout=0.5).train()
    row = to_sequential(model)

    def recomputed(**inputs):
        carry = row[0](**inputs)
        for layer in row[1:]:
            carry = checkpoint(layer, carry, use_reentrant=False)
        return carry

    made = []
    for network in (recomputed, row):
        torch.manual_seed(3)
        made.append(logits_and_gradients(network, model, INPUTS["padded left"]()))
    torch.testing.assert_close(*made, **EXACT)


def test_threads_may_run_the_same_layers_at_once():
    rope = {"rope_parameters": ROPES_WITH_STATE[0], "max_position_embeddings": 16}
    row = to_sequential(make_model(**rope))
    batches = [make_tokens(batch, positions) for batch in (1, 2) for positions in (8, 20, 40, 13)] * 3
    expected = [row(tokens).logits for tokens in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tokens: row(tokens).logits, batches, timeout=60))
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tokens only", "padded left, with positions", "packed"])
def test_row_equals_the_model_on_a_gpu(name):
    model = make_model("sdpa", torch.bfloat16, **SLIDING).cuda()
    inputs = {name: tensor.cuda() for name, tensor in INPUTS[name]().items()}
    assert_row_equals(model, inputs, **ROUGH)


# What is refused


def test_a_cache_is_refused_where_gradients_are_wanted():
    with pytest.raises(
        ValueError, match="past_key_values must be None in a call with gradients, but is a Dynamic"
    ):
        run(to_sequential(make_model()), make_tokens(), past_key_values=DynamicCache())


def test_a_cache_is_written_by_the_layers_and_returned():
    model, tokens = make_model().eval(), make_tokens()
    caches = [DynamicCache(), DynamicCache()]
    with torch.no_grad():
        for part in (tokens[:, :7], tokens[:, 7:]):
            found = run(to_sequential(model), part, past_key_values=caches[0], use_cache=True)
            expected = model(input_ids=part, past_key_values=caches[1], use_cache=True)

            torch.testing.assert_close(found.logits, expected.logits)
            assert found.past_key_values is caches[0]
    assert caches[0].get_seq_length() == tokens.shape[1]


@pytest.mark.parametrize("inputs", [{}, {"input_ids": make_tokens(), "inputs_embeds": torch.zeros(3, 12, HIDDEN)}])
def test_what_the_model_refuses_is_refused_by_the_first_layer(inputs):
    model = make_model()
    row = to_sequential(model)
    with pytest.raises(ValueError, match="exactly one of") as expected:
        model(**inputs)
    with pytest.raises(ValueError, match="exactly one of") as raised:
        row[0](**inputs)
    assert str(raised.value) == str(expected.value)


def test_a_cache_is_not_made_where_the_default_would_be_one():
    model = make_model(use_cache=True)
    assert model(make_tokens()).past_key_values is not None
    assert run(to_sequential(model), make_tokens()).past_key_values is None
    assert run(to_sequential(model), make_tokens(), use_cache=True).past_key_values is None


def test_arguments_that_ask_for_nothing_are_accepted():
    idle = {"output_attentions": False, "output_hidden_states": None, "return_dict": True, "past_key_values": None}
    assert run(to_sequential(make_model()), make_tokens(), **idle).logits is not None


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 2])], ids=str)
def test_logits_may_be_kept_for_some_positions(keep):
    model = make_model()
    inputs = {"input_ids": make_tokens(), "logits_to_keep": keep}
    found = run(to_sequential(model), **inputs).logits
    assert found.shape[1] < POSITIONS
    torch.testing.assert_close(found, model(**inputs).logits, **EXACT)


def test_the_loss_is_the_models_own():
    model = make_model()
    labels = make_tokens().masked_fill(padding("right") == 0, -100)
    inputs = {"input_ids": make_tokens(), "labels": labels, "num_items_in_batch": torch.tensor(7)}
    torch.testing.assert_close(run(to_sequential(model), **inputs).loss, model(**inputs).loss, **EXACT)


def test_hidden_states_are_collected_over_the_layers():
    model = make_model()
    found = run(to_sequential(model), make_tokens(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, model(make_tokens(), output_hidden_states=True).hidden_states, **EXACT)


def test_attention_that_sees_what_comes_later_equals_the_models():
    model = make_model()
    model.config.is_causal = False
    assert_row_equals(model, INPUTS["padded right"](), **EXACT)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_is_refused():
    model = make_model()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\)"):
        to_sequential(model)


@pytest.mark.slow
def test_attention_whose_mask_is_no_tensor_is_refused():
    model = make_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="BlockMask"):
        to_sequential(model)
