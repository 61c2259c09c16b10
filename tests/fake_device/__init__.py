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

- device.cpp, device.py: torch's CUDA, made of host memory and host operators, which reports each call to it;
- torch_cuda.py: what ``torch.cuda`` lacks without a GPU: streams, graphs, whether a stream is being captured;
- triton_driver.py: kernels are compiled for sm_90 by Triton's own path; loads and launches are reported, none runs;
- record.py: what was reported, and what of it makes the host wait;
- process.py: the processes.

What it cannot show: time on a device, wrong orders of streams (operators run when they are called), what a kernel
computes (see Triton's interpreter), and what libcuda refuses, but for what :mod:`tests.fake_device.torch_cuda` refuses
while a graph is captured. Collectives are those of torch's "fake" process group, which moves nothing.
"""
