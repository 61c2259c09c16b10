"""Whole steps on a device that is not there: nobody waits for it, and launches do not grow with the tensors."""

from typing import Any

import pytest
import torch

from tests.fake_device.device import FakeDevice
from tests.fake_device.process import OnDevice
from tests.fake_device.record import Record
from tests.fake_device.training import CODES, INNER, give_grads, parameters, take_steps, wrap
from tests.training import grad_of

DECISION = ["total_kernel", "decide_kernel", "rescale_kernel"]
EACH_STEP = ["measure_kernel", *DECISION]
KINDS = [pytest.param(one, marks=() if one == "adamw" else pytest.mark.slow) for one in INNER]


def _train(
    device: FakeDevice, inner: str, dtype: torch.dtype = torch.float16, count: int = 6, moved: bool = False,
    **options: Any,
) -> list[Record]:  # fmt: skip
    """Return what construction asked of the device, and each of four steps."""
    params = parameters(count, dtype)
    with device.watch() as construction:
        optimizer = wrap(INNER[inner](params), **options)
    return [construction, *take_steps(device, optimizer, params, moved=moved)]


def _train_with(device: FakeDevice, inner: str, options: dict[str, Any]) -> list[Record]:
    return _train(device, inner, **options)


def _check(records: list[Record], launches: list[str]) -> None:
    """The host waits for nothing, at construction, at the first step, or later; but for the copy of a step before."""
    assert [seen.syncs() for seen in records] == [[]] * len(records)
    _, *steps = records
    assert [seen.launches() for seen in steps] == [launches] * len(steps)
    assert [seen.event_waits() for seen in steps[1:]] == [seen.of("record") for seen in steps[:-1]]
    assert steps[0].event_waits() == []


def _operators(dtype: torch.dtype) -> int:
    """Return how many of torch's operators a step has: one counts the step, one main params too large for fp16."""
    return 2 if dtype == torch.float16 else 1


@pytest.mark.parametrize("inner", KINDS)
def test_no_step_waits_for_the_device(on_device: OnDevice, inner: str) -> None:
    """Invariant 5: no host sync at construction or in any step, the first one too; five launches."""
    records = on_device(_train, inner)
    _check(records, [*EACH_STEP, "update_kernel"])
    assert all(seen.of("copy") == ["48 from async pinned"] for seen in records[2:])
    assert all(sum(seen.operators().values()) == 2 for seen in records[2:])
    assert {len(seen.of("launch", "operator", "copy")) for seen in records[2:]} == {8}


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
MOMENTS = {"exp_avg_dtype": BRAIN, "exp_avg_sq_dtype": BRAIN}
HELD: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    *((inner, BRAIN, {"store_param_remainders": True}) for inner in INNER),
    *((inner, FULL, {}) for inner in INNER),
    ("adamw", HALF, MOMENTS),
    ("adam_amsgrad", HALF, MOMENTS),
    ("lion", HALF, {"exp_avg_dtype": BRAIN}),
    ("adamw", HALF, {"log_num_zeros_in_grad": True}),
    ("adamw", FULL, CODES),
    ("adamw", HALF, CODES | {"store_param_remainders": True}),
]
"""How state is held, and what is counted."""


