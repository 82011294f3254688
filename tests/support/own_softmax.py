"""Compare the attention that attnlens captures with the softmaxes of a model's own eager pass."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlens.errors import FAILURES, ModelError
from attnlens.models import hooks


class _Recorder(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax) and result.dim() >= 3:
            self.weights.append(result.detach())
        return result


def softmaxes(model, inputs):
    """Return every softmax of three or more axes in the model's pass under transformers' eager attention."""
    with torch.no_grad(), hooks.implementation(model, "eager"), _Recorder() as mode:
        try:
            hooks.forward(model, inputs)
        except FAILURES as error:
            raise ModelError(f"It does not run under transformers' eager attention: {error}", "") from error
    return mode.weights


def difference(model, inputs):
    """Return the largest ‖P − P_own‖ / ‖P_own‖ of a site, with P_own the nearest softmax; None if a site lacks one."""
    own, worst = softmaxes(model, inputs), []
    for reached in hooks.survey(model, inputs):
        ours = reached.call.query_key(reached.site).attention
        seeing = ours.sum(-1, keepdim=True) > 0
        alike = [other for one in own for other in _alike(one, ours) if bool(other.isfinite().all())]
        errors = [float((seeing * (ours - one)).norm() / (seeing * one).norm()) for one in alike]
        worst.append(min(errors, default=None))
    return None if None in worst or not worst else max(worst)


def _alike(one, ours):
    """Yield the softmax in the shape of ours: without a sink's column, and with windows before or after the heads."""
    for matrix in (one, one[..., :-1]):
        if matrix.shape[-2:] == ours.shape[-2:] and matrix.numel() == ours.numel():
            for axis in range(1, max(2, matrix.dim() - 2)):
                moved = matrix.movedim(axis, -3) if matrix.dim() > 4 else matrix
                yield moved.double().reshape(ours.shape)
