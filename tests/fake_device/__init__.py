"""A CUDA device that is not there: tests ask it who makes the host wait, and what the host launches.

    def steps(device: FakeDevice, kind: str) -> list[list[str]]:       # module level: it travels by name
        optimizer = ...                                                # parameters on "cuda"
        with device.watch() as seen:
            optimizer.step()
        return seen.syncs()

    def test_no_sync(on_device: OnDevice) -> None:                     # the fixture: tests/conftest.py
        assert on_device(steps, "adamw") == []

Each call runs in a process of its own, forked from one that has torch, the device and Triton's driver ready. It needs
no certain build of torch: one with CUDA does what one without does, and counts are the same. The parts:

- device.cpp, device.py: torch's CUDA, made of host operators, which reports each call to it;
- report.h, host_call.h, memory.h: its parts: who is told of calls, how the host runs an operator, memory, whose
  addresses the host can neither read nor write: host code that is handed one dies by SIGSEGV;
- late_streams.h: ``with device.running("late")``, "side first" or "random", streams do their work when something that
  is waited for forces it, or when events let them: a missing wait gives wrong values. Memory that is freed is
  overwritten when its stream may give it to others. ``device.without(line)`` leaves one wait of megascale out;
- torch_cuda.py: what ``torch.cuda`` lacks without a GPU: streams, graphs, whether a stream is being captured;
- triton_driver.py: kernels are compiled for sm_90 by Triton's own path; loads and launches are reported, none runs;
- record.py: what was reported, and what of it makes the host wait;
- process.py: the processes;
- ranks.py: ``on_device.ranks(2, function)`` calls ``function(device)`` on each of two ranks, in processes of their own,
  whose collectives travel, end on streams, and keep NCCL's rules: a missing wait gives wrong values, a call that other
  ranks do not make alike is an error.

What it cannot show: time on a device, what a kernel of Triton computes (see Triton's interpreter; the "reference"
backend is made of operators, which run), and what libcuda refuses, but for what :mod:`tests.fake_device.torch_cuda`
refuses while a graph is captured. Calls in a step of many ranks are counted with torch's "fake" process group, which
moves nothing.
"""