@pytest.mark.default("adamw-dtype23-*", "adamw-dtype0-*")
@pytest.mark.parametrize(("inner", "dtype", "options"), HELD)
def test_no_form_of_state_costs_a_launch(
    on_device: OnDevice, inner: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """bf16 parameters, and fp32 ones, which are their own main params; 16-bit and 8-bit moments, remainders, zeros: no
    wait, and the launches and operators of a step, whatever the number of tensors.
    """
    for count in (6, 60):
        records = on_device(_train_with, inner, {"count": count, "dtype": dtype} | options)
        _check(records, [*EACH_STEP, "update_kernel"])
        assert all(sum(seen.operators().values()) == _operators(dtype) for seen in records[2:])


def test_gradients_that_move(on_device: OnDevice) -> None:
    """The default ``zero_grad()`` lets gradients move: their addresses travel once, from pinned memory; no wait."""
    records = on_device(_train_with, "adamw", {"moved": True})
    _check(records, [*EACH_STEP, "update_kernel"])
    assert all(len(seen.of("copy")) == 2 for seen in records[2:])


@pytest.mark.parametrize("count", [10, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_launches_do_not_grow_with_tensors(on_device: OnDevice, count: int) -> None:
    """Invariant 8: launches, copies and operators of a step, and copies at construction, are constant."""
    records = on_device(_train_with, "adamw", {"count": count})
    _check(records, [*EACH_STEP, "update_kernel"])
    assert len(records[0].of("copy")) == 3  # the scaler's; state is made on the device
    assert [(len(seen.of("copy")), sum(seen.operators().values())) for seen in records[1:]] == [(7, 4)] + [(1, 2)] * 3


def _changing(device: FakeDevice) -> list[Record]:
    params = parameters(6)
    optimizer = wrap(INNER["adamw"](params))
    records = []
    for step in range(4):
        give_grads(params)
        params[step].grad = None
        with device.watch() as seen:
            optimizer.step()
        records.append(seen)
    return records


def test_a_set_of_gradients_that_changes(on_device: OnDevice) -> None:
    """Of what is missing the addresses travel, once for both passes, and nothing else: one copy, and nobody waits."""
    records = on_device(_changing)
    assert [seen.syncs() for seen in records] == [[]] * 4
    assert [seen.launches() for seen in records] == [[*EACH_STEP, "update_kernel"]] * 4
    assert [len(seen.of("copy")) for seen in records[2:]] == [2, 2]


def _beside_the_current_device(device: FakeDevice) -> list[Record]:
    params = parameters(6, device="cuda:1")
    return take_steps(device, wrap(INNER["adamw"](params)), params)


def test_a_step_beside_the_current_device(on_device: OnDevice) -> None:
    """Of parameters on the second device, while the first one is current: the events that the host waits for later are
    recorded where the copies before them are queued, on the second one's stream.
    """
    records = on_device(_beside_the_current_device)
    queued = [call for seen in records for call in seen if call.kind in ("operator", "launch", "copy", "record")]
    assert {call.kind for call in queued} == {"operator", "launch", "copy", "record"}
    assert {call.stream for call in queued} == {(1, 0)}
    assert [seen.unawaited() for seen in records] == [[]] * 4


def _on_several_devices(device: FakeDevice, devices: list[str], backend: str) -> list[Record]:
    params = [param for where in devices for param in parameters(2, device=where)]
    optimizer = wrap(INNER["adamw"](params), backend=backend)
    return take_steps(device, optimizer, params)


def test_parameters_on_two_devices(on_device: OnDevice) -> None:
    """Statistics of both come together on the first one, in the order of the parameters: the host waits for neither."""
    records = on_device(_on_several_devices, ["cuda:0", "cuda:1", "cuda:0"], "triton")
    assert [seen.syncs() for seen in records] == [[]] * 4


def _overflow_on_several_devices(device: FakeDevice) -> list[list[str]]:
    params = [param for where in ("cuda:0", "cuda:1", "cuda:0") for param in parameters(2, device=where)]
    optimizer = wrap(INNER["adamw"](params), backend="torch")
    found = []
    for index in range(6):
        give_grads(params)
        for missing in (2, 3) if index == 0 else (index - 1,):
            params[missing].grad = None
        grad_of(params[index])[3] = torch.inf
        optimizer.step()
        report = optimizer.last_overflow()
        assert report is not None
        found.append([entry.parameter for entry in report.entries])
    return found


def test_statistics_of_two_devices_keep_their_order(on_device: OnDevice) -> None:
    """The gradient that overflows is the one that is named, wherever it lies, and whichever are missing: also all of
    one device.
    """
    assert on_device(_overflow_on_several_devices) == [[str(index)] for index in range(6)]


@pytest.mark.parametrize("devices", [["cpu", "cuda"], ["cuda", "cpu"]])
def test_parameters_on_the_host_too(on_device: OnDevice, devices: list[str]) -> None:
    """What comes from a device to the host is waited for: read at once, it would not have arrived."""
    records = on_device(_on_several_devices, devices, "torch")
    assert [seen.unawaited() for seen in records] == [[]] * 4
    assert all(seen.syncs() for seen in records)


def _general(device: FakeDevice) -> list[Record]:
    params = parameters(6)
    return take_steps(device, wrap(torch.optim.Adamax(params, lr=1e-3, foreach=True, capturable=True)), params)


def test_another_optimizer_costs_one_host_read(on_device: OnDevice) -> None:
    """As documented: `found_inf` is read once a step by an optimizer that runs its own ``step()``."""
    records = on_device(_general)
    assert all(len(seen.of("scalar")) == 1 and len(seen.syncs()) == 1 for seen in records[1:])


def _looked_up() -> list[str]:
    """Return a list of the kernels whose code Triton looks up from now on, in this process."""
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    run = JITFunction.run

    def look_up(kernel: Any, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **options)

    JITFunction.run = look_up
    return names


def _launches_through_triton(device: FakeDevice) -> list[tuple[int, int]]:
    """Return, for each of four steps, how many launches there were and how many of them Triton looked up."""
    looked_up = _looked_up()
    params = parameters(6)
    optimizer = wrap(INNER["adamw"](params))
    found = []
    for _ in range(4):
        looked_up.clear()
        [seen] = take_steps(device, optimizer, params, 1, moved=True)
        found.append((len(seen.launches()), len(looked_up)))
    return found


def test_triton_looks_up_each_kind_of_launch_once(on_device: OnDevice) -> None:
    """From the second step on the host launches code that it holds."""
    assert on_device(_launches_through_triton) == [(5, 5), (5, 0), (5, 0), (5, 0)]


def _code_for_kinds(device: FakeDevice) -> list[str]:
    """Return the kernels that Triton looks up for two optimizers, whose rates differ in dtype."""
    looked_up = _looked_up()
    for rate in (1e-3, torch.full((), 1e-3, device="cuda")):
        params = parameters(6)
        take_steps(device, wrap(torch.optim.AdamW(params, lr=rate, capturable=True)), params, 2)
    return looked_up


def test_a_rate_of_another_dtype_has_code_of_its_own(on_device: OnDevice) -> None:
    """A learning rate that is an fp32 tensor is not read as the fp64 that a number becomes."""
    assert on_device(_code_for_kinds).count("update_kernel") == 2


def _specialised(device: FakeDevice) -> list[tuple[str, str]]:
    """Return the arguments by whose value or address Triton would choose among pieces of code."""
    from triton.runtime.jit import JITFunction

    from megascale.kernels.triton import decision as triton_decision
    from megascale.kernels.triton import kernels as triton_kernels

    found = []
    for module in (triton_kernels, triton_decision):
        for kernel in vars(module).values():
            if not isinstance(kernel, JITFunction) or not kernel.__name__.endswith("_kernel"):
                continue
            found += [
                (kernel.__name__, one.name) for one in kernel.params if not (one.is_constexpr or one.do_not_specialize)
            ]
    return sorted(set(found))


def test_code_depends_on_no_address_and_no_whole_number(on_device: OnDevice) -> None:
    """Held code serves tensors at any address: what is not named in ``do_not_specialize`` is a float."""
    floats = {
        "update_kernel": "beta1 rest1 beta2 rest2 log_beta1 log_beta2 eps",
        "decide_kernel": "clip_grad epsilon most_norm",
        "rescale_kernel": "min_scale max_scale growth_factor backoff_factor",
    }
    assert on_device(_specialised) == sorted(
        (kernel, name) for kernel, names in floats.items() for name in names.split()
    )


def _of_groups(device: FakeDevice, changes: dict[int, dict[str, Any]], is_scheduled: bool) -> list[Record]:
    """Return four steps of twelve param groups. ``changes``: of their options, by the group's index."""
    params = parameters(24)
    groups = [{"params": params[2 * at : 2 * at + 2], "lr": 1e-3 / (at + 1)} | changes.get(at, {}) for at in range(12)]
    optimizer = wrap(torch.optim.AdamW(groups))
    records = take_steps(device, optimizer, params)[:1]
    for step in range(3):
        for group in optimizer.param_groups if is_scheduled else ():
            group["lr"] = (step + 1) * 1e-4 * len(group["params"])
        records += take_steps(device, optimizer, params, 1)
    return records


def test_param_groups_share_a_launch(on_device: OnDevice) -> None:
    """Invariant 8: of other rates and weight decays, also none; rates of a schedule travel once for all groups."""
    decays = {0: {"weight_decay": 0.0}, 5: {"weight_decay": 0.5}}
    for is_scheduled in (False, True):
        records = on_device(_of_groups, decays, is_scheduled)
        assert [seen.syncs() for seen in records] == [[]] * 4
        assert [seen.launches() for seen in records] == [[*EACH_STEP, "update_kernel"]] * 4
        copies = [len(seen.of("copy")) for seen in records]
        assert [copies[1:], sum(records[-1].operators().values())] == [[3 if is_scheduled else 2] * 3, 2]


def test_param_groups_of_other_options_have_launches_of_their_own(on_device: OnDevice) -> None:
    """Neighbours share one still: those before and those behind a group whose betas are others."""
    records = on_device(_of_groups, {3: {"betas": (0.5, 0.9)}}, False)
    assert [seen.launches() for seen in records] == [[*EACH_STEP, *["update_kernel"] * 3]] * 4
    assert [len(seen.of("copy")) for seen in records[1:]] == [2] * 3  # parts are given the addresses of the whole


def _of_rates_on_the_device(device: FakeDevice) -> list[Record]:
    params = parameters(12)
    groups = [{"params": params[at : at + 2], "lr": torch.full((), 1e-3, device="cuda")} for at in range(0, 12, 2)]
    return take_steps(device, wrap(torch.optim.AdamW(groups, capturable=True)), params)


def test_rates_on_the_device_share_a_launch(on_device: OnDevice) -> None:
    """Tensors, which a graph's replays read too: one operator brings them together."""
    records = on_device(_of_rates_on_the_device)
    assert [seen.launches() for seen in records] == [[*EACH_STEP, "update_kernel"]] * 4
    assert [seen.operators()["aten::cat.out"] for seen in records] == [1] * 4
    assert [seen.syncs() for seen in records] == [[]] * 4
