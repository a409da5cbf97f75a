"""The yardstick itself, against finite differences, torch's optimizer and transformers' Mixtral."""

import ast
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import nep.testing.reference as reference
import nep.testing.reference_model as reference_model
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.reference import (
    ReferenceAux,
    ReferenceHyper,
    reference_gradients,
    reference_logits,
    reference_loss,
    reference_lr,
    reference_train,
)
from nep.testing.reference_model import LayerRouting

SHAPE = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=12,
    ffn_hidden_size=8,
    num_experts=4,
    top_k=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    vocab_size=31,
    rope_theta=100.0,
    norm_eps=1e-5,
    sliding_window=None,
    tied_embeddings=False,
    neuron_block=2,
    max_seq_len=32,
)
TIED = dataclasses.replace(SHAPE, tied_embeddings=True)
WINDOW = dataclasses.replace(SHAPE, sliding_window=3)
DEEPSEEK = dataclasses.replace(
    SHAPE, num_layers=3, num_dense_layers=1, dense_ffn_hidden_size=10, num_shared_experts=2, shared_ffn_hidden_size=5,
    router_scores="sigmoid", router_bias=True, routed_scaling=2.5,
)  # fmt: skip
QWEN = dataclasses.replace(SHAPE, num_shared_experts=1, shared_ffn_hidden_size=7, shared_gate=True, norm_topk=False)
HYPER = ReferenceHyper(lr=0.02, warmup_steps=3, steps=8, clip_norm=0.5)


def make_params(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Large, all different (norm weights too), so that no factor can hide at one or zero."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(line.shape, generator=generator, dtype=torch.float64) * 0.4
        + (1.0 if line.init_std is None else 0.0)
        for name, line in parameter_lines(shape).items()
    }


def make_batch(shape: ModelShape, step: int = 0, size: tuple[int, int] = (3, 9)):
    draw = np.random.default_rng(step).integers(0, shape.vocab_size, (size[0], size[1] + 1))
    return draw[:, :-1], draw[:, 1:].copy()


@pytest.mark.parametrize("module", [reference, reference_model])
def test_it_imports_nothing_that_it_measures(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    own = {name for name in imported if name.partition(".")[0] in ("nep", "models")}
    assert own <= {"nep.planning.shapes", "nep.testing.reference_model"}


def test_an_untrained_model_is_as_good_as_guessing():
    params = {name: value * (1.0 if "norm" in name else 1e-6) for name, value in make_params(SHAPE).items()}
    loss, _ = reference_gradients(SHAPE, params, *make_batch(SHAPE))
    assert loss == pytest.approx(math.log(SHAPE.vocab_size), abs=1e-4)


@pytest.mark.parametrize(
    "shape", [SHAPE, TIED, WINDOW, DEEPSEEK, QWEN], ids=["plain", "tied", "window", "deepseek", "qwen"]
)
def test_gradients_are_finite_differences(shape):
    params = make_params(shape)
    tokens, targets = make_batch(shape)
    _, gradients = reference_gradients(shape, params, tokens, targets)
    step = 1e-6
    random = np.random.default_rng(0)

    def loss_with(name, place, change):
        moved = params[name].clone()
        moved.view(-1)[place] += change
        loss_sum, num_tokens = reference_loss(shape, {**params, name: moved}, tokens, targets)
        return float(loss_sum) / num_tokens

    for name, gradient in gradients.items():
        # The largest entry, which an indexing mistake cannot miss, and one at random.
        places = [int(gradient.abs().argmax()), int(random.integers(gradient.numel()))]
        for place in places:
            difference = (loss_with(name, place, step) - loss_with(name, place, -step)) / (2 * step)
            assert float(gradient.view(-1)[place]) == pytest.approx(difference, rel=1e-6, abs=1e-9), name


def test_auxiliary_losses_of_two_tokens_by_hand():
    """One sequence each, two experts, one choice: every number can be written down."""
    shape = dataclasses.replace(SHAPE, num_layers=1, num_experts=2, top_k=1)
    routing = LayerRouting(
        logits_ne=torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]], dtype=torch.float64),
        shares_ne=torch.tensor([[0.25, 0.75], [0.8, 0.2]], dtype=torch.float64),
        chosen_ne=torch.tensor([[False, True], [True, False]]),
        weights_ne=torch.ones(2, 2),
    )
    previous_e = torch.tensor([1, 3])
    expected = {
        ReferenceAux(z_loss=2.0): 2 * (math.log(4) ** 2 + math.log(5) ** 2),
        ReferenceAux(balance_loss=1.0): 2 * 0.75 + 2 * 0.8,
        ReferenceAux(balance_loss=1.0, balance_counts="step"): 0.5 * 2 * 2 * (0.525 + 0.475),
        ReferenceAux(balance_loss=1.0, balance_counts="previous"): 2 * 2 * (0.25 * 0.525 + 0.75 * 0.475),
    }
    for aux, value in expected.items():
        assert float(reference._aux_losses(shape, routing, 2, aux, previous_e)) == pytest.approx(value, rel=1e-12), aux


