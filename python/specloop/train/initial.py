"""Where training begins: as much as possible of a draft is taken from its target."""

from __future__ import annotations

import torch

import specdec_kernels as sk

from .networks import FeatureHead, Standalone, feature_config, standalone_config

NOISE = 0.02  # of what begins at random


def dense(weight):
    """A matrix of a model in float32, whatever it is held in."""
    return weight.dequantize() if isinstance(weight, sk.Int8Weight) else weight.float()


def rows_of(weight, ids):
    """Some of its rows."""
    return weight.rows(ids.to(weight.device)) if isinstance(weight, sk.Int8Weight) else weight[ids].float()


@torch.no_grad()
def feature_head(target, draft_ids, *, positions, seed=0, compute=torch.float32):
    """A head whose layer begins as the target's last one; with fc = [0 | I] and a little noise until :func:`fit`."""
    config, weights = feature_config(target.config), target.weights
    draft = FeatureHead(config, draft_ids, dense(weights.embedding), positions=positions, compute=compute)
    noise = torch.Generator().manual_seed(seed)
    (layer,), last, d = draft.layers, weights.layers[-1], config.hidden
    for name, parameter in layer.named_parameters():
        parameter.copy_(dense(getattr(last, name)))
    draft.fc.copy_(torch.randn(d, 2 * d, generator=noise) * NOISE * d**-0.5)
    draft.fc[:, d:] += torch.eye(d)
    draft.norm.copy_(weights.norm)
    draft.head.copy_(rows_of(weights.head, draft.draft_ids))
    return draft


@torch.no_grad()
def fit(draft, texts, batch_of, *, seed=0, ridge=1e-2):
    """Lets a feature head begin as the best linear guess of the next feature from the id and the feature before.

    fc solves least squares, with a ridge of so much of the mean square, for the direction of the target's features in
    front of the final norm's weights; and the layer begins at random and adds nothing. On SmolLM2-135M this accepts
    0.28 before any training, where fc = [0 | I] below the target's last layer accepts 0.01. That layer was made for
    another place: its activations have outliers of forty times their size here, which upset the first steps (after 24
    of 512 rows at a rate of 0.001 held-out text was accepted with 0.18, from a layer at random with 0.23).
    ``batch_of(text)``: a Batch of one.
    """
    d, device = draft.config.hidden, draft.fc.device
    square, product = torch.zeros(2 * d, 2 * d, device=device), torch.zeros(2 * d, d, device=device)
    weight = torch.where(draft.norm.abs() < 1e-3, 1e-3, draft.norm)
    for text in texts:
        batch = batch_of(text)
        embedded = draft.normed(draft.target_embedding[batch.ids[batch.starts]], draft.embedding_norm)
        x = torch.cat([embedded, batch.before[batch.starts]], 1)
        y = batch.teacher.features[:, :d].float() / weight
        y = y * y.square().mean(1, keepdim=True).clamp(min=1e-12).rsqrt()
        square.addmm_(x.T, x)
        product.addmm_(x.T, y)
    square.diagonal().add_(ridge * square.diagonal().mean() + 1e-12)
    draft.fc.copy_(torch.linalg.solve(square.double(), product.double()).T)
    noise = torch.Generator().manual_seed(seed)
    for layer in draft.layers:
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            elif name in ("attention_out", "down"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * parameter.shape[1] ** -0.5)


@torch.no_grad()
def standalone(target, draft_ids, parameters, *, positions, seed=0, compute=torch.float32):
    """A model whose embedding and head are the target's in their principal directions; its layers are random."""
    config = standalone_config(target.config, parameters, len(draft_ids))
    draft = Standalone(config, draft_ids, positions=positions, compute=compute)
    noise = torch.Generator().manual_seed(seed)
    depth = (2 * config.layers) ** -0.5
    for layer in draft.layers:
        for name in ("qkv", "attention_out", "gate_up", "down"):
            matrix = getattr(layer, name)
            matrix.copy_(torch.randn(matrix.shape, generator=noise) * matrix.shape[1] ** -0.5)
        layer.attention_out.mul_(depth)
        layer.down.mul_(depth)
    embedding, ids = dense(target.weights.embedding), draft.draft_ids
    draft.embedding.copy_(projected(embedding, config.hidden))
    head = embedding[ids] if target.config.tied else rows_of(target.weights.head, ids)
    head = projected(head, config.hidden)
    draft.head.copy_(head * config.hidden**-0.5)
    return draft


def projected(matrix, width):
    """Its rows in the ``width`` directions in which they vary most, entries of size 1 on average."""
    _, directions = torch.linalg.eigh((matrix.T @ matrix).double())
    made = matrix @ directions[:, -width:].float() if width <= matrix.shape[1] else None
    if made is None:  # wider than the target: the rest stays empty
        made = torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))
    return made / made.square().mean().sqrt()
