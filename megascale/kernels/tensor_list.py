"""Lists of tensors whose addresses and types are looked up once: for many small tensors, looking is what costs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels import tensor_reader
from megascale.kernels.tensor_reader import Facts, Memory

# Called for every tensor at every step, in loops that run in C.
_DTYPE = attrgetter("dtype")
_DEVICE = attrgetter("device")
_LAYOUT = attrgetter("layout")
_GRAD = attrgetter("grad")
_LOOK: dict[str, Callable[[Tensor], int]] = {
    "versions": attrgetter("_version"),
    "pointers": Tensor.data_ptr,
    "numels": Tensor.numel,
    "requires_grad": attrgetter("requires_grad"),
}


class TensorList(Sequence[Tensor]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    What is looked up is kept, so that passes after the first cost nothing per tensor. Of thousands of tensors all is
    looked up at once, see :mod:`megascale.kernels.tensor_reader`; else attribute by attribute, when it is asked for.

    Args:
        tensors: a list is used as it is, not copied.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._given = tensors if isinstance(tensors, list) else list(tensors)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one."""
        return tensors if isinstance(tensors, TensorList) else cls(tensors)

    @classmethod
    def joined(cls, parts: Sequence["TensorList"]) -> "TensorList":
        """Return one list of several. What is looked up in it is known to its parts."""
        return parts[0] if len(parts) == 1 else _Joined(parts)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors themselves."""
        return self._given

    def hold(self) -> None:
        """Keep the tensors alive, whoever else lets go of them."""

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """How often torch has written each, shape [len(self)]."""
        return self._looked_up("versions") if self._facts is None else self._facts.versions

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return self._looked_up("pointers") if self._memory is None else self._memory.pointers

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        """Elements of each, shape [len(self)]."""
        return self._looked_up("numels") if self._memory is None else self._memory.numels

    @cached_property
    def requires_grad(self) -> NDArray[np.int64]:
        """1 where a tensor requires grad, else 0, shape [len(self)]."""
        return self._looked_up("requires_grad") if self._facts is None else self._facts.requires_grad

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes there are."""
        return set(map(_DTYPE, self._examples))

    @cached_property
    def devices(self) -> set[torch.device]:
        """Where they are."""
        return set(map(_DEVICE, self._examples))

    @cached_property
    def contiguous(self) -> bool:
        """Whether all of them are contiguous."""
        return all(map(Tensor.is_contiguous, self._examples))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        """Return the code of each one's dtype, shape [len(self)]."""
        if self._kinds is None:
            return np.array([codes[dtype] for dtype in map(_DTYPE, self)], dtype=np.int64)
        found = np.empty(len(self), dtype=np.int64)
        for example, members in self._kinds:
            found[members] = codes[example.dtype]
        return found

    @cached_property
    def _facts(self) -> Facts | None:
        """What was read in one walk."""
        return tensor_reader.read(self._given)

    @property
    def _memory(self) -> Memory | None:
        """What was read of where they lie."""
        return None if self._facts is None else self._facts.memory

    @cached_property
    def _kinds(self) -> list[tuple[Tensor, NDArray[np.bool_]]] | None:
        """One tensor of each kind, and who is of that kind, where all were read in one walk."""
        if self._memory is None:
            return None
        kinds, found = self._memory.kinds, []
        rest = np.ones(len(kinds), dtype=np.bool_)
        while rest.any():
            first = int(rest.argmax())
            members = kinds == kinds[first]
            found.append((self[first], members))
            rest &= ~members
        return found

    @property
    def _examples(self) -> Iterable[Tensor]:
        """Tensors among which every dtype and device occurs, and what is not contiguous."""
        return self.tensors if self._kinds is None else [example for example, _ in self._kinds]

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.array(list(map(_LOOK[name], self)), dtype=np.int64)


class ParamList(TensorList):
    """Parameters. Of thousands, all is looked up together with what :class:`GradList` needs to know."""

    def grads(self, params: list[Tensor], places: slice | NDArray[np.int64]) -> "GradList":
        """Return the gradients of ``params``, the parameters at these places, as they were when all was looked up."""
        found = None if self._facts is None else self._facts.grads
        return GradList(params, None if found is None else found.at(places))

    @cached_property
    def _facts(self) -> Facts | None:
        return tensor_reader.read(self._given, grads=True)


class GradList(TensorList):
    """The gradients of parameters.

    Until :meth:`hold`, or until one passes over them, their parameters alone keep them alive.

    Args:
        params: a list is used as it is, not copied.
        memory: what was read of all gradients; None: what is to be known is looked up in each.
    """

    def __init__(self, params: Iterable[Tensor] = (), memory: Memory | None = None) -> None:
        super().__init__(params)
        self._read = memory

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients themselves."""
        return self._held

    def hold(self) -> None:
        """See :class:`TensorList`."""
        self._held  # noqa: B018

    @property
    def usable(self) -> bool:
        """Whether every parameter has a gradient, a plain strided tensor."""
        if self._read is not None:
            return True
        return set(map(type, self)) <= {Tensor} and set(map(_LAYOUT, self)) <= {torch.strided}

    def __getitem__(self, index: Any) -> Any:
        return self._given[index].grad if isinstance(index, int) else self._held[index]

    @cached_property
    def _held(self) -> list[Tensor]:
        return list(map(_GRAD, self._given))

    @cached_property
    def _facts(self) -> Facts | None:
        return None

    @property
    def _memory(self) -> Memory | None:
        return self._read


class _Joined(TensorList):
    """Several lists as one."""

    def __init__(self, parts: Sequence[TensorList]) -> None:
        super().__init__()
        self._parts = parts

    @property
    def tensors(self) -> list[Tensor]:
        return self._held

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        return np.concatenate([part.dtype_codes(codes) for part in self._parts])

    @cached_property
    def _held(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part]

    @property
    def _examples(self) -> Iterable[Tensor]:
        return chain.from_iterable(part._examples for part in self._parts)

    @cached_property
    def _facts(self) -> Facts | None:
        return None

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(part, name) for part in self._parts])