def test_the_vocabulary_s_z_loss_is_of_its_logits():
    tokens, targets = make_batch(SHAPE)
    params = {name: value.requires_grad_() for name, value in make_params(SHAPE).items()}
    logits = reference_logits(SHAPE, params, torch.as_tensor(tokens))
    expected = torch.autograd.grad((logits.logsumexp(-1) ** 2).mean(), params["head.weight"])[0]
    _, without = reference_gradients(SHAPE, params, tokens, targets)
    _, gradients = reference_gradients(SHAPE, params, tokens, targets, aux=ReferenceAux(logits_z_loss=1.0))
    torch.testing.assert_close(gradients["head.weight"] - without["head.weight"], expected, rtol=1e-10, atol=1e-12)


def test_biases_even_out_the_load():
    params = make_params(DEEPSEEK)
    plain, biased = (
        reference_train(
            DEEPSEEK, params, lambda step: make_batch(DEEPSEEK, 1, (6, 16)), 12,
            ReferenceHyper(lr=1e-9, warmup_steps=1, steps=12, aux=ReferenceAux(bias_rate=rate)),
        )
        for rate in (0.0, 0.05)
    )  # fmt: skip
    assert not plain.biases_le.any()
    assert set((biased.biases_le / 0.05).round().flatten().tolist()) - {0.0}
    assert biased.counts_le.double().std(1).mean() < 0.75 * plain.counts_le.double().std(1).mean()


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["plain", "tied"])
def test_steps_are_those_of_torch(shape):
    """Eight steps against torch's AdamW, clip_grad_norm_, schedulers and loss."""
    params = make_params(shape)
    run = reference_train(shape, params, lambda step: make_batch(shape, step), 8, HYPER)

    lines = parameter_lines(shape)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    groups = [
        {
            "params": [leaves[name] for name in lines if lines[name].weight_decay == decayed],
            "weight_decay": decay,
        }
        for decayed, decay in ((True, HYPER.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=HYPER.lr, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5, eta_min=HYPER.min_lr_ratio * HYPER.lr)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    clipped = 0
    for step in range(1, 9):
        tokens, targets = map(torch.as_tensor, make_batch(shape, step))
        logits = reference_logits(shape, leaves, tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert float(loss.detach()) == pytest.approx(run.losses[step - 1], rel=1e-12)
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            for name, leaf in leaves.items():
                torch.testing.assert_close(run.first_gradients[name], leaf.grad, rtol=1e-12, atol=1e-14)
        clipped += float(torch.nn.utils.clip_grad_norm_(leaves.values(), HYPER.clip_norm)) > HYPER.clip_norm
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference_lr(step, HYPER), rel=1e-12)
        optimizer.step()
        schedule.step()
    assert clipped == 8  # otherwise clipping was not tested
    for name, leaf in leaves.items():
        torch.testing.assert_close(run.params[name], leaf.detach(), rtol=1e-11, atol=1e-13)


def test_training_leaves_its_arguments_alone_and_learns():
    params = make_params(SHAPE)
    before = {name: value.clone() for name, value in params.items()}
    hyper = ReferenceHyper(lr=0.02, warmup_steps=2, steps=20, clip_norm=math.inf)
    losses, after, *_ = reference_train(SHAPE, params, lambda step: make_batch(SHAPE, 1), 20, hyper)
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert not any(torch.equal(after[name], before[name]) for name in params)
    assert losses[-1] < 0.3 * losses[0]


def test_schedule():
    hyper = ReferenceHyper(lr=2.0, warmup_steps=4, steps=10)
    assert [reference_lr(step, hyper) for step in (1, 2, 4)] == [0.5, 1.0, 2.0]
    assert reference_lr(7, hyper) == pytest.approx(1.1)
    assert reference_lr(10, hyper) == reference_lr(15, hyper) == pytest.approx(0.2)
    assert reference_lr(1, ReferenceHyper(lr=2.0, warmup_steps=0, steps=1)) == pytest.approx(0.2)


def test_whole_tensors_come_with_or_without_their_unit_axis():
    params = make_params(SHAPE)
    bare = {
        name: value.reshape(line.unit_shape) if line.num_units == 1 else value
        for (name, value), line in zip(params.items(), parameter_lines(SHAPE).values(), strict=True)
    }
    assert bare["final_norm.weight"].shape == (12,)
    run, bare_run = (
        reference_train(SHAPE, values, lambda step: make_batch(SHAPE, step), 2, HYPER) for values in (params, bare)
    )
    assert run.losses == bare_run.losses
    assert all(torch.equal(run.params[name].flatten(), bare_run.params[name].flatten()) for name in params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params.pop("head.weight"), "head.weight"),
        (lambda params: params.update(more=torch.zeros(1)), "more"),
        (
            lambda params: params.update({"head.weight": torch.zeros(3, 12).double()}),
            r"\(3, 12\) must be \(31, 12\)",
        ),
        (lambda params: params.update({"head.weight": torch.zeros(31, 12)}), "must be float64"),
    ],
)
def test_wrong_params_are_refused(change, message):
    params = make_params(SHAPE)
    change(params)
    with pytest.raises(ValueError, match=message):
        reference_train(SHAPE, params, lambda step: make_batch(SHAPE, step), 1, HYPER)


