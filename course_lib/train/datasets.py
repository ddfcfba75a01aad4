"""The data, held on the device: the digits, or the text of Python's documentation.

The text comes with Python (`pydoc_data`, what `help("for")` prints): about 460 KB of English and
code. It is read as bytes, and cut into pieces of `context` bytes that do not overlap; the target of
each byte is the next one.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.data import digits
from course_lib.train.config import ConfigError, TrainConfig

Examples = tuple[Tensor, Tensor]
"""(inputs, targets), both N long."""

_TEST_FRACTION = 0.1  # the end of the text, because neighbouring pieces of text are similar


@dataclass(frozen=True)
class Dataset:
    """Examples for training and for testing, and the unit in which they are counted.

    Attributes:
        train: float images of shape (N, 64) and int64 labels (N,); or bytes (int32) of shape
            (N, context) and the bytes after each of them, of the same shape.
        test: the same kind of data, never used for training.
        unit: `samples` or `tokens`, the unit of speed.
        units_per_example: 1, or `context`.

    """

    train: Examples
    test: Examples
    unit: str
    units_per_example: int

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that identify the training examples.

        For example, the documentation's text differs between releases of Python.
        """
        digest = hashlib.sha256()
        for tensor in self.train:
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def load_dataset(config: TrainConfig, device: torch.device) -> Dataset:
    """Return the examples for `config.model`, on `device`.

    Raises ConfigError if `context` is longer than a text.
    """
    if config.model == "transformer":
        text = documentation_text()
        cut = len(text) - round(_TEST_FRACTION * len(text))
        train, test = (pieces(part.int(), config.context) for part in (text[:cut], text[cut:]))
        unit, units = "tokens", config.context
    else:
        # Use the dtype of the parameters, so that `set_default_dtype` sets both.
        dtype = torch.get_default_dtype()
        train, test = ((part.tensors[0].to(dtype), part.tensors[1]) for part in digits())
        unit, units = "samples", 1
    on_device = [(inputs.to(device), targets.to(device)) for inputs, targets in (train, test)]
    return Dataset(on_device[0], on_device[1], unit, units)


def documentation_text() -> Tensor:
    """Return the topics of Python's own documentation as bytes: uint8, of shape (length,)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def pieces(text: Tensor, context: int) -> Examples:
    """Cut `text`, of shape (length,), into inputs and targets of shape (N, context).

    targets[i, t] is the byte after inputs[i, t]. Both are views, and N = (length - 1) // context.

    Raises ConfigError if that is 0.
    """
    count = (len(text) - 1) // context
    if count < 1:
        raise ConfigError(
            f"--context {context} is too large for a text of {len(text)} bytes: use at most "
            f"{len(text) - 1}"
        )
    length = count * context
    return text[:length].view(count, context), text[1 : length + 1].view(count, context)
