"""Optimizers of torch that have no rule: they run their own ``step()``, of which this says what it reads."""

import torch

from megascale.rules.rule import OwnStep

TORCH_STEPS: dict[type[torch.optim.Optimizer], OwnStep] = {
    torch.optim.Adadelta: OwnStep(("step", "square_avg", "acc_delta")),
    torch.optim.Adafactor: OwnStep(
        ("step",),
        of_matrices=("row_var", "col_var"),
        of_others=("variance",),
        no_tensors=("d",),
        is_elementwise=False,
        loops_by_itself=True,
    ),
    torch.optim.Adagrad: OwnStep(("step", "sum")),
    torch.optim.Adamax: OwnStep(("step", "exp_avg", "exp_inf"), no_tensors=("betas",)),
    torch.optim.ASGD: OwnStep(("step", "eta", "mu", "ax"), computes_with_counts=True),
    torch.optim.NAdam: OwnStep(("step", "exp_avg", "exp_avg_sq", "mu_product"), no_tensors=("betas", "momentum_decay")),
    torch.optim.RAdam: OwnStep(("step", "exp_avg", "exp_avg_sq"), no_tensors=("betas",)),
    torch.optim.RMSprop: OwnStep(
        ("step", "square_avg"),
        switched={
            "momentum_buffer": lambda options: options["momentum"] > 0,
            "grad_avg": lambda options: bool(options["centered"]),
        },
    ),
    torch.optim.Rprop: OwnStep(("step", "prev", "step_size")),
}