class _Torch:
    """torch as transformers' Mixtral sees it: its float32 islands (norms, router, angles) become float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def _huggingface(shape: ModelShape, params: dict[str, torch.Tensor], monkeypatch):
    # Here, since importing it takes seconds.
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as modeling

    monkeypatch.setattr(modeling, "torch", _Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    config = MixtralConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        sliding_window=shape.sliding_window,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=shape.max_seq_len,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = modeling.MixtralForCausalLM(config).double()
    e, f, d = shape.num_experts, shape.ffn_hidden_size, shape.hidden_size
    values = {
        "model.embed_tokens.weight": params["embedding.weight"],
        "model.norm.weight": params["final_norm.weight"],
    }
    values["lm_head.weight"] = params["embedding.weight" if shape.tied_embeddings else "head.weight"]
    for layer in range(shape.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        values[theirs + "input_layernorm.weight"] = params[ours + "attention_norm.weight"]
        values[theirs + "post_attention_layernorm.weight"] = params[ours + "moe_norm.weight"]
        for name in "qkv":
            values[f"{theirs}self_attn.{name}_proj.weight"] = params[f"{ours}attention.w{name}"].reshape(-1, d)
        values[theirs + "self_attn.o_proj.weight"] = params[ours + "attention.wo"].reshape(-1, d).T
        values[theirs + "mlp.gate.weight"] = params[ours + "moe.router.weight"]
        w13 = params[ours + "moe.experts.w13"].reshape(e, f // shape.neuron_block, 2, shape.neuron_block, d)
        values[theirs + "mlp.experts.gate_up_proj"] = w13.transpose(1, 2).reshape(e, 2 * f, d)
        down = params[ours + "moe.experts.w2"].reshape(e, f, d)
        values[theirs + "mlp.experts.down_proj"] = down.transpose(1, 2)
    # A tied head goes by the embedding's name only.
    named = dict(model.named_parameters()) | {"lm_head.weight": model.lm_head.weight}
    assert set(values) == set(named)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(values[name].reshape(parameter.shape))
    return model


@pytest.mark.parametrize("shape", [SHAPE, TIED, WINDOW], ids=["plain", "tied", "window"])
def test_loss_is_that_of_transformers(shape, monkeypatch):
    params = make_params(shape)
    tokens, targets = map(torch.as_tensor, make_batch(shape, size=(3, 12)))
    loss_sum, num_tokens = reference_loss(shape, params, tokens, targets)
    model = _huggingface(shape, params, monkeypatch)
    with torch.no_grad():
        output = model(input_ids=tokens, labels=tokens, shift_labels=targets, output_router_logits=False)
    torch.testing.assert_close(reference_logits(shape, params, tokens), output.logits, rtol=1e-10, atol=1e-10)
    assert float(loss_sum) / num_tokens == pytest.approx(float(output.loss), rel=1e-10)
