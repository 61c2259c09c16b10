"""Lets Megatron-Core's optimizer run on a CPU.

It names "cuda" throughout. With :func:`install` those literals are read as "cpu" while its modules are imported;
nothing else of it is changed.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

MODULES = ("megatron.core.optimizer", "megatron.core.distributed.param_and_grad_buffer", "megatron.core.utils")
CPU_WORDS = {
    b".cuda(torch.cuda.current_device())": b".cpu()",
    b"torch.cuda.current_device()": b"torch.device('cpu')",
    b"torch.cuda.current_stream()": b"torch.cpu.current_stream()",
    b"device='cuda'": b"device='cpu'",
    b'device="cuda"': b'device="cpu"',
    b"'torch.cuda.HalfTensor'": b"'torch.HalfTensor'",
    b"'torch.cuda.BFloat16Tensor'": b"'torch.BFloat16Tensor'",
    b"'torch.cuda.FloatTensor'": b"'torch.FloatTensor'",
}


class _CpuLoader(importlib.machinery.SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        for cuda, cpu in CPU_WORDS.items():
            data = data.replace(cuda, cpu)
        return data

    def get_code(self, fullname: str) -> CodeType:
        # Compiled files of the unchanged source must be neither read nor written.
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _CpuFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(MODULES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Answer "cuda" with "cpu" in Megatron-Core modules imported from now on. Again: nothing happens.

    Raises:
        RuntimeError: they are imported already.
    """
    if any(isinstance(finder, _CpuFinder) for finder in sys.meta_path):
        return
    if early := [name for name in MODULES if name in sys.modules]:
        raise RuntimeError(f"{', '.join(early)} is imported already, for a GPU; call install() first")
    sys.meta_path.insert(0, _CpuFinder())
