"""Models side by side against each of them alone, as a module of PyTorch."""

import torch
from torch import nn

from course_lib.data import digits
from course_lib.many_models import classifiers, gradients, losses, scores


def module_of(w) -> nn.Sequential:
    """Return the model with the weights `w` of one row."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    first, bias, last, end = w.split([64 * 32, 32, 320, 10])
    for layer, weight, shift in ((model[0], first, bias), (model[2], last, end)):
        layer.weight.data.copy_(weight.view(len(layer.weight.T), -1).T)
        layer.bias.data.copy_(shift)
    return model


def test_every_model_is_that_of_its_seed_with_its_own_rows_and_gradient() -> None:
    images, labels = digits()[0].tensors
    rows = torch.randint(len(images), (3, 5), generator=torch.Generator().manual_seed(0))
    w = torch.stack([classifiers(seeds=3), 1.5 * classifiers(seeds=3)])  # (rates, seeds, 2410)
    batched = gradients(w, images[rows], labels[rows])
    for seed in range(3):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        torch.testing.assert_close(scores(w[0], images)[seed], module(images))
    for rate in range(2):
        for seed in range(3):
            model = module_of(w[rate, seed])
            loss = nn.functional.cross_entropy(model(images[rows[seed]]), labels[rows[seed]])
            torch.testing.assert_close(losses(w, images[rows], labels[rows])[rate, seed], loss)
            loss.backward()
            pairs = [(layer.weight.grad.T, layer.bias.grad) for layer in (model[0], model[2])]
            flat = torch.cat([gradient.flatten() for pair in pairs for gradient in pair])
            torch.testing.assert_close(batched[rate, seed], flat)
