"""The task digits: scenes, labels, the U-Net's layout, and the loss whose gradients need a scale."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from megascale.errors import ArgumentError
from megascale.train.__main__ import main
from megascale.train.config import DigitsConfig
from megascale.train.digits import CLASSES, DEVIATION, HELDOUT_IMAGES, INK, MEAN, DigitsTask

SMALL = DigitsConfig(size=64, grid=3, patch=2, width=4, depth=1, heldout_scenes=5)
# One 8 x 8 image in every cell, without noise or room to move: a scene can be read back.
LEGIBLE = DigitsConfig(size=48, grid=6, patch=1, depth=1, fill=1.0, noise=0.0)


def test_scenes_depend_on_seed_step_and_index_alone() -> None:
    """The same global batch whatever the number of ranks; another one for another step or seed."""
    task = DigitsTask(SMALL, seed=3)
    whole = task.batch(5, 0, 4)
    for part in (1, 2):
        parts = [task.batch(5, first, first + part) for first in range(0, 4, part)]
        assert torch.equal(torch.cat([one.inputs for one in parts]), whole.inputs)
        assert torch.equal(torch.cat([one.targets for one in parts]), whole.targets)
    again = DigitsTask(SMALL, seed=3).batch(5, 0, 4)
    assert torch.equal(again.inputs, whole.inputs)
    assert torch.equal(again.targets, whole.targets)
    for other in (task.batch(6, 0, 4), DigitsTask(SMALL, seed=4).batch(5, 0, 4), task.heldout(0, 4)):
        assert not torch.equal(other.targets, whole.targets)
    assert not torch.equal(whole.targets[0], whole.targets[1])


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_a_scene_shows_what_its_labels_say(part: str) -> None:
    """Every cell holds an image of its own part of the data, labelled with its digit where there is ink."""
    task = DigitsTask(LEGIBLE, seed=0)
    allowed = task.train_images if part == "train" else task.heldout_images
    batch = task.batch(0, 0, 2) if part == "train" else task.heldout(0, 2)
    from sklearn.datasets import load_digits  # not above: every process of the tests reads this file

    data = load_digits()
    images = torch.from_numpy(data.images[allowed].astype(np.float32) / 16)
    digits = torch.from_numpy(data.target[allowed]) + 1
    brightness = batch.inputs[:, 0] * DEVIATION + MEAN
    for scene, labels in zip(brightness, batch.targets[:, 0], strict=True):
        for row in range(0, 48, 8):
            for column in range(0, 48, 8):
                cell = scene[row : row + 8, column : column + 8]
                found = (images - cell).abs().amax((1, 2)).argmin()
                torch.testing.assert_close(cell, images[found], rtol=0, atol=1e-6)
                expected = torch.where(images[found] > INK, digits[found], 0)
                assert torch.equal(labels[row : row + 8, column : column + 8], expected)


def test_heldout_images_are_never_trained_on() -> None:
    """The split is disjoint and complete, and the same for every seed."""
    tasks = [DigitsTask(SMALL, seed=seed) for seed in (0, 1)]
    train, heldout = set(tasks[0].train_images), set(tasks[0].heldout_images)
    assert not train & heldout
    assert len(heldout) == HELDOUT_IMAGES
    assert train | heldout == set(range(1797))
    assert set(tasks[1].heldout_images) == heldout


def test_default_gradients_underflow_without_a_scale() -> None:
    """What the experiment rests on: at scale 1 the logits' fp16 gradients are zero, at 65536 hardly any is."""
    task = DigitsTask(DigitsConfig(), seed=0)
    targets = task.batch(0, 0, 8).targets
    # As a network that has learnt the classes' frequencies, and no more.
    frequency = torch.bincount(targets.flatten(), minlength=CLASSES) / targets.numel()
    logits = torch.logit(frequency)[:, None, None, None].expand(8, CLASSES, *targets.shape[1:]).half()
    zeros = {}
    for scale in (1.0, 65536.0):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(leaf.float(), targets) * scale, leaf)
        zeros[scale] = float((gradient == 0).double().mean())
    assert zeros[1.0] > 0.85
    assert zeros[65536.0] < 0.01


REFUSED = [
    (
        DigitsConfig(size=128),
        r"digits.size=128 over digits.grid=6 makes cells of 21 pixels.*digits.size to 192 or more",
    ),
    (DigitsConfig(grid=300), "cells of 0 pixels, too small for digits of 32"),
    (DigitsConfig(size=200, depth=2), r"digits.size=200 must be a multiple of 16: digits.patch=4"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_impossible_sizes_are_refused(config: DigitsConfig, message: str) -> None:
    """Sizes that do not fit together are named with the remedy, before anything is computed."""
    with pytest.raises(ArgumentError, match=message):
        DigitsTask(config, seed=0)


@pytest.mark.default("fp32")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_training_lowers_the_loss(precision: str, tmp_path: Path) -> None:
    """A short run of the program on small scenes learns, in each precision."""
    options = ["digits.size=64", "digits.grid=3", "digits.patch=2", "digits.width=4", "digits.heldout_scenes=4"]
    options += ["optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.clip_grad=1", "optimizer.warmup_steps=5"]
    options += [f"precision={precision}", "steps=30", "threads=1", f"output_dir={tmp_path}", "wandb_name=run"]
    assert main(options) == 0
    with open(tmp_path / "run" / "metrics.csv", newline="") as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
