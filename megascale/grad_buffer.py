"""Flat gradient buffers: one tensor for all main grads of one kind, with a view for each parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megascale.layout import Bucket, BufferLayout


class GradBuffer:
    """The main grads of one layout, contiguous in memory, zero at first.

    Attributes:
        layout: where each parameter lies.
        flat: shape [layout.numel], the accumulation dtype. Padding stays zero.
        main_grads: by name, a view of ``flat`` in the parameter's shape.
    """

    def __init__(self, layout: BufferLayout, params: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        device = next(iter(params.values())).device
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.main_grads: dict[str, Tensor] = {}
        for placement in layout.placements:
            view = self.flat[placement.start : placement.stop]
            self.main_grads[placement.name] = view.view(params[placement.name].shape)

    def bucket(self, bucket: Bucket) -> Tensor:
        """Return a bucket's part of the buffer, padding included."""
        return self.flat[bucket.start : bucket.stop]

    def zero_(self) -> None:
        """Begin a new accumulation."""
        self.flat.zero_()
