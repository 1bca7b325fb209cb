"""One pass with fixed loops leaves PyTorch: `torch.export`, ONNX; and decoding with a static cache compiles."""

import pytest
import torch
from torch.export import Dim, export
from transformers import pipeline

from tests.helpers import random_ids, tiny_model

LOOPS = [2, 3]
SIZES = {"num_hidden_layers": 4, "loop_groups": [[1], [2]]}
SHAPES = ((2, 9), (1, 20), (5, 3))


class OnePass(torch.nn.Module):
    """Token ids to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, num_loops=LOOPS, use_cache=False).logits


@pytest.fixture(scope="module")
def exported():
    model = tiny_model(std=0.08, **SIZES)
    sizes = {"input_ids": {0: Dim("batch", max=64), 1: Dim("length", max=48)}}
    with torch.no_grad():
        return model, export(OnePass(model), (random_ids(2, 9),), dynamic_shapes=sizes, strict=False)


def test_an_exported_pass_takes_any_batch_and_length(exported):
    model, program = exported
    for shape in SHAPES:
        ids = random_ids(*shape)
        torch.testing.assert_close(program.module()(ids), model(ids, num_loops=LOOPS).logits)


def test_an_exported_pass_holds_the_weights_and_no_room_of_a_cache(exported):
    model, program = exported
    known = {tuple(tensor.shape) for tensor in [*model.parameters(), *model.buffers()]}
    tensors = [*program.state_dict.values(), *program.constants.values()]
    assert {tuple(tensor.shape) for tensor in tensors if tensor.numel() > 1} <= known
    assert not [node for node in program.graph.nodes if "empty" in str(node.target)]


@pytest.mark.slow
def test_onnx_gives_the_same_logits(exported, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, program = exported
    torch.onnx.export(program, dynamo=True).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in SHAPES:
        ids = random_ids(*shape)
        (logits,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.tensor(logits), model(ids, num_loops=LOOPS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_decoding_with_a_static_cache_compiles_once_and_gives_the_same_tokens():
    model, ids = tiny_model(std=0.08, **SIZES), random_ids(1, 5)
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "num_loops": LOOPS}
    expected = [model.generate(ids, **arguments), model.generate(ids + 1, **arguments)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, fullgraph=True)
    for shift, tokens in enumerate(expected):
        assert torch.equal(model.generate(ids + shift, cache_implementation="static", **arguments), tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # the prompt, the first token, the rest


def test_a_pipeline_of_eight_texts_gives_what_each_gives_alone(tokenizer):
    model = tiny_model(std=0.08, **SIZES)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["abcdefgh"[:length] for length in (1, 2, 3, 5, 8, 4, 7, 6)]
    policy = {"exit_policy": {"name": "kl", "threshold": 0.2}, "max_new_tokens": 6, "do_sample": False}
    assert generate(texts, batch_size=8, **policy) == [generate(text, **policy) for text in texts]
