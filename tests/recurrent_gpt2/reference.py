"""The model once more, straight from the equations: one sequence, plain matrices, no cache, no shared code."""

import math

import torch


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(x, weights, heads):
    length, width = x.shape
    head_dim = width // heads
    query, key, value = (x @ weights["attention.qkv_proj.weight"].T).split(width, dim=1)
    outputs = []
    for head in range(heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        rows = []
        for t in range(length):
            scores = key[: t + 1, columns] @ query[t, columns] / math.sqrt(head_dim)
            rows.append(scores.softmax(0) @ value[: t + 1, columns])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1) @ weights["attention.o_proj.weight"].T


def block(x, weights, config):
    eps = config.rms_norm_eps
    n1, n2 = weights["attention_input_norm.weight"], weights["attention_output_norm.weight"]
    n3, n4 = weights["mlp_input_norm.weight"], weights["mlp_output_norm.weight"]
    a = norm(x + attention(norm(x, n1, eps), weights, config.num_attention_heads), n2, eps)
    hidden = norm(a, n3, eps) @ weights["mlp.up_proj.weight"].T
    hidden = hidden * torch.sigmoid(hidden)
    return norm(a + hidden @ weights["mlp.down_proj.weight"].T, n4, eps)


def logits_of(ids, weights, config, num_loops, start_states, backprop_loops=None):
    """Logits [length, vocab] of a sequence, given s(0) of every group; `weights` is the model's state dict."""

    def of_layer(index):
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    embeddings = weights["model.embed_tokens.weight"]
    x = (embeddings[ids] + weights["model.embed_positions.weight"][: len(ids)]) * math.sqrt(config.hidden_size)
    layer = 0
    while layer < config.num_hidden_layers:
        group = next((g for g, layers in enumerate(config.loop_groups) if layers[0] == layer), None)
        if group is None:
            x = block(x, of_layer(layer), config)
            layer += 1
            continue
        parts = [weights[f"model.loop_inputs.{group}.{half}.weight"] for half in ("state_proj", "input_proj")]
        projection = torch.cat(parts, dim=1)  # A_g, d x 2d
        e, state = x, start_states[group]
        for k in range(num_loops[group]):
            if backprop_loops is not None and k == num_loops[group] - backprop_loops:
                state = state.detach()
            state = torch.cat([state, e], dim=1) @ projection.T
            for index in config.loop_groups[group]:
                state = block(state, of_layer(index), config)
        x = state
        layer += len(config.loop_groups[group])
    return norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ embeddings.T
