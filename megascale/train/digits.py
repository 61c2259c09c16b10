"""The task ``digits``: a small U-Net labels the pixels of scenes composed from scikit-learn's handwritten digits."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from megascale.errors import ArgumentError
from megascale.train.config import DigitsConfig
from megascale.train.half import Conv2d
from megascale.train.tasks import Batch

CLASSES = 11  # background, then the digits 0 to 9
SOURCE_SIZE = 8  # height and width of scikit-learn's images, pixels
HELDOUT_IMAGES = 360  # of 1797; the split does not depend on the run's seed
SPLIT_SEED = 1797
INK = 0.3  # brightness, of 1, above which a pixel shows its digit
MEAN, DEVIATION = 0.1, 0.3  # of the pixels of a typical scene
PRIOR = 0.01  # initial probability of every class


class DigitsTask:
    """Label every pixel: background, or which digit's ink it is.

    A scene is a grid of cells. A cell holds, with probability ``fill``, one digit at a random place inside it. Training
    and held-out scenes are composed from disjoint sets of images. A scene depends only on seed, step and index.

    The loss is one-vs-rest logistic regression, averaged over every class of every pixel of the batch. With the default
    8 x 256 x 256 x 11 terms a logit's gradient is at most 1.7e-7, three of fp16's smallest steps: without a loss scale
    most of it is rounded to zero.
    """

    def __init__(self, config: DigitsConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.num_heldout = config.heldout_scenes
        self._side = SOURCE_SIZE * config.patch
        self._cell = config.size // config.grid
        if config.fill > 1:
            raise ArgumentError(f"digits.fill is a probability: it must be 1 or less, got {config.fill!r}")
        if self._cell < self._side:
            raise ArgumentError(
                f"digits.size={config.size} over digits.grid={config.grid} makes cells of {self._cell} pixels, too "
                f"small for digits of {self._side} ({SOURCE_SIZE} x digits.patch={config.patch}); raise digits.size to "
                f"{self._side * config.grid} or more"
            )
        if config.size % (multiple := config.patch * 2**config.depth):
            raise ArgumentError(
                f"digits.size={config.size} must be a multiple of {multiple}: digits.patch={config.patch} times 2 to "
                f"the power of digits.depth={config.depth}"
            )
        from sklearn.datasets import load_digits  # takes 2 s: who only looks at this module does without

        data = load_digits()
        images = torch.from_numpy(data.images.astype(np.float32) / 16)
        if config.patch > 1:
            images = functional.interpolate(
                images[:, None], scale_factor=config.patch, mode="bilinear", align_corners=False
            )[:, 0]
        self._images: NDArray[np.float32] = images.numpy()
        self._labels: NDArray[np.int64] = data.target.astype(np.int64) + 1
        order = np.random.default_rng(SPLIT_SEED).permutation(len(self._labels))
        self.heldout_images, self.train_images = order[:HELDOUT_IMAGES], order[HELDOUT_IMAGES:]

    def model(self) -> nn.Module:
        """Return the U-Net."""
        return UNet(self._config.width, self._config.depth, self._config.patch)

    def batch(self, step: int, first: int, last: int) -> Batch:
        """Return scenes ``first`` to ``last`` of the global batch of ``step``; see :meth:`heldout` for the shapes."""
        return self._stacked([self.scene(self.train_images, (0, step, index)) for index in range(first, last)])

    def heldout(self, first: int, last: int) -> Batch:
        """Return held-out scenes: inputs [scenes, 1, size, size], targets [scenes, patch ** 2, size / patch, ...]."""
        return self._stacked([self.scene(self.heldout_images, (1, 0, index)) for index in range(first, last)])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross entropy of ``logits`` [scenes, 11, ...] over all classes and ``targets``."""
        right = logits.gather(1, targets[:, None])
        return (functional.softplus(logits).sum() - right.sum()) / logits.numel()

    def told(self, accuracy: float, loss: float) -> str:
        """Return the loss, and the share of pixels that were labelled right."""
        return f"held-out scenes: loss {loss:.4f}, {accuracy:.2%} of pixels right"

    def scene(
        self, images: NDArray[np.int64], key: tuple[int, int, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return one scene, made of ``images`` (indices) and decided by ``key``: pixels and their labels.

        Both have the shape [size, size]; brightness is 0 to 1 before the noise.
        """
        config, side, cell = self._config, self._side, self._cell
        random = np.random.default_rng([self._seed, *key])
        cells = (config.grid, config.grid)
        chosen = images[random.integers(len(images), size=cells)]
        present = random.random(cells) < config.fill
        shifts = random.integers(cell - side + 1, size=(2, *cells))
        margin = (config.size - config.grid * cell) // 2
        pixels = np.zeros((config.size, config.size), np.float32)
        labels = np.zeros((config.size, config.size), np.int64)
        for row, column in zip(*np.nonzero(present), strict=True):
            top = margin + row * cell + shifts[0, row, column]
            left = margin + column * cell + shifts[1, row, column]
            image = self._images[chosen[row, column]]
            pixels[top : top + side, left : left + side] = image
            labels[top : top + side, left : left + side] = (image > INK) * self._labels[chosen[row, column]]
        pixels += np.float32(config.noise) * random.standard_normal(pixels.shape, dtype=np.float32)
        return pixels, labels

    def _stacked(self, scenes: list[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> Batch:
        pixels, labels = (torch.from_numpy(np.stack(each))[:, None] for each in zip(*scenes, strict=True))
        return Batch((pixels - MEAN) / DEVIATION, functional.pixel_unshuffle(labels, self._config.patch))


class UNet(nn.Module):
    """A U-Net without normalisation, over patches: the image is folded so that ``patch`` ** 2 pixels become channels.

    Args:
        width: channels of the first level; each next one has twice as many and half the resolution.
        depth: number of times the resolution is halved.
        patch: height and width of a patch, pixels.
    """

    def __init__(self, width: int, depth: int, patch: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        before = [patch**2, *widths]
        self.patch = patch
        self.down = nn.ModuleList(Block(before[level], widths[level]) for level in range(depth + 1))
        self.up = nn.ModuleList(
            Block(widths[level] + widths[level + 1], widths[level]) for level in reversed(range(depth))
        )
        self.head = Conv2d(width, CLASSES * patch**2, 1)
        nn.init.normal_(self.head.weight, std=0.01)
        if self.head.bias is not None:
            nn.init.constant_(self.head.bias, math.log(PRIOR / (1 - PRIOR)))

    def forward(self, image: Tensor) -> Tensor:
        """Map [scenes, 1, height, width] to logits [scenes, 11, patch ** 2, height / patch, width / patch].

        Dimension 2 runs over the pixels of a patch, row by row, as in torch.nn.functional.pixel_unshuffle.
        """
        x = functional.pixel_unshuffle(image, self.patch).contiguous(memory_format=torch.channels_last)
        finer: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            finer.append(x)
        finer.pop()
        for block in self.up:
            x = block(torch.cat([finer.pop(), functional.interpolate(x, scale_factor=2.0, mode="nearest")], 1))
        logits: Tensor = self.head(x)
        return logits.unflatten(1, (CLASSES, self.patch**2))


class Block(nn.Module):
    """Two 3 x 3 convolutions, the second added to what it reads."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first = Conv2d(channels, width, 3, padding=1)
        self.second = Conv2d(width, width, 3, padding=1)
        for convolution in (self.first, self.second):
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [scenes, channels, height, width] to [scenes, width, height, width]."""
        x = functional.relu(self.first(x))
        return functional.relu(x + self.second(x))
