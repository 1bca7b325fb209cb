import pytest
import torch
from safetensors.torch import load_file

import training.train
from tests.helpers import tiny_model
from tests.training.runs import tiny_run, write_texts
from training.muon import Muon, orthogonalised
from training.recipe import RecurrentTrainingArguments
from training.trainer import RecurrentTrainer


def parameters_and_gradients(*shapes, steps=6):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    return parameters, [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def take_steps(optimizer, parameters, gradients):
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 128)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalised(matrix)
    assert result.shape == matrix.shape
    singular_values = torch.linalg.svdvals(result)
    assert singular_values.min() > 0.6
    assert singular_values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ result @ right.T  # diagonal, if the singular vectors are still the same
    torch.testing.assert_close(turned, turned.diagonal().diag(), atol=1e-4, rtol=0)


def test_matrices_move_as_by_the_muon_of_torch():
    shapes = [(24, 24), (48, 24), (24, 96)]
    ends = []
    for make in (
        lambda values: Muon([{"params": values, "orthogonal": True, "lr": 0.1, "weight_decay": 0.3}]),
        lambda values: torch.optim.Muon(values, lr=0.1, weight_decay=0.3, momentum=0.95),
    ):
        parameters, gradients = parameters_and_gradients(*shapes)
        ends.append(take_steps(make(parameters), parameters, gradients))
    for start, ours, theirs in zip(parameters_and_gradients(*shapes)[0], *ends, strict=True):
        moved = (theirs - start).norm()
        assert moved > 1
        assert (ours - theirs).norm() < 0.03 * moved  # torch rounds to bfloat16 on its way


def test_the_rest_moves_as_by_the_adamw_of_torch():
    ends = []
    for make in (
        lambda values: Muon([{"params": values, "lr": 0.1, "weight_decay": 0.3}], betas=(0.8, 0.9)),
        lambda values: torch.optim.AdamW(values, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9)),
    ):
        parameters, gradients = parameters_and_gradients((24, 8), (16,))
        ends.append(take_steps(make(parameters), parameters, gradients))
    torch.testing.assert_close(ends[0], ends[1])


def test_a_saved_state_goes_on_where_it_was():
    def make(values):
        groups = [{"params": values[:1], "orthogonal": True}, {"params": values[1:]}]
        return Muon([{"lr": 0.1, "weight_decay": 0.1, **group} for group in groups])

    parameters, gradients = parameters_and_gradients((24, 8), (16,))
    whole = take_steps(make(parameters), parameters, gradients)
    parameters, _ = parameters_and_gradients((24, 8), (16,))
    first = make(parameters)
    take_steps(first, parameters, gradients[:3])
    second = make(parameters)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(take_steps(second, parameters, gradients[3:]), whole, atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_norms_are_left_to_adamw(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    arguments = RecurrentTrainingArguments(
        str(tmp_path), muon_learning_rate=0.02, learning_rate=0.003, weight_decay=0.1, report_to="none", use_cpu=True
    )
    trainer = RecurrentTrainer(model, arguments, train_dataset=[])
    optimizer = trainer.create_optimizer()
    group_of = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    for name, value in model.named_parameters():
        group = group_of.pop(id(value))
        is_embedding = "embed" in name or "lm_head" in name
        assert group["orthogonal"] == (value.ndim == 2 and not is_embedding), name
        assert group["lr"] == (0.02 if group["orthogonal"] else 0.003)
        assert group["weight_decay"] == (0.1 if value.ndim == 2 else 0.0)
    assert not group_of

    trainer.optimizer, trainer.is_fsdp_enabled = None, True
    with pytest.raises(ValueError, match=r"`muon_learning_rate`.*FSDP"):
        trainer.create_optimizer()


def test_a_run_with_muon_learns_and_resumes_bit_for_bit(tmp_path):
    write_texts(tmp_path)
    fields = {"muon_learning_rate": 0.02, "learning_rate": 1e-2, "max_steps": 30, "save_steps": 15, "warmup_steps": 2}
    whole = training.train.main(tiny_run(tmp_path, output_dir=tmp_path / "whole", **fields))
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    # As after a crash: the run starts again from the checkpoint in the middle.
    (tmp_path / "cut").mkdir()
    for name in ("checkpoint-15", "tokenizer", "blocks.json"):
        (tmp_path / "whole" / name).rename(tmp_path / "cut" / name)
    training.train.main([*tiny_run(tmp_path, output_dir=tmp_path / "cut", **fields), "--resume"])
    ends = [load_file(tmp_path / run / "model.safetensors") for run in ("whole", "cut")]
    torch.testing.assert_close(ends[1], ends[0], atol=0, rtol=0)
