"""Selects how main params in host memory are updated."""

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from megascale.config import StepConfig
from megascale.errors import ArgumentError
from megascale.kernels import host_backend
from megascale.main_params.grad_memory import GradMemory
from megascale.main_params.update_unit import UpdateUnit
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.rules import BY_KIND, MUON, Rule
from megascale.step.compute_choice import ComputeChoice
from megascale.step.host_own_step import HostOwnStep
from megascale.step.host_update import HostUpdate
from megascale.step.kernel_update import KernelUpdate
from megascale.step.streamed_update import StreamedUpdate
from megascale.step.update import InnerUpdate
from megascale.utils.wording import either

_WITH_KERNELS = [kind.__name__ for kind, one in BY_KIND.items() if one.kernel is not None]


def in_host_memory(
    optimizer: torch.optim.Optimizer,
    config: StepConfig,
    beside: InnerUpdate,
    device: torch.device,
    arrivals: WeightArrivals,
    group: ProcessGroup | None,
    units: Callable[[], list[UpdateUnit]],
) -> InnerUpdate:
    """Return what updates parameters with a twin in host memory there, and others as ``beside`` does.

    Args:
        device: of the model params.
        arrivals: runs updates in a thread and sends their weights.
        group: the ranks that step together, and choose together who computes.
        units: a method that returns all units in the order of their updates, which is not kept alive.

    Raises ArgumentError for an optimizer that cannot run there, or not in a thread.
    """
    rule, name = BY_KIND.get(type(optimizer)), type(optimizer).__name__
    if rule is MUON:
        raise ArgumentError(
            f"optimizer_cpu_offload=True moves nothing of {name}, whose matrices a host orthogonalizes too slowly; "
            "leave it False for it: build_optimizer() with optimizer='muon' moves what other parameters have"
        )
    limit = config.optimizer_offload_grad_bytes
    memory = GradMemory(pin=config.pin_cpu_grads, limit=limit, units=units)
    if rule is not None and isinstance(beside, KernelUpdate):
        return _by_kernels(optimizer, config, rule, beside, device, arrivals, group, memory)
    if limit is not None:
        raise ArgumentError(
            f"optimizer_offload_grad_bytes={limit} needs {either(_WITH_KERNELS)}: the own step() of {name} reads all "
            "gradients at once; leave it None"
        )
    if config.optimizer_offload_compute == "device":
        raise ArgumentError(
            f"optimizer_offload_compute='device' needs {either(_WITH_KERNELS)}, got {name}, whose own step() runs "
            "where main params are; take optimizer_offload_compute='host'"
        )
    if config.overlap_cpu_optimizer_d2h_h2d:
        raise ArgumentError(
            f"overlap_cpu_optimizer_d2h_h2d=True needs {either(_WITH_KERNELS)}: the own step() of {name} reads "
            "param_groups, which a thread must not change under the caller; leave it False"
        )
    for index, options in enumerate(optimizer.param_groups):
        if options.get("capturable"):
            raise ArgumentError(
                f"param group {index} has capturable=True, which {name} refuses for parameters in host memory; set it "
                "False with optimizer_cpu_offload=True"
            )
    return HostOwnStep(optimizer, beside, device, memory)


def _by_kernels(
    optimizer: torch.optim.Optimizer,
    config: StepConfig,
    rule: Rule,
    beside: KernelUpdate,
    device: torch.device,
    arrivals: WeightArrivals,
    group: ProcessGroup | None,
    memory: GradMemory,
) -> InnerUpdate:
    """Return the update of a rule that has kernels: by the host, the device, or by each in turn until one is chosen."""
    compute = config.optimizer_offload_compute
    is_decoded = config.store_param_remainders and not beside.fuses_remainders
    if compute == "device" and is_decoded:
        raise ArgumentError(
            "optimizer_offload_compute='device' with store_param_remainders=True needs backend 'triton' or 'native', "
            f"got {beside.backend.name!r}; take optimizer_offload_compute='host'"
        )
    ways: dict[str, HostUpdate] = {}
    if compute != "device":
        ways["host"] = HostUpdate(optimizer, config, rule, beside, device, arrivals, host_backend(), memory)
    if compute != "host" and not is_decoded:
        ways["device"] = StreamedUpdate(optimizer, config, rule, beside, device, arrivals, beside.backend, memory)
    return ComputeChoice(ways, device, group) if len(ways) > 1 else next(iter(ways.values()))
