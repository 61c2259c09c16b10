"""Rule: all that the library knows of one optimizer, but for its arithmetic, which kernels have.

Every table of optimizers in the library is derived from :data:`megascale.rules.RULES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megascale.utils.nests import tensors_in

if TYPE_CHECKING:
    from megascale.config import OptimizerConfig

Options = Mapping[str, Any]
Values = Callable[[torch.optim.Optimizer], list[Any]]

FIRST, SECOND = "exp_avg_dtype", "exp_avg_sq_dtype"
"""The fields of OptimizerConfig that say how first moments (momentum), and second moments, are held."""
FIRST_DTYPE, SECOND_DTYPE = torch.int8, torch.uint8
"""The dtypes of moments held as 8-bit codes, see :mod:`megascale.kernels.compact_moments`."""
CODE_DTYPES = (FIRST_DTYPE, SECOND_DTYPE)


@dataclass(frozen=True)
class Moment:
    """A state of a parameter's shape.

    Attributes:
        name: torch's, the key in the optimizer's state.
        field: of the config, :data:`FIRST` or :data:`SECOND`: says in which dtype it is held.
        codes: the dtype of its 8-bit codes. None: it stays fp32 where the field asks for codes.
    """

    name: str
    field: str
    codes: torch.dtype | None = None

    def dtype(self, asked: torch.dtype) -> torch.dtype:
        """Return how the moment of an fp32 main param is held where its field asks for a dtype."""
        return torch.float32 if self.codes is None and asked in CODE_DTYPES else asked


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one param group, as a kernel takes them. Each rule adds its own."""

    lr: float | Tensor


@dataclass(frozen=True)
class Variant:
    """A rule as an estimate names it: a class, and the options that decide which state it keeps."""

    kind: type[torch.optim.Optimizer]
    options: Options = field(default_factory=dict)


class Rule:
    """One optimizer whose update runs on kernels. A rule has no state; options are those of a param group.

    Attributes:
        name: in ``OptimizerConfig.optimizer``.
        kinds: the classes whose steps are taken over: exact types only, as a subclass may have changed ``step()``.
        moments: all that it may keep, also by options that the kernels cannot run.
        numbers: options that are numbers, without the learning rate.
        flags: the other options that must be there.
        may_read: options that need not be there.
        optional_state: that may be missing, as an option that needs it can be switched on at any time.
        kernel: the method of a backend that runs it; where a backend has none, the reference's runs. None: the rule is
            no single kernel, and :func:`megascale.step.update_selection.select_update` knows its update.
        is_elementwise: each element is updated from its own gradient and state, so that a parameter can be cut
            anywhere.
        decoupled: of ``kinds``, those whose weight decay shrinks weights rather than adding to gradients.
        variants: by the names that :func:`megascale.estimation.estimate` takes.
        fields: by fields of OptimizerConfig that are this rule's: what an optimizer has there. Empty: it has none.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    moments: ClassVar[tuple[Moment, ...]]
    numbers: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]]
    may_read: ClassVar[tuple[str, ...]] = ()
    optional_state: ClassVar[tuple[str, ...]] = ()
    kernel: ClassVar[str | None]
    is_elementwise: ClassVar[bool] = True
    decoupled: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = ()
    variants: ClassVar[Mapping[str, Variant]]
    fields: ClassVar[Mapping[str, Values]] = {}

    def state_names(self, options: Options) -> list[str]:
        """Return the names of the moments that these options need, also where the kernels cannot run them."""
        return [moment.name for moment in self.moments]

    def counts_steps(self, options: Options) -> bool:
        """Whether the arithmetic depends on a parameter's number of landed steps."""
        return False

    def obstacle(self, options: Options) -> str | None:
        """Return why the kernels cannot run these options, so that the optimizer's own ``step()`` does; None: they can.

        The reason follows "<the class> has", and ends with the remedy. Tensors other than the rate need
        torch's own step.
        """
        has_tensors = any(True for _ in tensors_in([options[name] for name in self.numbers]))
        return "options that are tensors: give numbers" if has_tensors else None

    def hyper(self, options: Options, lr: float | Tensor, kind: type) -> Hyper:
        """Return the hyperparameters. Raises ArgumentError for an option of a wrong type, naming it.

        Args:
            options: as they are.
            lr: checked.
            kind: the optimizer's class, of ``kinds``.
        """
        raise NotImplementedError

    def build(self, config: "OptimizerConfig", groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer that ``config`` asks for, over param groups."""
        raise NotImplementedError
