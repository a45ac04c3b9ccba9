"""The transformer once more: float64 numpy, head by head, layer by layer."""

from typing import NamedTuple

import numpy as np


class Output(NamedTuple):
  logits: np.ndarray
  l1: np.ndarray
  active: np.ndarray
  fired: np.ndarray


def transformer(params, tokens, config):
  params = _as_float64(params)
  x = params["embedding"][tokens]
  l1, active, fired = [], [], []
  for layer in range(config.num_layers):
    weights = _layer(params["layers"], layer)
    normed = rms_norm(
      x, weights["attention_norm"]["scale"], eps=config.norm_eps
    )
    x = x + attention(normed, weights["attention"], theta=config.rope_theta)
    normed = rms_norm(x, weights["ffn_norm"]["scale"], eps=config.norm_eps)
    h = activations(normed, weights["ffn"], config.activation)
    x = x + h @ weights["ffn"]["down"]
    l1.append(np.abs(h).sum(-1).mean())
    active.append((h != 0).sum(-1))
    fired.append((h != 0).sum((0, 1)))
  x = rms_norm(x, params["final_norm"]["scale"], eps=config.norm_eps)
  head = params.get("head", params["embedding"])
  return Output(x @ head.T, np.array(l1), np.array(active), np.array(fired))


def rms_norm(x, scale, *, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def activations(x, weights, activation):
  gate = x @ weights["gate"].T
  if activation == "relu":
    h = np.maximum(gate, 0)
  else:
    h = gate / (1 + np.exp(-gate))
  return h * (x @ weights["up"].T) if "up" in weights else h


def attention(x, weights, *, theta):
  batch, seq, _ = x.shape
  _, heads, _ = weights["query"].shape
  per_group = heads // weights["key"].shape[1]
  y = np.zeros_like(x)
  for b in range(batch):
    for head in range(heads):
      group = head // per_group
      query = rotate(x[b] @ weights["query"][:, head], theta=theta)
      key = rotate(x[b] @ weights["key"][:, group], theta=theta)
      value = x[b] @ weights["value"][:, group]
      for t in range(seq):
        scores = key[: t + 1] @ query[t] / np.sqrt(query.shape[-1])
        mix = np.exp(scores - scores.max())
        y[b, t] += (mix / mix.sum()) @ value[: t + 1] @ weights["out"][head]
  return y


def rotate(x, *, theta):
  """Turns component i and i + half, as a complex number, by its angle."""
  seq, head_dim = x.shape
  half = head_dim // 2
  rate = theta ** (-2.0 * np.arange(half) / head_dim)
  turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
    1j * np.arange(seq)[:, None] * rate
  )
  return np.concatenate([turned.real, turned.imag], -1)


def _as_float64(tree):
  if isinstance(tree, dict):
    return {name: _as_float64(value) for name, value in tree.items()}
  return np.asarray(tree, np.float64)


def _layer(tree, index):
  if isinstance(tree, dict):
    return {name: _layer(value, index) for name, value in tree.items()}
  return tree[index]
