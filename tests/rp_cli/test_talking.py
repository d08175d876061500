"""`roundpipe chat` and `roundpipe generate`: replies are those of transformers alone."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning import CHATML, chats, json_lines, make_model, words
from rp_cli.main import main
from rp_cli.talking.speaker import Speaker
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [{"prompt": words(1, 4), "id": 7}, {"prompt": words(2, 9)}]
CHATS = [
    {"messages": [{"role": "user", "content": words(3, 3)}]},
    {"messages": [{"role": "system", "content": "the cat"}, {"role": "user", "content": words(4, 2)}]},
]
TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:2")


def plainly(
    folder: Path, texts: list[str], *, is_form: bool = False, wrap: Any = lambda model: model
) -> list[str]:
    """What transformers says to each text alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not is_form)["input_ids"]
        said = model.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def form_of(folder: Path, messages: list[dict[str, str]]) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def generate(run: Path, prompts: Path, output: Path, *more: str) -> int:
    asked = ["--prompts", str(prompts), "--output", str(output), "--max-tokens", str(TOKENS), "--greedy"]
    return main(["generate", str(run), *asked, *more])


def completions(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def talk(run: Path, said: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", str(run), "--max-tokens", str(TOKENS), "--greedy", *more])


@pytest.mark.later
def test_prompts_are_completed_in_their_order_whatever_the_batch(model: Path, tmp_path: Path) -> None:
    prompts = json_lines(tmp_path / "prompts.jsonl", [*PROMPTS, *CHATS, words(5, 3)])
    texts = [PROMPTS[0]["prompt"], PROMPTS[1]["prompt"]]
    expected = [
        *plainly(model, texts),
        *plainly(model, [form_of(model, chat["messages"]) for chat in CHATS], is_form=True),
        *plainly(model, [words(5, 3)]),
    ]

    assert generate(model, prompts, tmp_path / "said.jsonl") == 0

    found = completions(tmp_path / "said.jsonl")
    assert [row["completion"] for row in found] == expected
    assert [{**row, "completion": None} for row in found] == [
        {**row, "completion": None} for row in [*PROMPTS, *CHATS, {"prompt": words(5, 3)}]
    ]
    assert generate(model, prompts, tmp_path / "again.jsonl", "--batch", "1") == 0
    assert completions(tmp_path / "again.jsonl") == found


def test_a_reply_ends_as_the_template_ends_it(tmp_path: Path) -> None:
    """Also where the model's config, of before it learned conversations, does not say so."""
    end = "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}"
    template = "{% for message in messages %}{{ message['content'] }}" + end + "\n{% endfor %}"
    model = make_model(tmp_path / "model", template=template)
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.generation_config.eos_token_id = 0
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = form_of(model, CHATS[0]["messages"])
    ids = tokenizer(asked, return_tensors="pt", add_special_tokens=False)
    said = made.generate(**ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0].tolist()
    start = ids["input_ids"].shape[1]
    # The end stands for a token that was not there before, and is followed by another one.
    place = next(at for at in range(start + 1, len(said) - 1) if said[at] not in said[:at] and said[at + 1] > 2)
    swapped = [said[place], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    for weight in (made.lm_head.weight.data, made.model.embed_tokens.weight.data):
        weight[swapped] = weight[swapped[::-1]]
    made.save_pretrained(model)
    prompts = json_lines(tmp_path / "prompts.jsonl", [CHATS[0], {"prompt": asked}])

    assert generate(model, prompts, tmp_path / "said.jsonl") == 0

    reply, text = (row["completion"] for row in completions(tmp_path / "said.jsonl"))
    assert reply == tokenizer.decode(said[start:place])
    assert text == tokenizer.decode([*said[start:place], *said[place + 1 :]])


def test_tokens_are_chosen_as_the_models_config_says(model: Path, tmp_path: Path) -> None:
    made = AutoModelForCausalLM.from_pretrained(model)
    made.generation_config.do_sample = False
    made.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)
    asked = ["--prompts", str(prompts), "--max-tokens", str(TOKENS)]

    found = []
    ways = {"greedy": ["--greedy"], "cold": ["--temperature", "0", "--top-p", "0.9"], "said": []}
    for name, more in {**ways, "hot": ["--temperature", "9"]}.items():
        output = tmp_path / f"{name}.jsonl"
        assert main(["generate", str(tmp_path / "model"), *asked, "--output", str(output), *more]) == 0
        found.append(completions(output))

    assert found[0] == found[1] == found[2] != found[3]


def test_conversations_have_what_those_of_data_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": "function", "function": {"name": "sat", "parameters": {}}}]
    template = "{% if tools %}{{ tools[0]['function']['name'] }} {% endif %}{{ mood }} " + CHATML
    model = make_model(tmp_path / "model", template=template)
    rows = [
        {"messages": [{"role": "user", "content": "one"}], "tools": tools, "id": None},
        {"conversations": [{"from": "human", "value": "one"}], "chat_template_kwargs": {"mood": "on"}},
        {"prompt": [{"role": "user", "content": "one"}], "system": "the cat", "documents": [{"text": "a"}]},
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [
        *[[{"role": "user", "content": "one"}]] * 2,
        [{"role": "system", "content": "the cat"}, *rows[2]["prompt"]],
    ]
    given: list[dict[str, Any]] = [{"tools": tools}, {"mood": "on"}, {}]
    forms = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
        for messages, more in zip(asked, given, strict=True)
    ]

    assert generate(model, tmp_path / "prompts.json", tmp_path / "said.jsonl") == 0

    said = plainly(model, forms, is_form=True)
    assert completions(tmp_path / "said.jsonl") == [
        {**row, "completion": one} for row, one in zip(rows, said, strict=True)
    ]
    assert len({*said}) == 3
    told = capsys.readouterr().err
    assert "--prompts: the chat template does not read 'documents' (1 conversation)" in told
    # Prompts have no answer.
    assert "by their roles" not in told


def test_a_text_file_has_a_prompt_a_line(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{words(1, 4)}\n\n{words(2, 9)}\n")

    assert generate(model, prompts, tmp_path / "said.jsonl") == 0

    found = [row["completion"] for row in completions(tmp_path / "said.jsonl")]
    assert found == plainly(model, [words(1, 4), words(2, 9)])


@pytest.mark.later
def test_a_prompt_past_the_learned_positions_is_refused_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "gpt2")
    tokens = len(AutoTokenizer.from_pretrained(model)(words(1, 9))["input_ids"])
    config = AutoModelForCausalLM.from_pretrained(model).config
    for room, code in ((TOKENS, 0), (TOKENS - 1, 2)):
        config.n_positions = tokens + room
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        prompts = json_lines(tmp_path / "prompts.jsonl", [{"prompt": words(1, 9)}, {"prompt": words(2, 2)}])

        assert generate(model, prompts, tmp_path / f"{room}.jsonl") == code

    told = capsys.readouterr().err
    assert f"a prompt of {tokens} tokens and up to --max-tokens {TOKENS} after it are more than the" in told
    assert f"the {tokens + TOKENS - 1} positions that model has" in told


@pytest.mark.later
def test_sampling_is_repeated_by_its_seed(model: Path, tmp_path: Path) -> None:
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)

    def sampled(seed: int, name: str) -> list[dict[str, Any]]:
        asked = ["--prompts", str(prompts), "--output", str(tmp_path / name), "--seed", str(seed)]
        assert (
            main(["generate", str(model), *asked, "--max-tokens", "12", "--temperature", "3", "--top-k", "50"])
            == 0
        )
        return completions(tmp_path / name)

    assert sampled(1, "one") == sampled(1, "two") != sampled(2, "three")


@pytest.mark.later
def test_what_was_stopped_goes_on_as_if_it_had_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = json_lines(tmp_path / "prompts.jsonl", [{"prompt": words(n, 4)} for n in range(5)])
    output, part = tmp_path / "said.jsonl", tmp_path / "said.jsonl.part"
    asked = ["generate", str(model), "--prompts", str(prompts), "--max-tokens", "9", "--batch", "2"]
    sampled = [*asked, "--temperature", "3", "--microbatches", "2", "--output"]
    assert main([*sampled, str(tmp_path / "whole.jsonl")]) == 0
    whole = (tmp_path / "whole.jsonl").read_text()

    complete = Speaker.complete
    monkeypatch.setattr(Speaker, "complete", stopping_at(2, complete))
    assert main([*sampled, str(output)]) != 0

    assert "2 of 5 completions are in" in capsys.readouterr().err
    assert not output.exists()
    assert part.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    monkeypatch.setattr(Speaker, "complete", complete)
    assert main([*sampled, str(output)]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    # As whoever was stopped in the middle of a line leaves it.
    part.write_text(part.read_text() + whole.splitlines()[2][:-3])
    assert main([*sampled, str(output), "--resume"]) == 0
    assert output.read_text() == whole
    assert not part.exists()


def test_completions_of_other_prompts_do_not_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = json_lines(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "said.jsonl"
    assert generate(model, prompts, output, "--resume") == 2
    assert "said.jsonl.part cannot be read" in capsys.readouterr().err
    json_lines(tmp_path / "said.jsonl.part", [{"prompt": "other", "completion": "x"}])

    assert generate(model, prompts, output, "--resume") == 2

    assert "line 1 of" in capsys.readouterr().err
    assert generate(model, prompts, output, "--overwrite") == 0
    assert len(completions(output)) == len(PROMPTS)


def test_prompts_that_take_too_much_memory_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)
    monkeypatch.setattr(Speaker, "complete", stopping_at(1, Speaker.complete, torch.OutOfMemoryError("of cpu:0")))

    assert generate(model, prompts, tmp_path / "said.jsonl") == 2

    told = capsys.readouterr().err
    assert all(words in told for words in ("prompts.jsonl:1", "more --microbatches", "of cpu:0"))
    assert list(tmp_path.iterdir()) == [prompts]


def stopping_at(call: int, complete: Any, error: BaseException | None = None) -> Any:
    calls = []

    def stopping(*args: Any, **kwargs: Any) -> list[str]:
        calls.append(args)
        if len(calls) == call:
            raise error or KeyboardInterrupt
        return complete(*args, **kwargs)

    return stopping


@pytest.mark.later
@pytest.mark.usefixtures("measured_once")
def test_a_run_its_checkpoints_and_its_model_are_found(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json_lines(tmp_path / "data.jsonl", [{"text": words(number, 8)} for number in range(24)])
    prompts, run = json_lines(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "run"
    trained = ["--sequence", "16", "--batch", "4", "--steps", "2", "--save-every", "1", "--lr", "0.01"]
    assert main(["train", "--model", str(model), "--data", str(data), "--output", str(run), *trained]) == 0

    def said(folder: Path) -> list[str]:
        assert generate(folder, prompts, tmp_path / "said.jsonl", "--overwrite") == 0
        return [row["completion"] for row in completions(tmp_path / "said.jsonl")]

    texts = [row["prompt"] for row in PROMPTS]
    expected = plainly(run / "model", texts)
    assert said(run) == said(run / "model") == expected
    # A checkpoint has no tokenizer of its own: the run's is taken.
    of_checkpoint = said(run / "checkpoints" / "step-00000001")
    (run / "model").rename(tmp_path / "moved")
    assert said(run) == of_checkpoint
    capsys.readouterr()


def test_an_adapter_speaks_with_its_model(model: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapter = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(adapter)
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)

    assert generate(adapter, prompts, tmp_path / "said.jsonl") == 0

    expected = plainly(
        model, [row["prompt"] for row in PROMPTS], wrap=lambda one: peft.PeftModel.from_pretrained(one, adapter)
    )
    assert [row["completion"] for row in completions(tmp_path / "said.jsonl")] == expected
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert generate(adapter, prompts, tmp_path / "more.jsonl") == 2


@pytest.mark.later
def test_an_adapter_for_more_layers_or_other_sizes_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft: Any = pytest.importorskip("peft")
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)
    config = AutoModelForCausalLM.from_pretrained(model).config
    others = {
        "is for a model of more layers": {"num_hidden_layers": config.num_hidden_layers + 1, "layer_types": None},
        "size mismatch": {"hidden_size": 2 * config.hidden_size},
    }
    for told, sizes in others.items():
        other = type(config)(**{**config.to_dict(), **sizes})
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
        adapter = tmp_path / told
        peft.get_peft_model(AutoModelForCausalLM.from_config(other), lora).save_pretrained(adapter)

        assert generate(adapter, prompts, tmp_path / "said.jsonl", "--base", str(model)) == 2
        assert told in capsys.readouterr().err
        assert main(["merge", str(adapter), "--base", str(model), "--output", str(tmp_path / "merged")]) == 2
        assert told in capsys.readouterr().err


def test_an_adapter_that_learns_a_prompt_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft: Any = pytest.importorskip("peft")
    prompts = json_lines(tmp_path / "prompts.jsonl", PROMPTS)
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    adapter = tmp_path / "adapter"
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(adapter)

    assert generate(adapter, prompts, tmp_path / "said.jsonl") == 2
    data = json_lines(tmp_path / "data.jsonl", [{"text": words(number, 8)} for number in range(4)])
    assert main(["eval", str(adapter), "--data", str(data), "--sequence", "16"]) == 2

    assert capsys.readouterr().err.count("is a PROMPT_TUNING, which learns a prompt") == 2
    assert not (tmp_path / "said.jsonl").exists()


@pytest.mark.parametrize("flag", ["--prompts", "--output"])
def test_both_files_must_be_given(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--prompts": "prompts.txt", "--output": "said.jsonl"}
    others = [word for name, file in given.items() if name != flag for word in (name, file)]

    assert main(["generate", "run", *others]) == 2
    assert f"{flag} must be given: a file to" in capsys.readouterr().err


def test_a_conversation_goes_on_until_it_is_reset(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.jsonl"

    assert talk(model, f"one two\nthe cat\n/save {file}\n/reset\none two\n/save {file}\n/exit\n", monkeypatch) == 0

    first, second = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    assert [message["role"] for message in first] == ["user", "assistant"] * 2
    for turn in (1, 3):
        (expected,) = plainly(model, [form_of(model, first[:turn])], is_form=True)
        assert first[turn]["content"] == expected
    assert second == first[:2]
    assert f"added to {file}" in capsys.readouterr().out


def test_the_systems_message_begins_each_conversation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.jsonl"

    assert talk(model, f"/reset\none\n/save {file}\n", monkeypatch, "--system", "the cat") == 0

    (messages,) = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    assert messages[0] == {"role": "system", "content": "the cat"}
    assert messages[2]["content"] == plainly(model, [form_of(model, messages[:2])], is_form=True)[0]


def test_commands_that_cannot_be_followed_say_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.jsonl"
    lines = f"/sing\n/save\n/save {file}\none\n/save {tmp_path}\n/image a.png\n"

    assert talk(model, lines, monkeypatch, "--system", "the cat") == 0

    out = capsys.readouterr().out
    # No line that a training would refuse.
    assert "nothing has been said yet" in out
    assert not file.exists()
    assert "there is no /sing; /reset begins anew" in out
    assert "/save must be followed by the name of a file" in out
    assert "not saved: " in out
    assert "start roundpipe chat with --images" in out


@pytest.mark.later
def test_a_template_without_an_end_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["rp_strangers.limited"], "_LEAST_S", 3.0)
    monkeypatch.setattr(sys.modules["rp_strangers.limited"], "_S_PER_BYTE", 0.0)
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    model = make_model(tmp_path / "model", template="{{ messages[0]['role'] }}" + loop)
    prompts = json_lines(tmp_path / "prompts.jsonl", CHATS)

    assert generate(model, prompts, tmp_path / "said.jsonl") == 2

    assert "the tokenizer, or its chat template," in capsys.readouterr().err


REFUSALS = [
    (
        ["nowhere"],
        "RUN must be a folder or a name on the hub such as Qwen/Qwen3-8B, but there is no folder 'nowhere'",
    ),
    (["EMPTY"], "must hold a model (config.json), an adapter (adapter_config.json) or a run of `roundpipe train`"),
    (["OF_A_TRAINER"], "trainer/checkpoint-10 is the last"),
    (["MODEL", "--base", "MODEL"], "--base is the model of an adapter, but"),
    (["MODEL", "--prompts", "none.txt"], "--prompts none.txt cannot be read"),
    (["MODEL", "--prompts", "BAD"], "must have 'prompt', a text, or 'messages' with 'role' and 'content'"),
    (
        ["MODEL", "--prompts", "ANSWERED"],
        "answered.jsonl:1 must end with what is asked, but ends with the assistant's",
    ),
    (["MODEL", "--prompts", "EMPTY_SAID"], "each message must have a 'role' and a 'content', but one is"),
    (
        ["MODEL", "--prompts", "PROMPTS", "--system", "s"],
        "prompts.jsonl:1 is a text; give JSON lines with 'messages'",
    ),
    (["MODEL", "--output", "no/where.jsonl"], "--output no/where.jsonl must be in a folder that is there"),
    (["MODEL", "--output", "PROMPTS"], "is there already; take another name, or --overwrite"),
    (["MODEL", "--greedy", "--top-k", "3"], "--top-k and --greedy exclude each other"),
    (["MODEL", "--prompts", "TEXT", "--system", "s"], "--system begins conversations, but --prompts"),
    (["MODEL", "--devices", "abacus"], "devices must read 'cuda'"),
]


@pytest.mark.parametrize(("given", "told"), REFUSALS)
def test_what_cannot_be_used_is_refused_in_a_line(
    given: list[str], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("one\n")
    for step in (2, 10):
        (tmp_path / "trainer" / f"checkpoint-{step}").mkdir(parents=True)
    places = {
        "MODEL": str(model),
        "EMPTY": str(tmp_path / "empty"),
        "OF_A_TRAINER": str(tmp_path / "trainer"),
        "TEXT": str(tmp_path / "text.txt"),
        "PROMPTS": str(json_lines(tmp_path / "prompts.jsonl", PROMPTS)),
        "ANSWERED": str(json_lines(tmp_path / "answered.jsonl", chats(1))),
        "EMPTY_SAID": str(
            json_lines(tmp_path / "empty.jsonl", [{"messages": [{"role": "user", "content": None}]}])
        ),
        "BAD": str(json_lines(tmp_path / "bad.jsonl", [{"question": "why"}])),
    }
    run, *more = (places.get(each, each) for each in given)
    asked = {"--prompts": places["PROMPTS"], "--output": str(tmp_path / "said.jsonl")}
    usual = [each for name, value in asked.items() if name not in more for each in (name, value)]

    assert main(["generate", run, *usual, *more]) == 2

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in error, error
    assert not (tmp_path / "said.jsonl").exists()


@pytest.mark.later
def test_a_model_without_a_chat_template_continues_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", template=None)
    prompts = json_lines(tmp_path / "chats.jsonl", CHATS)

    assert talk(model, "one two\n", monkeypatch) == 0
    assert talk(model, "one two\n", monkeypatch, "--system", "s") == 2
    assert generate(model, prompts, tmp_path / "said.jsonl") == 2

    printed = capsys.readouterr()
    assert "the tokenizer has no chat template, so each line is continued as a text" in printed.out
    assert plainly(model, ["one two"])[0] in printed.out
    assert "--system needs a chat template, but the tokenizer has none" in printed.err
    assert "give a 'prompt' in place of 'messages'" in printed.err
