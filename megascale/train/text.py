"""The task ``text``: a small byte-level GPT on the documentation that ships with Python (``pydoc_data.topics``)."""

import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from megascale.errors import ArgumentError
from megascale.train.config import TextConfig
from megascale.train.half import Linear
from megascale.train.tasks import Batch

VOCABULARY = 256
HELDOUT_FRACTION = 0.1


class TextTask:
    """Predict the next byte. The last tenth of the text is held out."""

    def __init__(self, config: TextConfig, seed: int) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        split = int(len(text) * (1 - HELDOUT_FRACTION))
        self._train = torch.frombuffer(bytearray(text[:split]), dtype=torch.uint8)
        self._heldout = torch.frombuffer(bytearray(text[split:]), dtype=torch.uint8)
        self._config = config
        self._seed = seed
        if config.width % config.heads:
            raise ArgumentError(f"text.width={config.width} must be a multiple of text.heads={config.heads}")
        longest = len(self._heldout) - 1
        if config.context > longest:
            raise ArgumentError(
                f"text.context={config.context} is longer than the held-out text; take {longest} or less"
            )
        self.num_heldout = min(config.heldout_windows, (len(self._heldout) - 1) // config.context)

    def model(self) -> nn.Module:
        """Return the GPT."""
        return Gpt(self._config)

    def batch(self, step: int, first: int, last: int) -> Batch:
        """Return windows at positions drawn from (seed, step), independent of ``first`` and ``last``."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        starts = torch.randint(len(self._train) - self._config.context, (last,), generator=generator)
        return self._windows(self._train, starts[first:])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return functional.cross_entropy(logits, targets)

    def heldout(self, first: int, last: int) -> Batch:
        """Return windows spread evenly over the held-out text."""
        stride = (len(self._heldout) - 1 - self._config.context) // max(1, self.num_heldout - 1)
        return self._windows(self._heldout, torch.arange(first, last) * stride)

    def told(self, accuracy: float, loss: float) -> str:
        """Return bits per byte, and the share of next bytes that were right."""
        return f"held-out text: {loss / math.log(2):.4f} bits per byte, {accuracy:.1%} of next bytes right"

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self._config.context + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


class Gpt(nn.Module):
    """A pre-norm transformer: bytes of shape [batch, context] to logits [batch, 256, context]."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte at every position."""
        x: Tensor = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.transpose(1, 2)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.attention_out = Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = Linear(config.width, 4 * config.width)
        self.mlp_out = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, context, width] to the same shape."""
        batch, context, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).view(
            batch, context, 3, self.heads, width // self.heads
        )
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        hidden: Tensor = self.mlp_in(self.mlp_norm(x))
        return x + self.mlp_out(functional.gelu(hidden))
