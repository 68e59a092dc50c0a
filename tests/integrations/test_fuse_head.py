"""`fuse_head` on models of Transformers: losses and gradients of those with logits, and what is refused."""

import copy
import pickle

import case_transformers as case
import pages
import pytest
import torch
from loops import assert_same_gradients
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import fusedacc
from fusedacc.integrations.transformers import AccumulationCallback, fuse_head

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
#: By model type, what its config has beside `SMALL`.
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "stablelm": {},
    "starcoder2": {},
    "gpt_neox": {},
    "gpt2": OLD,
    "gptj": OLD | {"rotary_dim": 4},
    "bloom": OLD,
    "falcon": {},
}


def model_of(family: str, **more) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **more})
    model = AutoModelForCausalLM.from_config(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch(**more) -> dict:
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, **more}


def assert_same(model: PreTrainedModel, twin: PreTrainedModel, given: dict, scale: float = 1.0) -> None:
    """The loss and all gradients, where only `twin` has logits."""
    model.zero_grad(), twin.zero_grad()
    ours, theirs = model(**given), twin(**given)
    assert ours.logits is None
    assert theirs.logits is not None
    torch.testing.assert_close(ours.loss, theirs.loss)
    ours.loss.backward(), theirs.loss.backward()
    assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = model_of(family)
    twin = copy.deepcopy(model)
    fused = fuse_head(model)
    assert_same(model, twin, batch())
    assert_same(model, twin, batch(num_items_in_batch=torch.tensor(17)))
    model.eval()
    assert model(**batch()).logits is not None
    model.train()
    fused.remove()
    assert model(**batch()).logits is not None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_labels_and_ways_to_call(family):
    """Labels that are shifted already, packed sequences, positional labels, tuples, autocast, wrapper."""
    model = model_of(family)
    twin = copy.deepcopy(model)
    fused = fuse_head(model)
    shifted = batch()
    shifted["shift_labels"] = nn.functional.pad(shifted["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_same(model, twin, shifted)
    packed = batch(position_ids=torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1))
    assert_same(model, twin, packed)
    loss, logits, *_ = model(**batch(), return_dict=False)
    assert logits is None
    assert loss.requires_grad
    with torch.autocast("cpu"):
        near = model(**batch()).loss, twin(**batch()).loss
    torch.testing.assert_close(*near, rtol=0.01, atol=0)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    assert_same(model, twin, batch())
    assert "head+embedding" in optimizer.explain()
    optimizer.close()
    fused.remove()
    assert "forward" not in model.get_output_embeddings().__dict__


def test_nothing_changes_without_labels_in_eval_mode_and_in_copies():
    model = model_of("llama")
    fuse_head(model)
    tokens = batch()["input_ids"]
    assert model(input_ids=tokens).logits is not None
    assert model.eval().generate(tokens, max_new_tokens=2, do_sample=False).shape == (2, 14)
    model.train()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied(**batch()).logits is not None
        fuse_head(copied)
        assert copied(**batch()).logits is None
    with pytest.raises(ValueError, match="fused already"):
        fuse_head(model)


def test_eval_on_request():
    model = model_of("llama").eval()
    wanted = model(**batch()).loss
    fuse_head(model, eval=True)
    with torch.no_grad():
        output = model(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, wanted)
    assert model.generate(batch()["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 14)


def test_a_scaled_head_with_a_bias():
    """The scale multiplies the bias too."""
    model = model_of("granite")
    model.lm_head = nn.Linear(32, 100)
    twin = copy.deepcopy(model)
    fuse_head(model)
    assert_same(model, twin, batch())


class Varying(nn.Module):
    """A parametrization that computes another value each time."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def forward(self, value):
        self.reads += 1
        return value * (1 + self.reads / 10)


def prunes(head):
    prune.l1_unstructured(head, "weight", 0.25)
    prune.l1_unstructured(head, "bias", 0.25)


def parametrizes(head):
    parametrize.register_parametrization(head, "weight", Varying())
    parametrize.register_parametrization(head, "bias", Varying())


def removes_the_bias(head):
    head.bias = None


def has_another_forward(head):
    head.__class__ = Doubled


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("change", [prunes, parametrizes, removes_the_bias, has_another_forward])
def test_a_head_that_is_changed_after_it_was_fused(change, wraps):
    model = model_of("granite")
    model.lm_head = nn.Linear(32, 100)
    twin = copy.deepcopy(model)
    fuse_head(model)
    if wraps:
        _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    for each in (model, twin):
        change(each.lm_head)
    for _ in range(2):
        ours, theirs = model(**batch()), twin(**batch())
        assert (ours.logits is None) == (change is not has_another_forward)
        torch.testing.assert_close(ours.loss, theirs.loss)
        ours.loss.backward(), theirs.loss.backward()
    assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", ["model", "body"])
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_compiled(family, what):
    """The whole model in one graph, or its body alone."""
    torch.compiler.reset()
    model = model_of(family, vocab_size=1000)
    twin = copy.deepcopy(model)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    fuse_head(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager") if what == "model" else model
    if what == "body":
        model.model.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        output = compiled(**batch())
        assert output.logits is None
        loss = twin(**batch()).loss
        torch.testing.assert_close(output.loss, loss)
        output.loss.backward(), loss.backward()
    assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)
    paths = {row.split()[2] for row in optimizer.explain().splitlines() if "1000x32" in row}
    assert any("head" in path for path in paths)
    assert model.eval()(**batch()).logits is not None


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_heads_that_cannot_be_fused():
    model = model_of("llama")
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        fuse_head(model.lm_head)
    with pytest.raises(ValueError, match="takes no labels"):
        fuse_head(model.model)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        fuse_head(model_of("gemma2", head_dim=8))
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        hook = getattr(model.lm_head, f"register_{register}")(lambda *given: None)
        with pytest.raises(ValueError, match="hooks"):
            fuse_head(model)
        hook.remove()
    model.lm_head = Doubled(32, 100, bias=False)
    with pytest.raises(ValueError, match="Doubled"):
        fuse_head(model)


REFUSED = {
    "tanh": lambda logits, labels, **_: torch.tanh(logits).sum(),
    "some classes": lambda logits, labels, **_: logits[..., :5].sum(),
    "logits.softmax": lambda logits, labels, **_: logits.softmax(-1),
    "by a tensor": lambda logits, labels, **_: logits * torch.ones(100),
    "something else": lambda logits, labels, **_: torch.ones(()),
    "other than with": lambda logits, labels, **_: nn.functional.cross_entropy(logits, labels),
    "as (100, -1)": lambda logits, labels, **_: logits.view(100, -1),
    "by to(torch.float16,)": lambda logits, labels, **_: logits.to(torch.float16),
    "by to('cpu',)": lambda logits, labels, **_: logits.to(device="cpu"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_logits_is_refused(what):
    """And the head is as it was after that."""
    model = model_of("llama")
    model.loss_function = REFUSED[what]
    fuse_head(model)
    with pytest.raises(RuntimeError, match="needs all logits") as error:
        model(**batch())
    assert what in str(error.value)
    assert "forward" not in model.lm_head.__dict__


def test_the_first_loss_is_compared():
    """A forward that has replaced the head's since."""
    model = model_of("llama")
    fuse_head(model)
    stock = model.lm_head.forward
    model.lm_head.forward = lambda input: 2 * stock(input)
    with pytest.raises(RuntimeError, match=r"losses of 8 tokens of LlamaForCausalLM differ"):
        model(**batch())


def test_the_trainer_fuses():
    """By the callback, which gives the logits back at the end."""
    seen, models = [], [case.llama(), case.llama()]
    for model, fuses in zip(models, (False, True), strict=True):
        model.register_forward_hook(lambda module, given, output: seen.append(output.logits is None))
        optimizer = case.wrapped(model)
        case.train(model, optimizer, callbacks=[AccumulationCallback(fuse_head=fuses)])
    assert seen == [False] * (len(seen) // 2) + [True] * (len(seen) // 2)
    given = case.collate(case.lines())
    losses = [model.eval()(**given).loss for model in models]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    assert models[1].train()(**given).logits is not None


def test_the_page():
    found = pages.run("../head", torch=torch)
    assert found["output"].logits is None
