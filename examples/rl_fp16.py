"""RL fine-tuning in bf16 and fp16: how far the trainer's log-probabilities are from those of the inference engine.

torchrun --standalone --nproc-per-node 2 examples/rl_fp16.py --seeds 3

A policy learns to reverse six digits. Its reward is the share of digits in the right place.
"""

import argparse
import os

import torch
import torch.distributed as dist
from rl_policy import LENGTH, Policy, draw, generate, response_logprobs
from torch.nn.parallel import DistributedDataParallel

from megascale import ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig

PRETRAIN_STEPS, PROMPTS, SAMPLES = 20, 8, 8  # prompts of a rank in a step, samples of each prompt


def pretrain(seed, device):
    """Return the weights of a policy that an fp32 loop has shown right answers, the same on all ranks."""
    torch.manual_seed(seed)
    policy, generator = Policy().to(device), torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(PRETRAIN_STEPS):
        prompts = draw(64, generator, device)
        optimizer.zero_grad()
        (-response_logprobs(policy, torch.cat((prompts, prompts.flip(1)), dim=1)).mean()).backward()
        optimizer.step()
    return policy.state_dict()


def finetune(policy, optimizer, generator, steps):
    """Return rewards [steps], log-prob gaps [steps, tokens] in fp64, and the zeros among the gradients of each step."""
    rewards, gaps, zeros = [], [], []
    for _ in range(steps):
        prompts = draw(PROMPTS, generator, generator.device).repeat_interleave(SAMPLES, dim=0)
        tokens, engine = generate(policy.module, prompts, generator)
        reward = (tokens[:, LENGTH:] == prompts.flip(1)).float().mean(1).view(PROMPTS, SAMPLES)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        trainer = response_logprobs(policy, tokens)
        optimizer.zero_grad()
        optimizer.scale_loss(-(advantage.view(-1, 1) * trainer).mean()).backward()
        zeros.append(optimizer.step().num_zeros_in_grad)
        gaps.append((trainer.detach().double() - engine.double()).flatten())
        rewards.append(reward.mean())
    return torch.stack(rewards), torch.stack(gaps), torch.stack(zeros)


def mean(x):
    """Return the mean over ranks of a tensor that has the same shape on each."""
    x = x.contiguous()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def run(name, dtype, scaler, seed, start, steps, device):
    """Fine-tune a policy from ``start`` and print one line about it."""
    policy = Policy().to(device, dtype)
    policy.load_state_dict(start)  # rounds
    model = DistributedDataParallel(policy)
    is_half = dtype == torch.float16
    config = OptimizerConfig(fp16=is_half, bf16=not is_half, clip_grad=1.0, log_num_zeros_in_grad=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3), config, scaler)
    generator = torch.Generator(device).manual_seed(1000 * seed + dist.get_rank())
    rewards, gaps, zeros = finetune(model, optimizer, generator, steps)
    ratio = gaps.expm1()  # importance ratio of a token, less 1
    gap, square, kl = mean(torch.stack((gaps.abs().mean(), ratio.square().mean(), (ratio - gaps).mean()))).tolist()
    quarters = " ".join(f"{q.mean().item():.3f}" for q in mean(rewards).chunk(4))
    share = zeros.mean().item() / sum(p.numel() for p in policy.parameters())
    row = f"{gap:.1e} | {square**0.5:.1e} | {kl:.1e} | {quarters} | {share:.2%} | {optimizer.num_skipped_steps}"
    if dist.get_rank() == 0:
        print(f"| {seed} | {name} | {row} |", flush=True)


def main():
    """Fine-tune each seed's policy three times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if dist.get_rank() == 0:
        print("| seed | run | mean gap | ratio's spread | KL | reward, each quarter | zeros | skipped |", flush=True)
    for seed in range(arguments.seeds):
        start = pretrain(seed, device)
        run("bf16", torch.bfloat16, None, seed, start, arguments.steps, device)
        run("fp16, dynamic scale", torch.float16, DynamicGradScaler(), seed, start, arguments.steps, device)
        run("fp16, scale 1", torch.float16, ConstantGradScaler(1.0), seed, start, arguments.steps, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
