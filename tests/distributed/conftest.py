"""Tests of ranks run on gloo, and again on the simulated device, by NCCL's rules: see tests/fake_device/ranks.py."""

from fnmatch import fnmatch
from zlib import crc32

import pytest

from tests.fake_device.simulated import SimulatedRanks
from tests.pool import RankPool

NOT_SIMULATED = {
    "tests/unit/fake_device/test_life.py has it, on devices of two ranks and of four": ("test_life.py*",),
    "runs what is compiled for the device, or kernels of the host": (
        "test_compiled_*.py*",
        "test_overflow_report.py*amp*native*",
        "test_overflow_report.py*triton*",
    ),
    "counts collectives where torch dispatches them, and sees none of a group that is a Python class": (
        "test_amp_grad_scaler.py::test_norm_of_dtensors_is_that_of_the_whole_tensors*",
        "test_amp_grad_scaler.py::test_several_meshes_agree*",
        "test_decision.py::test_one_collective_for_any_number_of_tensors*",
        "test_distributed_optimizer.py::test_collectives_do_not_grow_with_tensors*",
        "test_grad_sync.py::test_equals_ddp_bitwise*",
        "test_grad_sync.py::test_zero_ends_reductions_under_way*-[12]-[34]*",
        "test_muon_dtensors.py::test_bits_of_whole_matrices*",
        "test_owners.py::test_collectives_*",
        "test_parallel_groups_of_shards.py::test_a_chain_steps_like_one_optimizer*",
        "test_replicas.py::test_plain_model_on_several_ranks_is_refused*",
    ),
    "compares a divisor, which is a tensor of the device there: a host that does not wait cannot read it": (
        "test_one_rank_differs.py::*another divisor of shards-DistributedOptimizer*",
    ),
    "is about gloo's messages, or about tensors of the host": (
        "test_early_writes.py::test_a_write_after_weights_have_arrived_is_followed*the host-*fsdp2*",
        "test_checkpoint.py::test_a_group_of_some_ranks_does_not_disturb_the_next_of_all*",
        "test_fsdp2_layouts.py::test_cpu_offload_policy*",
        "test_grad_sync.py::test_lost_message_is_an_error_where_it_was_lost*",
        "test_grad_sync.py::test_messages_of_any_size_make_the_same_sum*",
        "test_owners.py::test_backends_by_device*",
        "test_remainders.py::test_a_move_keeps_remainders*",
        "test_sharded_checkpoint.py::test_peak_memory_stays_within_one_bucket*",
    ),
    "takes more than half an hour; its layouts and its forms are tables of their own, which run": (
        "test_checkpoint_table.py::test_every_run_loads_the_checkpoint_of_every_run*-all?",
    ),
    "asserts what a host without a device knows, or holds": (
        "test_sharded_training.py::test_unused_parameters_neither_hang_nor_poison*",
        "test_step_watch.py::test_collapse_ends_alike_on_all*",
    ),
    "torch.load puts storages on a device in a build with CUDA alone": (
        "test_module_copies.py*torch.save*",
        "test_sharded_checkpoint_variants.py::test_state_of_scalar_parameters_is_sharded*",
        "test_state_copies.py::test_each_rank_loads_its_own*",
    ),
    "the simulated device has no sparse tensors": (
        "test_assigned_grads.py*sparse*",
        "test_decision.py::test_outgrown_main_param_raises_on_every_rank*",
        "test_decision.py::test_two_errors_of_one_rank_are_an_error*",
        "test_decision.py::test_unusable_gradient_raises_on_every_rank*",
        "test_one_rank_differs.py::test_a_setting_is_named_after_a_step_that_failed*",
        "test_parallel_groups_of_shards.py::test_a_fault_in_one_part_is_heard_by_all*",
    ),
}
"""Why tests run on gloo alone, and which."""

ONE_STEP_LATE = {
    "test_a_late_host_names_the_setting_of_the_step_before",
    "test_difference_known_one_step_late_has_written_nothing",
    "test_only_what_one_rank_leaves_out_is_named",
}
"""Tests of a host that knows of errors one step late, as beside a device. The others assert that they come at once."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of ranks on both."""
    if "ranks" in metafunc.fixturenames:
        seed = crc32(metafunc.definition.nodeid.encode()) % 100
        how = seed, metafunc.function.__name__ not in ONE_STEP_LATE
        simulated = pytest.param(how, id=f"simulated-{seed}", marks=pytest.mark.slow)
        metafunc.parametrize("ranks", [pytest.param(None, id=pytest.HIDDEN_PARAM), simulated], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what does not run there. Of each file one test does in `.ci/run`, all in `.ci/release`."""
    files = set()
    for item in [item for item in items if getattr(getattr(item, "callspec", None), "params", {}).get("ranks")]:
        if any(fnmatch(item.nodeid, f"*/{pattern}") for patterns in NOT_SIMULATED.values() for pattern in patterns):
            items.remove(item)
        elif item.path in files:
            item.add_marker(pytest.mark.release)
        else:
            files.add(item.path)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, ranks: RankPool) -> RankPool:
    """Gloo ranks, or simulated ones, whose streams run in the order of a seed."""
    if request.param is None:
        return ranks
    return SimulatedRanks(request.getfixturevalue("on_device"), *request.param)
