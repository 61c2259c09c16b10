"""The policy of rl_fp16.py, and the two ways to its log-probabilities: the inference engine's and the trainer's."""

import torch
from torch import nn
from torch.nn import functional

DIGITS, LENGTH, WIDTH, LAYERS = 10, 6, 32, 2


class Policy(nn.Module):
    """Tokens [batch, length] to logits [batch, length, DIGITS]. One head of attention in each layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens):
        """Return logits of the next token at every place."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unsqueeze(1).chunk(3, dim=-1)
            x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
            x = x + mlp(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(policy, prompts, generator):
    """The engine: one token after the other, keys and values in a cache. Return tokens and log-probs of responses."""
    tokens, logprobs, caches = prompts, [], [None] * LAYERS
    for place in range(2 * LENGTH - 1):
        x = policy.tokens(tokens[:, place]) + policy.places.weight[place]
        for layer, (qkv, mlp) in enumerate(zip(policy.qkv, policy.mlp, strict=True)):
            q, new = qkv(x).split((WIDTH, 2 * WIDTH), dim=-1)
            caches[layer] = new[:, None] if place == 0 else torch.cat((caches[layer], new[:, None]), dim=1)
            keys, values = caches[layer].chunk(2, dim=-1)
            weights = torch.softmax((keys @ (q * WIDTH**-0.5)[:, :, None]).squeeze(2), dim=1)
            x = x + (weights[:, None] @ values).squeeze(1)
            x = x + mlp(x)
        if place >= LENGTH - 1:
            logp = policy.head(policy.norm(x)).float().log_softmax(-1)
            chosen = torch.multinomial(logp.exp(), 1, generator=generator)
            tokens, logprobs = torch.cat((tokens, chosen), dim=1), [*logprobs, logp.gather(1, chosen)]
    return tokens, torch.cat(logprobs, dim=1)


def response_logprobs(policy, tokens):
    """The trainer: one forward over the whole sequence. Return log-probs [batch, LENGTH] in fp32."""
    logits = policy(tokens[:, :-1])[:, LENGTH - 1 :].float()
    return logits.log_softmax(-1).gather(2, tokens[:, LENGTH:, None]).squeeze(2)


def draw(number, generator, device):
    """Return prompts of shape [number, LENGTH]."""
    return torch.randint(DIGITS, (number, LENGTH), generator=generator, device=device)
